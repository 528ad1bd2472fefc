"""Sums the gradients of all logical workers, with the same bits in every process life.

DistributedDataParallel lays its buckets out anew after the first iteration of each process, so that from three ranks on
a resumed run adds in another order than the uninterrupted one. Here the layout depends on the model alone.

A `Reducer` is used once per iteration: `begin`, `add` for each logical worker of this rank in order, `finish`. Beside
the gradients travels a *tail*, float64 [n]: BatchNorm statistics, the loss, flags.
"""

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from stagerun.comm.group import Comm, SoloComm

# Gradients are sent in pieces of about this size, each as soon as backward has filled it. Part of what the bits depend on.
CHUNK_BYTES = 4 * 1024 * 1024


class Reducer:
    layout: str
    """What the bits of the sum depend on, in words; stored in snapshots."""
    comm: Comm

    def begin(self, iter: int = 0) -> None:
        """Forget the gradients of the iteration before. `iter`: updates done in this stage."""
        raise NotImplementedError

    def add(self, loss: Tensor, logical_worker: int, tail: Tensor, last: bool) -> None:
        """Backward of one logical worker's `loss` (a scalar); `last` on this rank. `tail` may be reused afterwards."""
        raise NotImplementedError

    def break_off(self, tail: Tensor) -> None:
        """In the place of what this rank has left to `add`: it takes part in the same collectives as ever, so that ranks that
        don't know go through theirs, but adds no more gradients. What `finish` then gives is of no use, on any rank, but for
        the parts of the tail that are 0 or nearly so everywhere else."""
        raise NotImplementedError

    def finish(self) -> Tensor:
        """Wait, on a GPU by queueing what comes after it. Every parameter's `.grad` is now the sum over all logical workers, and so is the
        returned tail."""
        raise NotImplementedError

    def look(self, tensor: Tensor) -> list[float]:
        """The numbers of a tensor that was computed from what `finish` gave."""
        return self.comm.look(tensor)

    def accept(self) -> None:
        """The update was made: what this iteration left unsent, if anything, is sent with the next."""


class SoloReducer(Reducer):
    """One worker: autograd adds the logical workers up in order, and nothing is sent."""

    layout = "solo"

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters, self.comm = parameters, SoloComm()
        self.tail: Tensor | None = None

    def begin(self, iter: int = 0) -> None:
        self.tail = None
        for p in self.parameters:
            p.grad = None

    def add(self, loss: Tensor, logical_worker: int, tail: Tensor, last: bool) -> None:
        self.tail = tail.clone() if self.tail is None else self.tail.add_(tail)
        loss.backward()

    def break_off(self, tail: Tensor) -> None:
        self.tail = tail.clone()

    def finish(self) -> Tensor:
        assert self.tail is not None
        for p in self.parameters:
            if p.grad is None:  # not reached by this loss; weight decay still moves it
                p.grad = torch.zeros_like(p)
        return self.tail


def on_gradient(parameter: nn.Parameter, take: Callable[..., None], *place: int) -> None:
    """Call the method `take` with `place` whenever the parameter's gradient has come. The method's object is held weakly: the garbage collector
    doesn't see the hooks of a parameter, so a reducer that they held would never be freed, nor the gradients of a stage that is over."""
    method = weakref.WeakMethod(take)

    def hook(_: Tensor) -> None:
        if (alive := method()) is not None:
            alive(*place)

    parameter.register_post_accumulate_grad_hook(hook)


def chunks_of(elements: Sequence[int], element_size: int) -> list[int]:
    """How many of the parameters, which have so many elements each and are in the order in which they are sent, are in each chunk: as few
    as have CHUNK_BYTES."""
    counts, held, count = [], 0, 0
    for number in elements:
        held, count = held + number * element_size, count + 1
        if held >= CHUNK_BYTES:
            counts.append(count)
            held = count = 0
    return [*counts, count] if count else counts


def views_of(vector: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """The parts of a vector that belong to the parameters, in their order, each in the memory format of its own."""
    parts = zip(vector.split([p.numel() for p in parameters]), parameters, strict=True)
    return [part.as_strided(p.size(), p.stride()) for part, p in parts]


class FlatReducer(Reducer):
    """Each worker adds up its own logical workers; the workers are added by ring all-reduce, chunk by chunk.

    Gradients are views into one flat buffer, the last registered parameter first, because backward fills them about in
    that order. A chunk leaves when it is full and all before it have left, so that every rank sends the same chunks in
    the same order, whatever order backward takes.

    The buffer is not set to 0 beforehand: the first gradient of each parameter is put there, and autograd adds the others to it. That
    spares two of five passes over the gradients.
    """

    layout = f"flat-reverse-{CHUNK_BYTES}"

    def __init__(self, parameters: Sequence[nn.Parameter], comm: Comm) -> None:
        self.comm = comm
        ordered = list(reversed(parameters))
        self.flat = torch.zeros(sum(p.numel() for p in ordered), dtype=ordered[0].dtype, device=ordered[0].device)
        self.views = list(zip(ordered, views_of(self.flat, ordered), strict=True))
        self.placed: list[bool] = []  # of each parameter: whether its view holds a gradient of this iteration
        self.sizes = self._counts(ordered)  # parameters per chunk
        of_chunk = [chunk for chunk, count in enumerate(self.sizes) for _ in range(count)]
        lengths = [0] * len(self.sizes)
        for index, (p, chunk) in enumerate(zip(ordered, of_chunk, strict=True)):
            lengths[chunk] += p.numel()
            on_gradient(p, self._filled, index, chunk)
        self.chunks = self.flat.split(lengths)
        self.missing: list[int] = []
        self.sent = 0
        self.active = self.armed = False  # between `begin` and `finish`; within this rank's last backward
        self.pending: list[Callable[[], None]] = []
        self.tail: Tensor | None = None

    def _counts(self, ordered: list[nn.Parameter]) -> list[int]:
        """Parameters of each chunk."""
        return chunks_of([p.numel() for p in ordered], self.flat.element_size())

    def _filled(self, index: int, chunk: int) -> None:
        """A parameter of `chunk` has its gradient."""
        if not self.active:
            return
        parameter, view = self.views[index]
        if not self.placed[index]:
            assert parameter.grad is not None
            # 0 is added, since -0 + 0 is another number: the sum is to have the bits that it has had in a buffer of zeros.
            torch.add(parameter.grad, 0.0, out=view)
            parameter.grad, self.placed[index] = view, True
        if self.armed:
            self.missing[chunk] -= 1
            while self.sent < len(self.chunks) and self.missing[self.sent] == 0:
                self._send()

    def _send(self) -> None:
        self.pending.append(self.comm.all_reduce(self.chunks[self.sent]))
        self.sent += 1

    def begin(self, iter: int = 0) -> None:
        self.placed, self.active = [False] * len(self.views), True
        for p, _ in self.views:
            p.grad = None
        self.tail = None

    def add(self, loss: Tensor, logical_worker: int, tail: Tensor, last: bool) -> None:
        self.tail = tail.clone() if self.tail is None else self.tail.add_(tail)
        if last:
            self._arm()
        loss.backward()

    def break_off(self, tail: Tensor) -> None:
        # As `add` of the last logical worker: the tail first, then, in `finish`, all chunks in their order.
        self.tail = tail.clone() if self.tail is None else self.tail.add_(tail)
        self._arm()

    def _arm(self) -> None:
        self.missing, self.sent, self.armed = list(self.sizes), 0, True
        self._send_tail()

    def _send_tail(self) -> None:
        assert self.tail is not None
        self.pending = [self.comm.all_reduce(self.tail)]

    def _fill(self) -> None:
        """Put zeros where no loss has reached, or all was broken off before."""
        for index, (p, view) in enumerate(self.views):
            if not self.placed[index]:
                p.grad = view.zero_()

    def finish(self) -> Tensor:
        self.armed = self.active = False
        self._fill()
        while self.sent < len(self.chunks):  # chunks with such a parameter
            self._send()
        for wait in self.pending:
            wait()
        assert self.tail is not None
        return self.tail


class Switch(Reducer):
    """The reducer of whose turn it is."""

    def __init__(self, now: Reducer) -> None:
        self.now, self.layout = now, now.layout

    def begin(self, iter: int = 0) -> None:
        self.now.begin(iter)

    def add(self, loss: Tensor, logical_worker: int, tail: Tensor, last: bool) -> None:
        self.now.add(loss, logical_worker, tail, last)

    def break_off(self, tail: Tensor) -> None:
        self.now.break_off(tail)

    def finish(self) -> Tensor:
        return self.now.finish()

    def look(self, tensor: Tensor) -> list[float]:
        return self.now.look(tensor)

    def accept(self) -> None:
        self.now.accept()


def runs_of(logical_workers: int, workers: int) -> list[range]:
    """The contiguous run of logical workers of each rank, as even as can be: the first ranks get one more."""
    base, more = divmod(logical_workers, workers)
    runs, start = [], 0
    for rank in range(workers):
        stop = start + base + (rank < more)
        runs.append(range(start, stop))
        start = stop
    return runs
