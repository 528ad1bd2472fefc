"""The workers of the job as one object: who I am, and the few collectives that the rest needs.

`Comm` is the whole surface. Every method but `rank` and `size` is collective: all ranks call it, in the same order.
A peer that is gone becomes PeerError. No objects are pickled: what crosses the network is tensors and bytes.
"""

import copy
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from stagerun.base.errors import AGAIN, PeerError
from stagerun.base.spans import Spans
from stagerun.comm.store import first_words, misses_a_peer, private, served
from stagerun.system.pulse import Pulse
from stagerun.system.world import World

# Longest silence of a collective before the peers are given up, whoever is to blame, where no monitor watches the ranks. It covers what
# one rank does while the others wait: rank 0 verifying a snapshot, making synthetic images.
TIMEOUT = timedelta(minutes=30)
# Where the monitors (`stagerun.launch.watch`) see to it, which know more: they may have learned to wait for longer, and a job that was
# suspended over a weekend goes on. Also where the user wants no time-outs. Below what milliseconds in 32 bits can hold.
PATIENT = timedelta(days=7)
GRADIENTS = "add up gradients"


@dataclass(slots=True)
class Traffic:
    """Bytes of gradients that this rank has handed to the network, without what the network adds. A ring of W ranks sends each number
    2 (W - 1) / W times; what all ranks get is counted once for each of the others."""

    sent: int = 0
    _adding: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, size: int) -> None:
        """From any thread."""
        with self._adding:
            self.sent += size


class Comm(Protocol):
    rank: int
    size: int
    traffic: Traffic
    pulse: Pulse  # this rank's signs of life
    spans: Spans | None  # where it is noted how long gradients are on their way; None: nowhere

    def part(self, ranks: Sequence[int]) -> "Comm | None":
        """These `ranks`, in growing order, as a job of their own, on them; None on the others. Collective over all. Only `close` of the whole
        ends it."""

    def all_reduce(self, tensor: Tensor, doing: str = GRADIENTS) -> Callable[[], None]:
        """Starts summing `tensor` over the ranks in place; the answer waits for it. The sum has the same bits on each rank.

        `doing` is what an error says was tried. A profile shows sums of gradients alone.
        """

    def exchange(
        self, sent: Tensor, sent_sizes: Sequence[int], received: Tensor, received_sizes: Sequence[int]
    ) -> Callable[[], None]:
        """Starts handing out `sent`, cut into a piece for each rank, and filling `received` with what each rank has for this one;
        the answer waits for it. Both are contiguous vectors; the sizes are in elements, by rank, and may be 0."""

    def complete(self, pieces: Sequence[Tensor]) -> Callable[[], None]:
        """Starts filling `pieces`, contiguous and as large everywhere: piece r is rank r's, and may be empty; the answer waits for it."""

    def broadcast(self, tensor: Tensor, src: int = 0) -> None:
        """`tensor` of rank `src` on every rank, in place."""

    def broadcast_bytes(self, data: bytes | None, src: int = 0) -> bytes:
        """`data` of rank `src`; the others pass None."""

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Everyone's `data`, by rank, on every rank."""

    def barrier(self) -> None:
        """Returns when every rank has called it."""

    def close(self) -> None:
        """Leaves the group, at the end of a job without error."""


def gather_json(comm: Comm, mine: Any) -> list[Any]:
    """Everyone's, by rank, on every rank, as JSON holds it. Collective."""
    return [json.loads(data) for data in comm.gather_bytes(json.dumps(mine).encode())]


class SoloComm:
    """A job of one worker: nothing to do."""

    rank = 0
    size = 1
    pulse = Pulse()  # that no one reads
    traffic = Traffic()  # stays 0
    spans: Spans | None = None

    def __init__(self, pulse: Pulse | None = None) -> None:
        if pulse is not None:
            self.pulse = pulse

    def part(self, ranks: Sequence[int]) -> "SoloComm":
        return self

    def all_reduce(self, tensor: Tensor, doing: str = GRADIENTS) -> Callable[[], None]:
        return lambda: None

    def exchange(
        self, sent: Tensor, sent_sizes: Sequence[int], received: Tensor, received_sizes: Sequence[int]
    ) -> Callable[[], None]:
        received.copy_(sent)
        return lambda: None

    def complete(self, pieces: Sequence[Tensor]) -> Callable[[], None]:
        return lambda: None

    def broadcast(self, tensor: Tensor, src: int = 0) -> None:
        pass

    def broadcast_bytes(self, data: bytes | None, src: int = 0) -> bytes:
        assert data is not None
        return data

    def gather_bytes(self, data: bytes) -> list[bytes]:
        return [data]

    def barrier(self) -> None:
        pass

    def close(self) -> None:
        pass


def default_store() -> dist.Store:
    """That of the default group, by the connection that torch uses."""
    return c10d._get_default_store()


class TorchComm:
    """torch.distributed's default group: gloo for tensors on the CPU, NCCL for those on a GPU."""

    def __init__(
        self, world: World, device: torch.device, pulse: Pulse | None = None, timeout: timedelta = TIMEOUT
    ) -> None:
        """Joins the meeting point in MASTER_ADDR and MASTER_PORT. PeerError if the others don't come."""
        self.rank, self.size, self.device = world.rank, world.size, device
        self.pulse, self.timeout, self.traffic = pulse or Pulse(), timeout, Traffic()
        self.spans: Spans | None = None
        self.group: dist.ProcessGroup | None = None  # the default group
        self.ranks: Sequence[int] = range(world.size)  # of the default group, by rank of this one
        self._parts: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        with peers("meet the other workers", self.pulse):
            store = private()
            self._served = served(world) if store is None else None
            dist.init_process_group(self._backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout)

    def part(self, ranks: Sequence[int]) -> "TorchComm | SoloComm | None":
        # Of the whole job alone: a part has no parts.
        key = tuple(ranks)
        if key == tuple(range(self.size)):
            return self
        # A group is never given back: a stage that starts again takes the same.
        if len(key) > 1 and key not in self._parts:
            self._parts[key] = dist.new_group(list(key), timeout=self.timeout)
        if self.rank not in key:
            return None
        if len(key) == 1:
            return SoloComm(self.pulse)
        part = copy.copy(self)
        part.rank, part.size, part.group, part.ranks = key.index(self.rank), len(key), self._parts[key], key
        return part

    def all_reduce(self, tensor: Tensor, doing: str = GRADIENTS) -> Callable[[], None]:
        with peers(doing):
            work = dist.all_reduce(tensor, group=self.group, async_op=True)
        if doing == GRADIENTS:
            self.traffic.add(2 * (self.size - 1) * tensor.nbytes // self.size)
        return self._waiting([work], tensor.nbytes, doing)

    def exchange(
        self, sent: Tensor, sent_sizes: Sequence[int], received: Tensor, received_sizes: Sequence[int]
    ) -> Callable[[], None]:
        with peers(GRADIENTS):
            work = dist.all_to_all_single(received, sent, list(received_sizes), list(sent_sizes), self.group, True)
        self.traffic.add((sum(sent_sizes) - sent_sizes[self.rank]) * sent.element_size())
        return self._waiting([work], sent.nbytes)

    def complete(self, pieces: Sequence[Tensor]) -> Callable[[], None]:
        # All at once: gloo's all-gather, which copies what it gets once more, takes two to three times as long.
        with peers(GRADIENTS):
            works = [
                dist.broadcast(piece, self.ranks[r], self.group, True)
                for r, piece in enumerate(pieces)
                if piece.numel()
            ]
        self.traffic.add((self.size - 1) * pieces[self.rank].nbytes)
        return self._waiting(works, sum(piece.nbytes for piece in pieces))

    def broadcast(self, tensor: Tensor, src: int = 0) -> None:
        with peers("hand out a tensor", self.pulse):
            dist.broadcast(tensor, self.ranks[src], self.group)
            self._settle()

    def broadcast_bytes(self, data: bytes | None, src: int = 0) -> bytes:
        size = torch.tensor([len(data) if data is not None else 0])
        self.broadcast(size, src)
        buffer = torch.frombuffer(bytearray(data or bytes(int(size))) or bytearray(1), dtype=torch.uint8)
        self.broadcast(buffer, src)
        return buffer.numpy().tobytes()[: int(size)]

    def gather_bytes(self, data: bytes) -> list[bytes]:
        return [self.broadcast_bytes(data if self.rank == src else None, src) for src in range(self.size)]

    def barrier(self) -> None:
        # Not dist.barrier(): with NCCL that would meet on the GPU and need one to be chosen.
        with peers("wait for the other workers", self.pulse):
            dist.all_reduce(torch.zeros(1), group=self.group)

    def close(self) -> None:
        dist.destroy_process_group()

    def _waiting(self, works: Sequence[dist.Work], size: int, doing: str = GRADIENTS) -> Callable[[], None]:
        """A function that returns when the collectives are done, which have to do with so many bytes of this rank's."""
        arrived = self.spans.reduction(size) if self.spans is not None and doing == GRADIENTS else None
        if arrived is not None and self.device.type == "cpu":
            # By the threads that bring them to their ends, mostly while this one is computing; the last of them takes the 0.
            left = list(range(len(works)))
            for work in works:
                work.get_future().add_done_callback(lambda _: arrived() if left.pop() == 0 else None)

        def wait() -> None:
            with peers(doing, self.pulse):
                for work in works:
                    work.wait()
                self._settle()
            if (
                arrived is not None and self.device.type != "cpu"
            ):  # the GPU knows when; this thread only that it was before
                arrived()

        return wait

    def _settle(self) -> None:
        """On a GPU `wait` only queues what comes after; a rank that hangs there is to be seen waiting here, and not at whatever asks
        the GPU for a number first. Reducers wait in `finish` alone, when backward is done, and all that they have sent by then is on
        its way: so what is lost is the time to queue the next kernel."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


class peers:
    """Turns the RuntimeError of a collective whose peer is gone into PeerError, and leaves any other as it is. With `pulse` this rank waits
    for the others meanwhile; only the training thread does."""

    def __init__(self, doing: str, pulse: Pulse | None = None, whom: str = "the other workers") -> None:
        self.doing, self.pulse, self.whom = doing, pulse, whom

    def __enter__(self) -> None:
        if self.pulse is not None:
            self.pulse.wait()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.pulse is not None:
            self.pulse.go_on()
        if isinstance(error, RuntimeError) and misses_a_peer(error):
            raise PeerError(
                f"lost {self.whom} while trying to {self.doing}: {first_words(error)}",
                AGAIN,
            ) from error
