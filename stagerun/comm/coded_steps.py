"""The collectives that the thread of `stagerun.comm.lossless` carries out: how each codes what it sends and decodes what comes."""

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stagerun.base.errors import PeerError
from stagerun.comm.group import Comm
from stagerun.comm.planes import Codec, most_bytes
from stagerun.comm.store import AGAIN

Values = NDArray[np.float32]


class Link(NamedTuple):
    """What a step is sent with."""

    comm: Comm
    lengths: Comm  # the same ranks; lengths of pieces don't queue up here behind pieces
    codec: Codec


class Step:
    """One collective on its way through the thread."""

    after: "Step | None" = None  # has to have been finished before

    def __init__(self, like: Tensor | None, size: int) -> None:
        """`like`: a tensor of the step; what is queued on its GPU by now, comes first. `size`: bytes that are on their way, uncoded."""
        self.size = size
        self.done = threading.Event()
        self.error: Exception | None = None
        self.arrived: Callable[[], None] | None = None
        self.device = like.device if like is not None else torch.device("cpu")
        self.ready = torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None

    def start(self, link: Link) -> Callable[[], None]:
        """Starts sending; the answer waits for what comes."""
        raise NotImplementedError

    def finish(self, codec: Codec) -> None:
        """Does what is left when it has come."""

    def end(self, error: Exception | None) -> None:
        self.error = error
        if self.arrived is not None and error is None:
            self.arrived()
        self.done.set()


class Plain(Step):
    def __init__(self, begin: Callable[[Comm], Callable[[], None]], like: Tensor | None) -> None:
        super().__init__(like, like.nbytes if like is not None else 0)
        self.begin = begin

    def start(self, link: Link) -> Callable[[], None]:
        return self.begin(link.comm)


class _Coded(Step):
    """Hands `outgoing()` out, a vector for each rank, and fills `incoming`, a vector from each. This rank's own, at `rank`, are
    left alone."""

    incoming: Sequence[Values]
    pieces: Sequence[Tensor]  # as they came, by rank

    def outgoing(self) -> Sequence[Values]:
        """Also sets `incoming`."""
        raise NotImplementedError

    def start(self, link: Link) -> Callable[[], None]:
        outgoing = self.outgoing()
        others = [rank for rank in range(link.comm.size) if rank != link.comm.rank]
        room = np.empty(sum(most_bytes(len(outgoing[rank])) for rank in others), np.uint8)
        sizes, end = [0] * link.comm.size, 0
        for rank in others:
            sizes[rank] = link.codec.encode(outgoing[rank], room[end:])
            end += sizes[rank]
        come = _lengths(link.lengths, sizes, self.incoming)
        received = torch.empty(sum(come), dtype=torch.uint8)
        self.pieces = received.split(come)
        return link.comm.exchange(torch.from_numpy(room[:end]), sizes, received, come)

    def finish(self, codec: Codec) -> None:
        for rank, (piece, values) in enumerate(zip(self.pieces, self.incoming, strict=True)):
            if len(piece):
                try:
                    codec.decode(piece.numpy(), values)
                except ValueError as error:
                    raise PeerError(f"what worker {rank} sent of its gradients is damaged: {error}", AGAIN) from error
        self.pieces = ()


class _Shared(_Coded):
    """Hands the same vector out to all."""

    def start(self, link: Link) -> Callable[[], None]:
        mine = self.outgoing()[link.comm.rank]
        room = np.empty(most_bytes(len(mine)), np.uint8)
        size = link.codec.encode(mine, room)
        sizes = [size * (rank != link.comm.rank) for rank in range(link.comm.size)]
        come = _lengths(link.lengths, sizes, self.incoming)
        self.pieces = [torch.empty(length, dtype=torch.uint8) for length in come]
        own = torch.from_numpy(room[:size])
        return link.comm.complete([own if rank == link.comm.rank else piece for rank, piece in enumerate(self.pieces)])


def _lengths(comm: Comm, sizes: Sequence[int], incoming: Sequence[Values]) -> list[int]:
    """Bytes that come from each rank, to which `sizes` go. PeerError if they can't be those of `incoming`."""
    found = torch.empty(comm.size, dtype=torch.int64)
    comm.exchange(torch.tensor(sizes, dtype=torch.int64), [1] * comm.size, found, [1] * comm.size)()
    come: list[int] = found.tolist()
    for rank, (length, values) in enumerate(zip(come, incoming, strict=True)):
        most = most_bytes(len(values))
        if not (length == 0 if rank == comm.rank else 1 <= length <= most):
            raise PeerError(
                f"worker {rank} announces {length} bytes of gradients where 1 to {most} are expected", AGAIN
            )
    return come


class Exchange(_Coded):
    def __init__(
        self, sent: Tensor, sent_sizes: Sequence[int], received: Tensor, received_sizes: Sequence[int], rank: int
    ) -> None:
        super().__init__(sent, sent.nbytes)
        self.sent, self.received, self.rank = sent, received, rank
        self.sent_sizes, self.received_sizes = sent_sizes, received_sizes

    def outgoing(self) -> Sequence[Values]:
        self.filled = _room(self.received)
        sent, self.incoming = _pieces(_values(self.sent), self.sent_sizes), _pieces(self.filled, self.received_sizes)
        self.incoming[self.rank][:] = sent[self.rank]
        return sent

    def finish(self, codec: Codec) -> None:
        super().finish(codec)
        _store(self.filled, self.received)
        del self.filled, self.incoming


class Complete(_Shared):
    def __init__(self, tensors: Sequence[Tensor], rank: int) -> None:
        super().__init__(tensors[rank], sum(tensor.nbytes for tensor in tensors))
        self.tensors, self.rank = tensors, rank

    def outgoing(self) -> Sequence[Values]:
        self.incoming = [
            _values(tensor) if rank == self.rank else _room(tensor) for rank, tensor in enumerate(self.tensors)
        ]
        return self.incoming

    def finish(self, codec: Codec) -> None:
        super().finish(codec)
        for rank, (values, tensor) in enumerate(zip(self.incoming, self.tensors, strict=True)):
            if rank != self.rank:
                _store(values, tensor)
        self.incoming = ()


class Collect(_Coded):
    """The first half of a sum: of each piece of the vector, its owner gets what all have, and adds it up."""

    def __init__(self, tensor: Tensor, rank: int, size: int) -> None:
        super().__init__(tensor, tensor.nbytes)
        self.tensor, self.rank = tensor, rank
        self.sizes = ring_pieces(tensor.numel(), tensor.element_size(), size)

    def outgoing(self) -> Sequence[Values]:
        self.values = _values(self.tensor)
        self.parts = _pieces(self.values, self.sizes)
        own = self.parts[self.rank]
        self.incoming = [own if rank == self.rank else np.empty_like(own) for rank in range(len(self.sizes))]
        return self.parts

    def finish(self, codec: Codec) -> None:
        super().finish(codec)
        ring_sum(self.rank, self.incoming, out=self.parts[self.rank])
        self.incoming = ()


class HandOut(_Shared):
    """The second half: the sums to all."""

    def __init__(self, collect: Collect) -> None:
        super().__init__(collect.tensor, collect.size)
        self.after = self.collect = collect

    def outgoing(self) -> Sequence[Values]:
        self.incoming = self.collect.parts
        return self.incoming

    def finish(self, codec: Codec) -> None:
        super().finish(codec)
        _store(self.collect.values, self.collect.tensor)
        # Whoever waits may keep this step for an iteration: on a GPU those are copies.
        del self.after, self.collect, self.incoming


# What gloo's ring all-reduce computes: where it cuts a vector, and in which order it adds. With these, another way of sending has its
# bits. The rules are in gloo/allreduce.cc, function `ring`; tests/process/test_comm_lossless.py compares with the installed torch.

# The most bytes that gloo sends at a time, unless it is asked for another number; torch doesn't ask.
SEGMENT_BYTES = 1 << 20


def ring_pieces(elements: int, element_size: int, size: int) -> list[int]:
    """Elements of each rank's piece of a vector; those of the last ranks may be smaller, or empty."""
    segments = _up(max(-(-elements * element_size // SEGMENT_BYTES), 2 * size), size)
    width = segments // size * _up(-(-elements * element_size // segments), element_size) // element_size
    return [min(elements, (rank + 1) * width) - min(elements, rank * width) for rank in range(size)]


def ring_sum(rank: int, parts: Sequence[Values], out: Values) -> None:
    """Puts the sum of `parts`, which are those that the ranks have of piece `rank`, into `out`, which may be one of them.

    Piece r ends at rank r. It starts at rank r-1, goes down the ring, and each rank adds what it has: ((x[r-1] + x[r-2]) + ...) + x[r].
    """
    order = [parts[(rank - step) % len(parts)] for step in range(1, len(parts) + 1)]
    sum = order[0]
    for step, part in enumerate(order[1:], 2):
        sum = np.add(part, sum, out=out if step == len(order) else None)


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _pieces(values: Values, sizes: Sequence[int]) -> list[Values]:
    return np.split(values, np.cumsum(sizes[:-1]))


def _values(tensor: Tensor) -> Values:
    """On the CPU the tensor itself, else a copy."""
    return cast(Values, tensor.detach().cpu().numpy())


def _room(tensor: Tensor) -> Values:
    """Where what is to be in a tensor can be written: on the CPU the tensor itself."""
    return _values(tensor if tensor.device.type == "cpu" else torch.empty_like(tensor, device="cpu"))


def _store(values: Values, tensor: Tensor) -> None:
    if tensor.device.type != "cpu":
        tensor.copy_(torch.from_numpy(values))
