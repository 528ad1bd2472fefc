"""`determinism: ELASTIC`: gradients of all logical workers added up along one fixed binary tree, whoever computes them.

A rank adds up the subtrees that lie in its own run of logical workers. What is left, one vector per subtree, goes through the
ranks in slices: slice r of every subtree to rank r, which does the remaining additions of the tree for it, and hands the sum
out. An addition of two vectors adds element to element, so to cut them changes no bit; nor do the order in which elements lie,
and the number of ranks. With one subtree per rank as much crosses the network as in a ring all-reduce: each rank sends
2 (W-1)/W of a vector. A rank whose run is not a subtree has more than one of them to hand out.

The node of the tree over [low, high) splits at low + the largest power of two below its width: it depends on nothing but the number of
logical workers.
"""

from collections.abc import Callable, Sequence
from functools import cache

from torch import Tensor, nn

from stagerun.comm.group import Comm
from stagerun.comm.reduce import Reducer, on_gradient

Node = tuple[int, int]
"""[low, high): the logical workers below it."""


@cache
def tree(total: int) -> dict[Node, int]:
    """Where each node of the tree over range(total) that is at least 2 wide is cut in two."""
    cuts, nodes = {}, [(0, total)]
    for low, high in nodes:
        if high - low > 1:
            cuts[low, high] = cut = low + (1 << ((high - low - 1).bit_length() - 1))
            nodes += [(low, cut), (cut, high)]
    return cuts


def cover(run: range, total: int) -> list[Node]:
    """The largest nodes of the tree over range(total) that together make up `run`, in order."""

    def walk(low: int, high: int) -> list[Node]:
        if run.start <= low and high <= run.stop:
            return [(low, high)]
        if high <= run.start or run.stop <= low:
            return []
        cut = tree(total)[low, high]
        return walk(low, cut) + walk(cut, high)

    return walk(0, total)


def push(stack: list[Node], node: Node, total: int) -> int:
    """Puts a node on a stack of neighbours and joins it with its left sibling for as long as that is there; how often."""
    stack.append(node)
    joined = 0
    while len(stack) >= 2 and tree(total).get((stack[-2][0], stack[-1][1])) == stack[-1][0]:
        _, high = stack.pop()
        stack[-1] = (stack[-1][0], high)
        joined += 1
    return joined


def depth(run: range, total: int) -> int:
    """The most nodes that lie on the stack while the logical workers of `run` are pushed, one after the other, where one
    whose left sibling is there takes no place of its own."""
    stack: list[Node] = []
    most = 0
    for k in run:
        before = len(stack)
        most = max(most, before + (push(stack, (k, k + 1), total) == 0))
    return most


def additions(nodes: Sequence[Node], total: int) -> list[tuple[int, int]]:
    """The tree's additions that are left when `nodes`, in order and without a gap, are sums already: (into, from), as indices of
    `nodes`. With nodes that make up range(total), the whole sum is in the first in the end."""
    stack: list[Node] = []
    places: list[int] = []
    answer = []
    for index, node in enumerate(nodes):
        places.append(index)
        for _ in range(push(stack, node, total)):
            right = places.pop()
            answer.append((places[-1], right))
    return answer


# Gradients are sent in pieces of about this size, each as soon as backward has filled it: at least this, and this times the number
# of ranks, so that slices stay large. No bit depends on them.
CHUNK_BYTES = 4 << 20
SLICE_BYTES = 1 << 20

# What a parameter's gradient and a slice begin at a multiple of, as tensors of their own would: some kernels ask for it.
ALIGNED_BYTES = 64


class TreeReducer(Reducer):
    """Each worker's nodes of the tree lie on a stack of flat buffers, the last registered parameter first, because backward fills them
    about in that order. A gradient is added as it comes, and a chunk of a finished node leaves when it is full and all before
    it have left: every rank sends the same in the same order."""

    layout = "tree"

    def __init__(self, parameters: Sequence[nn.Parameter], comm: Comm, runs: Sequence[range]) -> None:
        """`runs[r]`: the logical workers of rank r, contiguous; together range(L)."""
        self.comm, self.total = comm, runs[-1].stop
        self.nodes = [cover(run, self.total) for run in runs]
        self.depth = depth(runs[comm.rank], self.total)
        self.parameters = list(reversed(parameters))
        self.places: list[tuple[int, int]] = []  # of each parameter: where it begins in the buffer, and its chunk
        self.members: list[list[int]] = []  # of each chunk: its parameters
        self.gradients = self._vectors(self._cut(), self.parameters[0])
        self.views = [self._views(buffer) for buffer in self.gradients.held]
        self.tails: _Vectors | None = None  # as soon as their length is known
        self.tail_length = 0
        self.stack: list[Node] = []
        # Of the logical worker under way: its place on the stack, how often it is joined to the left, which of this rank's nodes it
        # completes, and what of it has come.
        self.place = self.joined = self.filled = 0
        self.completes: int | None = None
        self.arrived: list[bool] = []
        self.missing: list[int] = []
        self.armed = False

    def _cut(self) -> list[int]:
        """Elements of each chunk."""
        size = self.parameters[0].element_size()
        aligned, least = ALIGNED_BYTES // size, max(CHUNK_BYTES, SLICE_BYTES * self.comm.size)
        chunks: list[int] = []
        members: list[int] = []
        start = offset = 0
        for i, p in enumerate(self.parameters):
            self.places.append((offset, len(chunks)))
            members.append(i)
            on_gradient(p, self._take, i)
            offset += _up(p.numel(), aligned)
            if (offset - start) * size >= least or i == len(self.parameters) - 1:
                chunks.append(_up(offset - start, aligned * self.comm.size))
                self.members.append(members)
                start, members = start + chunks[-1], []
                offset = start
        return chunks

    def _vectors(self, chunks: Sequence[int], like: Tensor) -> "_Vectors":
        return _Vectors(chunks, self.depth, self.nodes, self.total, self.comm, like)

    def _views(self, buffer: Tensor) -> list[Tensor]:
        return [
            buffer[offset : offset + p.numel()].as_strided(p.size(), p.stride())
            for p, (offset, _) in zip(self.parameters, self.places, strict=True)
        ]

    def begin(self, iter: int = 0) -> None:
        self.stack = []
        for p in self.parameters:
            p.grad = None

    def add(self, loss: Tensor, logical_worker: int, tail: Tensor, last: bool) -> None:
        tails = self._for_tails(tail)
        self.place = len(self.stack)
        self.joined = push(self.stack, (logical_worker, logical_worker + 1), self.total)
        index, own = len(self.stack) - 1, self.nodes[self.comm.rank]
        self.completes = index if index < len(own) and self.stack[index] == own[index] else None
        if self.joined:
            tails.held[self.place - 1][: tail.numel()].add_(tail)
        else:
            tails.held[self.place][: tail.numel()].copy_(tail)
        self._finish_chunk(tails, 0)
        self.arrived = [False] * len(self.parameters)
        self.missing, self.filled, self.armed = [len(m) for m in self.members], 0, True
        loss.backward()
        self.armed = False
        while self.filled < len(self.members):  # chunks with a parameter that this loss doesn't reach
            for i in self.members[self.filled]:
                if not self.arrived[i]:
                    self._put(i, None)
            self._finish_chunk(self.gradients, self.filled)
            self.filled += 1

    def _for_tails(self, tail: Tensor) -> "_Vectors":
        if self.tails is None:
            aligned = ALIGNED_BYTES // tail.element_size() * self.comm.size
            self.tails, self.tail_length = self._vectors([_up(tail.numel(), aligned)], tail), tail.numel()
        return self.tails

    def break_off(self, tail: Tensor) -> None:
        # The nodes that are not complete, which has sent those that are: the tail of each, then its chunks, as `add` does. The
        # last one never is, and takes `tail`. Its gradients are what there is of them.
        tails, own = self._for_tails(tail), self.nodes[self.comm.rank]
        complete = sum(mine == node for mine, node in zip(self.stack, own, strict=False))
        for index in range(complete, len(own)):
            held = tails.held[index].zero_()
            if index == len(own) - 1:
                held[: tail.numel()].copy_(tail)
            for vectors in (tails, self.gradients):
                for chunk in range(len(vectors.chunks)):
                    vectors.send(index, chunk)

    def _take(self, index: int) -> None:
        """The gradient of a parameter has come."""
        if not self.armed:
            return
        parameter = self.parameters[index]
        self._put(index, parameter.grad)
        parameter.grad = None
        self.arrived[index] = True
        self.missing[self.places[index][1]] -= 1
        while self.filled < len(self.members) and self.missing[self.filled] == 0:
            self._finish_chunk(self.gradients, self.filled)
            self.filled += 1

    def _put(self, index: int, gradient: Tensor | None) -> None:
        if self.joined:  # to its left sibling at once; 0 too is added, since -0 + 0 is another number
            self.views[self.place - 1][index].add_(0.0 if gradient is None else gradient)
        elif gradient is None:
            self.views[self.place][index].zero_()
        else:
            self.views[self.place][index].copy_(gradient)

    def _finish_chunk(self, vectors: "_Vectors", chunk: int) -> None:
        """The leaf is in; what more it completes is added up, and sent where it is a node to hand out."""
        for right in range(self.place - 1, self.place - self.joined, -1):
            vectors.chunk(right - 1, chunk).add_(vectors.chunk(right, chunk))
        if self.completes is not None:
            vectors.send(self.completes, chunk)

    def finish(self) -> Tensor:
        assert self.tails is not None
        # Rounds in which others have more to send.
        for round in range(len(self.nodes[self.comm.rank]), max(map(len, self.nodes))):
            for vectors in (self.tails, self.gradients):
                for chunk in range(len(vectors.chunks)):
                    vectors.send(round, chunk)
        for wait in [*self.tails.finish(), *self.gradients.finish()]:
            wait()
        for p, view in zip(self.parameters, self.views[0], strict=True):
            p.grad = view
        return self.tails.held[0][: self.tail_length]


class _Vectors:
    """A vector for each node that this rank holds, all cut into the same chunks, and their way to the sum over all ranks.

    In round n every rank that has an n-th node hands out slices of it. All ranks call `send` for the same rounds and chunks in
    the same order, then `finish`; afterwards the first buffer holds the sum.
    """

    def __init__(
        self, chunks: Sequence[int], depth: int, nodes: Sequence[Sequence[Node]], total: int, comm: Comm, like: Tensor
    ) -> None:
        """`chunks`: elements of each, multiples of the number of ranks. `nodes[r]`: those that rank r hands out, in order."""
        self.chunks, self.nodes, self.comm = chunks, nodes, comm
        self.starts = [sum(chunks[:n]) for n in range(len(chunks))]
        # Zeros, since what lies between the parameters is added up, too.
        self.held = [like.new_zeros(sum(chunks)) for _ in range(depth)]
        self.additions = additions([node for own in nodes for node in own], total)
        self.waits: dict[int, list[Callable[[], None]]] = {}
        # By round and chunk: for each rank, whether it has a node for the round; and where this rank's slices of those lie.
        self.has = [[len(own) > round for own in nodes] for round in range(max(map(len, nodes)))]
        self.received: dict[tuple[int, int], Tensor] = {}
        for round, has in enumerate(self.has if comm.size > 1 else ()):
            for number, size in enumerate(chunks):
                self.received[round, number] = like.new_zeros(sum(has) * (size // comm.size))

    def chunk(self, place: int, chunk: int) -> Tensor:
        start = self.starts[chunk]
        return self.held[place][start : start + self.chunks[chunk]]

    def send(self, round: int, chunk: int) -> None:
        if self.comm.size == 1:
            return
        width, has, received = self.chunks[chunk] // self.comm.size, self.has[round], self.received[round, chunk]
        mine = has[self.comm.rank]
        sent = self.chunk(round, chunk) if mine else received[:0]
        wait = self.comm.exchange(sent, [width * mine] * self.comm.size, received, [width * yes for yes in has])
        self.waits.setdefault(chunk, []).append(wait)

    def finish(self) -> list[Callable[[], None]]:
        """Adds up what came, and starts handing it out; the answers wait for that."""
        if self.comm.size == 1:
            return []
        waits = []
        for chunk, size in enumerate(self.chunks):
            for wait in self.waits.pop(chunk):
                wait()
            # This rank's slice of each node of all ranks, in order.
            rounds = [iter(self.received[round, chunk].split(size // self.comm.size)) for round in range(len(self.has))]
            slices = [next(rounds[n]) for own in self.nodes for n in range(len(own))]
            for into, other in self.additions:
                slices[into].add_(slices[other])
            pieces = self.chunk(0, chunk).split(size // self.comm.size)
            pieces[self.comm.rank].copy_(slices[0])
            waits.append(self.comm.complete(pieces))
        return waits


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
