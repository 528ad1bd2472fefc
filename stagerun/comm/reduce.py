"""Sums the gradients of all logical workers, with the same bits in every process life.

DistributedDataParallel lays its buckets out anew after the first iteration of each process, so that from three ranks on
a resumed run adds in another order than the uninterrupted one. Here the layout depends on the model alone.

A `Reducer` is used once per iteration: `begin`, `add` for each logical worker of this rank in order, `finish`. Beside
the gradients travels a *tail*, float64 [n]: BatchNorm statistics, the loss, flags.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from stagerun.comm.group import Comm

# Gradients are sent in pieces of about this size, each as soon as backward has filled it. Part of what the bits depend on.
CHUNK_BYTES = 4 * 1024 * 1024


class Reducer(Protocol):
    layout: str
    """What the bits of the sum depend on, in words; stored in snapshots."""

    def begin(self) -> None:
        """Forgets the gradients of the iteration before."""

    def add(self, loss: Tensor, logical_worker: int, tail: Tensor, last: bool) -> None:
        """Backward of one logical worker's `loss` (a scalar); `last` on this rank. `tail` may be reused afterwards."""

    def break_off(self, tail: Tensor) -> None:
        """In the place of what this rank has left to `add`: it takes part in the same collectives as ever, so that ranks that
        know of nothing go through theirs, but adds no more gradients. What `finish` then gives is of no use, on any rank, but for
        the parts of the tail that are 0 or nearly so everywhere else."""

    def finish(self) -> Tensor:
        """Waits. Every parameter's `.grad` is now the sum over all logical workers, and so is the returned tail."""


class SoloReducer:
    """One worker: autograd adds the logical workers up in order, and there is nobody to send to."""

    layout = "solo"

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self.tail: Tensor | None = None

    def begin(self) -> None:
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


class FlatReducer:
    """Each worker adds up its own logical workers; the workers are added by ring all-reduce, chunk by chunk.

    Gradients are views into one flat buffer, the last registered parameter first, because backward fills them about in
    that order. A chunk leaves when it is full and all before it have left, so that every rank sends the same chunks in
    the same order, whatever order backward takes.
    """

    layout = f"flat-reverse-{CHUNK_BYTES}"

    def __init__(self, parameters: Sequence[nn.Parameter], comm: Comm) -> None:
        self.comm = comm
        ordered = list(reversed(parameters))
        self.flat = torch.zeros(sum(p.numel() for p in ordered), dtype=ordered[0].dtype, device=ordered[0].device)
        self.chunks: list[Tensor] = []
        self.sizes: list[int] = []  # parameters per chunk
        self.views: list[tuple[nn.Parameter, Tensor]] = []
        self.missing: list[int] = []
        self.sent = 0
        self.armed = False
        self.pending: list[Callable[[], None]] = []
        self.tail: Tensor | None = None
        self._cut(ordered)

    def _cut(self, ordered: list[nn.Parameter]) -> None:
        offset = start = count = 0
        for p in ordered:
            view = self.flat[offset : offset + p.numel()].as_strided(p.size(), p.stride())
            self.views.append((p, view))
            p.register_post_accumulate_grad_hook(self._hook(len(self.chunks)))
            offset, count = offset + p.numel(), count + 1
            if (offset - start) * self.flat.element_size() >= CHUNK_BYTES or p is ordered[-1]:
                self.chunks.append(self.flat[start:offset])
                self.sizes.append(count)
                start, count = offset, 0

    def _hook(self, chunk: int) -> Callable[[Tensor], None]:
        # Held weakly: the garbage collector doesn't see the hooks of a parameter, so a reducer that they held would
        # never be freed, nor the weights and gradients of a stage that is over.
        reducer = weakref.ref(self)

        def filled(_: Tensor) -> None:
            owner = reducer()
            if owner is not None and owner.armed:
                owner._count(chunk)

        return filled

    def _count(self, chunk: int) -> None:
        """One more parameter of `chunk` has its gradient."""
        self.missing[chunk] -= 1
        while self.sent < len(self.chunks) and self.missing[self.sent] == 0:
            self._send()

    def _send(self) -> None:
        self.pending.append(self.comm.all_reduce(self.chunks[self.sent]))
        self.sent += 1

    def begin(self) -> None:
        self.flat.zero_()
        for p, view in self.views:
            p.grad = view
        self.tail = None

    def add(self, loss: Tensor, logical_worker: int, tail: Tensor, last: bool) -> None:
        self.tail = tail.clone() if self.tail is None else self.tail.add_(tail)
        if last:
            self.missing, self.sent, self.armed = list(self.sizes), 0, True
            self.pending = [self.comm.all_reduce(self.tail)]
        loss.backward()

    def break_off(self, tail: Tensor) -> None:
        # As `add` of the last logical worker: the tail first, then, in `finish`, all chunks in their order.
        self.tail = tail.clone() if self.tail is None else self.tail.add_(tail)
        self.sent, self.pending = 0, [self.comm.all_reduce(self.tail)]

    def finish(self) -> Tensor:
        self.armed = False
        while self.sent < len(self.chunks):  # chunks with a parameter that this loss doesn't reach
            self._send()
        for wait in self.pending:
            wait()
        assert self.tail is not None
        return self.tail


def runs_of(logical_workers: int, workers: int) -> list[range]:
    """The contiguous run of logical workers of each rank, as even as can be: the first ranks get one more."""
    base, more = divmod(logical_workers, workers)
    runs, start = [], 0
    for rank in range(workers):
        stop = start + base + (rank < more)
        runs.append(range(start, stop))
        start = stop
    return runs
