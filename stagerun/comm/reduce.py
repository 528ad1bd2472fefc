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

    def finish(self) -> Tensor:
        self.armed = False
        while self.sent < len(self.chunks):  # chunks with a parameter that this loss doesn't reach
            self._send()
        for wait in self.pending:
            wait()
        assert self.tail is not None
        return self.tail


class TreeReducer:
    """`determinism: ELASTIC`: one fixed binary tree over the logical workers, whoever computes them.

    The node over [low, high) splits at low + the largest power of two below its width. A rank adds up the subtrees that
    lie in its own run of logical workers; what is left of each rank is broadcast, in order, and every rank does the
    remaining additions of the tree. So the bits depend neither on the number of ranks nor on where the runs are cut.
    """

    layout = "tree"

    def __init__(self, parameters: Sequence[nn.Parameter], comm: Comm, runs: Sequence[range]) -> None:
        """`runs[r]`: the logical workers of rank r, contiguous; together range(L)."""
        self.parameters, self.comm, self.runs = parameters, comm, runs
        self.total = runs[-1].stop
        self.stack: list[tuple[int, int, Tensor, Tensor]] = []

    def begin(self) -> None:
        self.stack = []
        for p in self.parameters:
            p.grad = None

    def add(self, loss: Tensor, logical_worker: int, tail: Tensor, last: bool) -> None:
        loss.backward()
        pieces = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        flat = torch.cat([g.reshape(-1) for g in pieces])
        for p in self.parameters:
            p.grad = None
        self._push(self.stack, (logical_worker, logical_worker + 1, flat, tail.clone()))

    def _push(self, stack: list, node: tuple[int, int, Tensor, Tensor]) -> None:
        """Puts a node on the stack and adds it to its left sibling for as long as that is there."""
        stack.append(node)
        while len(stack) >= 2 and is_node(stack[-2][0], stack[-1][1], self.total, middle=stack[-1][0]):
            low, _, left, left_tail = stack[-2]
            _, high, right, right_tail = stack.pop()
            stack[-1] = (low, high, left.add_(right), left_tail.add_(right_tail))

    def finish(self) -> Tensor:
        mine, self.stack = self.stack, []
        sample, sample_tail = mine[0][2], mine[0][3]
        whole: list[tuple[int, int, Tensor, Tensor]] = []
        for rank, run in enumerate(self.runs):
            for index, (low, high) in enumerate(cover(run, self.total)):
                if rank == self.comm.rank:
                    flat, tail = mine[index][2], mine[index][3]
                else:
                    flat, tail = torch.empty_like(sample), torch.empty_like(sample_tail)
                self.comm.broadcast(flat, rank)
                self.comm.broadcast(tail, rank)
                self._push(whole, (low, high, flat, tail))
        assert len(whole) == 1
        _, _, flat, tail = whole[0]
        offset = 0
        for p in self.parameters:
            p.grad = torch.empty_like(p).copy_(flat[offset : offset + p.numel()].view(p.size()))
            offset += p.numel()
        return tail


def split(low: int, high: int) -> int:
    """Where the tree's node over [low, high), at least 2 wide, is cut in two."""
    return low + (1 << ((high - low - 1).bit_length() - 1))


def is_node(low: int, high: int, total: int, middle: int) -> bool:
    """Whether the tree over range(total) has a node [low, high) whose children meet at `middle`."""
    a, b = 0, total
    while (a, b) != (low, high):
        if b - a <= 1:
            return False
        cut = split(a, b)
        if high <= cut:
            b = cut
        elif low >= cut:
            a = cut
        else:
            return False
    return high - low > 1 and split(low, high) == middle


def cover(run: range, total: int) -> list[tuple[int, int]]:
    """The largest nodes of the tree over range(total) that together make up `run`, in order."""

    def walk(low: int, high: int) -> list[tuple[int, int]]:
        if run.start <= low and high <= run.stop:
            return [(low, high)]
        if high <= run.start or run.stop <= low:
            return []
        cut = split(low, high)
        return walk(low, cut) + walk(cut, high)

    return walk(0, total)


def runs_of(logical_workers: int, workers: int) -> list[range]:
    """The contiguous run of logical workers of each rank, as even as can be: the first ranks get one more."""
    base, more = divmod(logical_workers, workers)
    runs, start = [], 0
    for rank in range(workers):
        stop = start + base + (rank < more)
        runs.append(range(start, stop))
        start = stop
    return runs
