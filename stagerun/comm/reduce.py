"""Sums the gradients of all logical workers, with the same bits in every process life.

DistributedDataParallel rebuilds its buckets after the first iteration of each process, so that from three ranks on
a resumed run adds in another order than the uninterrupted one. Here the layout depends on the model alone.

A `Reducer` is used once per iteration: `begin`, `add` for each logical worker of this rank in order, `finish`. With
the gradients it sends a *tail*, float64 [n]: BatchNorm statistics, the loss, flags.
"""

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from stagerun.comm.group import Comm, SoloComm, Wait

# Gradients are sent in chunks of about this size, each as soon as backward has filled it. The bits depend on it.
CHUNK_BYTES = 4 * 1024 * 1024


class Reducer:
    layout: str
    """Text on which the bits of the sum depend; stored in snapshots."""
    comm: Comm

    def begin(self, iter: int = 0) -> None:
        """Forget the gradients of the previous iteration. `iter`: updates done in this stage."""
        raise NotImplementedError

    def add(self, loss: Tensor, logical_worker: int, tail: Tensor, last: bool) -> None:
        """Do the backward pass of one logical worker's `loss` (a scalar); `last` on this rank. `tail` may be reused afterwards."""
        raise NotImplementedError

    def break_off(self, tail: Tensor) -> None:
        """Replace the remaining calls of `add`: take part in the same collectives, since other ranks may not know, but add no more
        gradients. The answer of `finish` is then useless on every rank, except for parts of the tail that are about 0 elsewhere."""
        raise NotImplementedError

    def finish(self) -> Tensor:
        """Wait, on a GPU by queueing what follows. Every parameter's `.grad`, and the returned tail, is now the sum over all logical workers."""
        raise NotImplementedError

    def look(self, tensor: Tensor) -> list[float]:
        """Return the numbers of a tensor that was computed from the answer of `finish`."""
        return self.comm.look(tensor)

    def accept(self) -> None:
        """Note that the update was made: anything unsent is sent with the next."""


class SoloReducer(Reducer):
    """The reducer of one worker: autograd adds the logical workers in order, and nothing is sent."""

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


def on_gradient(parameter: nn.Parameter, take: Callable[..., None], *args: int) -> None:
    """Call the method `take` with `args` whenever the parameter's gradient is complete. The method's object is held weakly: the garbage
    collector doesn't see the hooks of a parameter, so a reducer that they held would never be freed, nor the gradients of a finished stage."""
    method = weakref.WeakMethod(take)

    def hook(_: Tensor) -> None:
        if (alive := method()) is not None:
            alive(*args)

    parameter.register_post_accumulate_grad_hook(hook)


def chunks_of(elements: Sequence[int], element_size: int) -> list[int]:
    """Return the number of parameters in each chunk, as few as have CHUNK_BYTES. `elements`: of each parameter, in the order of sending."""
    counts, held, count = [], 0, 0
    for number in elements:
        held, count = held + number * element_size, count + 1
        if held >= CHUNK_BYTES:
            counts.append(count)
            held = count = 0
    return [*counts, count] if count else counts


def views_of(vector: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the parts of a vector that belong to the parameters, in order, each in its parameter's memory format."""
    parts = zip(vector.split([p.numel() for p in parameters]), parameters, strict=True)
    return [part.as_strided(p.size(), p.stride()) for part, p in parts]


class FlatReducer(Reducer):
    """The reducer in which each worker adds up its logical workers, and a ring all-reduce adds the workers, chunk by chunk.

    Gradients are views into one flat buffer, the last registered parameter first, because backward fills them about in
    that order. A chunk leaves when it is full and all before it have left, so that every rank sends the same chunks in
    the same order, whatever order backward takes.

    The buffer is not set to 0 first: the first gradient of each parameter is put into it, and autograd adds the others. That
    saves two of five passes over the gradients."""

    layout = f"flat-reverse-{CHUNK_BYTES}"

    def __init__(self, parameters: Sequence[nn.Parameter], comm: Comm) -> None:
        self.comm = comm
        ordered = list(reversed(parameters))
        self.flat = torch.zeros(sum(p.numel() for p in ordered), dtype=ordered[0].dtype, device=ordered[0].device)
        self.views = list(zip(ordered, views_of(self.flat, ordered), strict=True))
        self.placed: list[bool] = []  # by parameter: whether its view holds a gradient of this iteration
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
        self.pending: list[Wait] = []
        self.tail: Tensor | None = None

    def _counts(self, ordered: list[nn.Parameter]) -> list[int]:
        """Return the number of parameters of each chunk."""
        return chunks_of([p.numel() for p in ordered], self.flat.element_size())

    def _filled(self, index: int, chunk: int) -> None:
        """Take the gradient of a parameter of `chunk`."""
        if not self.active:
            return
        parameter, view = self.views[index]
        if not self.placed[index]:
            assert parameter.grad is not None
            # Add 0, since -0 + 0 is another number: the sum must have the bits of one in a buffer of zeros.
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
        self._add_tail(tail)
        if last:
            self._arm()
        loss.backward()

    def break_off(self, tail: Tensor) -> None:
        # As `add` of the last logical worker: the tail first, then, in `finish`, all chunks in their order.
        self._add_tail(tail)
        self._arm()

    def _add_tail(self, tail: Tensor) -> None:
        self.tail = tail.clone() if self.tail is None else self.tail.add_(tail)

    def _arm(self) -> None:
        self.missing, self.sent, self.armed = list(self.sizes), 0, True
        self._send_tail()

    def _send_tail(self) -> None:
        assert self.tail is not None
        self.pending = [self.comm.all_reduce(self.tail)]

    def _fill(self) -> None:
        """Put zeros where no loss reached, or the iteration was broken off before."""
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
    """A reducer that hands each call to the current one."""

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
    """Return the contiguous run of logical workers of each rank, as even as possible: the first ranks get one more."""
    base, more = divmod(logical_workers, workers)
    runs, start = [], 0
    for rank in range(workers):
        stop = start + base + (rank < more)
        runs.append(range(start, stop))
        start = stop
    return runs
