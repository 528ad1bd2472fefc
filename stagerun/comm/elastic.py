"""`determinism: ELASTIC`: gradients of all logical workers added up along one fixed binary tree, on any number of ranks.

A rank adds up the subtrees within its run of logical workers. The results, one vector per subtree, go through the ranks in
slices: slice r of every subtree to rank r, which does the remaining additions of the tree for it, and hands the sum
out. An addition of two vectors adds element to element, so cutting them changes no bit, nor do the order of elements in memory
and the number of ranks. With one subtree per rank as much crosses the network as in a ring all-reduce: each rank sends
2 (W-1)/W of a vector. A rank whose run is not a subtree has several to hand out.

The node of the tree over [low, high) splits at low + the largest power of two below its width: it depends on nothing but the number of
logical workers.
"""

from collections.abc import Sequence
from functools import cache

from torch import Tensor, nn

from stagerun.comm.group import Comm, Wait
from stagerun.comm.reduce import Reducer, on_gradient

Node = tuple[int, int]
"""[low, high): the logical workers below it."""


@cache
def tree(total: int) -> dict[Node, int]:
    """Return where each node of the tree over range(total) that is at least 2 wide is cut in two."""
    cuts, nodes = {}, [(0, total)]
    for low, high in nodes:
        if high - low > 1:
            cuts[low, high] = cut = low + (1 << ((high - low - 1).bit_length() - 1))
            nodes += [(low, cut), (cut, high)]
    return cuts


def cover(run: range, total: int) -> list[Node]:
    """Return the largest nodes of the tree over range(total) that together make up `run`, in order."""

    def walk(low: int, high: int) -> list[Node]:
        if run.start <= low and high <= run.stop:
            return [(low, high)]
        if high <= run.start or run.stop <= low:
            return []
        cut = tree(total)[low, high]
        return walk(low, cut) + walk(cut, high)

    return walk(0, total)


def push(stack: list[Node], node: Node, total: int) -> int:
    """Put a node on a stack of neighbours, join it with its left sibling while that is on the stack; return how often."""
    stack.append(node)
    joined = 0
    while len(stack) >= 2 and tree(total).get((stack[-2][0], stack[-1][1])) == stack[-1][0]:
        _, high = stack.pop()
        stack[-1] = (stack[-1][0], high)
        joined += 1
    return joined


def depth(run: range, total: int) -> int:
    """Return the maximum height of the stack while the logical workers of `run` are pushed in order; a node that is joined with its left
    sibling takes no slot."""
    stack: list[Node] = []
    most = 0
    for k in run:
        before = len(stack)
        most = max(most, before + (push(stack, (k, k + 1), total) == 0))
    return most


def additions(nodes: Sequence[Node], total: int) -> list[tuple[int, int]]:
    """Return the tree's remaining additions when `nodes`, in order and without a gap, are summed: (into, from), as indices of `nodes`. With
    nodes that make up range(total), the first holds the whole sum in the end."""
    stack: list[Node] = []
    indices: list[int] = []
    answer = []
    for index, node in enumerate(nodes):
        indices.append(index)
        for _ in range(push(stack, node, total)):
            right = indices.pop()
            answer.append((indices[-1], right))
    return answer


# Gradients are sent in chunks of about this size, each as soon as backward has filled it: at least the first, and the second times the
# number of ranks, so that slices stay large. No bit depends on them.
CHUNK_BYTES = 4 << 20
SLICE_BYTES = 1 << 20

# The alignment of a parameter's gradient and of a slice, as in separate tensors: some kernels need it.
ALIGNED_BYTES = 64


class TreeReducer(Reducer):
    """The tree reducer. Each worker's nodes are on a stack of flat buffers, the last registered parameter first, because backward
    fills them about in that order. A gradient is added as it comes, and a chunk of a finished node leaves when it is full and all before
    it have left: every rank sends the same in the same order."""

    layout = "tree"

    def __init__(self, parameters: Sequence[nn.Parameter], comm: Comm, runs: Sequence[range]) -> None:
        """`runs[r]`: the logical workers of rank r, contiguous; together range(L)."""
        self.comm, self.total = comm, runs[-1].stop
        self.nodes = [cover(run, self.total) for run in runs]
        self.depth = depth(runs[comm.rank], self.total)
        self.parameters = list(reversed(parameters))
        self.spots: list[tuple[int, int]] = []  # by parameter: its offset in the buffer, and its chunk
        self.sizes: list[int] = []  # by chunk: the number of its parameters
        self.gradients = self._vectors(self._cut(), self.parameters[0])
        self.views = [self._views(buffer) for buffer in self.gradients.held]
        self.tails: _Vectors | None = None  # from the first `add` on
        self.tail_length = 0
        self.stack: list[Node] = []
        # Of the current logical worker: its slot on the stack, how often it is joined to the left, the node of this rank that it
        # completes, and the gradients that have arrived.
        self.slot = self.joined = self.filled = 0
        self.completes: int | None = None
        self.arrived: list[bool] = []
        self.missing: list[int] = []
        self.armed = False

    def _cut(self) -> list[int]:
        """Cut the buffer into chunks; return the elements of each."""
        size = self.parameters[0].element_size()
        aligned, least = ALIGNED_BYTES // size, max(CHUNK_BYTES, SLICE_BYTES * self.comm.size)
        chunks: list[int] = []
        start = offset = count = 0
        for i, p in enumerate(self.parameters):
            self.spots.append((offset, len(chunks)))
            count += 1
            on_gradient(p, self._take, i)
            offset += _up(p.numel(), aligned)
            if (offset - start) * size >= least or i == len(self.parameters) - 1:
                chunks.append(_up(offset - start, aligned * self.comm.size))
                self.sizes.append(count)
                start = offset = start + chunks[-1]
                count = 0
        return chunks

    def _vectors(self, chunks: Sequence[int], like: Tensor) -> "_Vectors":
        return _Vectors(chunks, self.depth, self.nodes, self.total, self.comm, like)

    def _views(self, buffer: Tensor) -> list[Tensor]:
        return [
            buffer[offset : offset + p.numel()].as_strided(p.size(), p.stride())
            for p, (offset, _) in zip(self.parameters, self.spots, strict=True)
        ]

    def begin(self, iter: int = 0) -> None:
        self.stack = []
        for p in self.parameters:
            p.grad = None

    def add(self, loss: Tensor, logical_worker: int, tail: Tensor, last: bool) -> None:
        tails = self._for_tails(tail)
        self.slot = len(self.stack)
        self.joined = push(self.stack, (logical_worker, logical_worker + 1), self.total)
        index, nodes = len(self.stack) - 1, self.nodes[self.comm.rank]
        self.completes = index if index < len(nodes) and self.stack[index] == nodes[index] else None
        if self.joined:
            tails.held[self.slot - 1][: tail.numel()].add_(tail)
        else:
            tails.held[self.slot][: tail.numel()].copy_(tail)
        self._finish_chunk(tails, 0)
        self.arrived = [False] * len(self.parameters)
        self.missing, self.filled, self.armed = list(self.sizes), 0, True
        loss.backward()
        self.armed = False
        for index, arrived in enumerate(self.arrived):
            if not arrived:  # a parameter that this loss doesn't reach
                self._put(index, None)

    def _for_tails(self, tail: Tensor) -> "_Vectors":
        if self.tails is None:
            aligned = ALIGNED_BYTES // tail.element_size() * self.comm.size
            self.tails, self.tail_length = self._vectors([_up(tail.numel(), aligned)], tail), tail.numel()
        return self.tails

    def break_off(self, tail: Tensor) -> None:
        # Complete nodes are sent already. Send the others, the tail of each, then its chunks, as `add` does, with the gradients so far.
        # The last is never complete, and takes `tail`.
        tails, nodes = self._for_tails(tail), self.nodes[self.comm.rank]
        complete = sum(stacked == node for stacked, node in zip(self.stack, nodes, strict=False))
        for index in range(complete, len(nodes)):
            held = tails.held[index].zero_()
            if index == len(nodes) - 1:
                held[: tail.numel()].copy_(tail)
            self._send_all(index)

    def _send_all(self, round: int) -> None:
        assert self.tails is not None
        for vectors in (self.tails, self.gradients):
            for chunk in range(len(vectors.chunks)):
                vectors.send(round, chunk)

    def _take(self, index: int) -> None:
        """Take the gradient of a parameter."""
        if not self.armed:
            return
        self._put(index, self.parameters[index].grad)
        self.parameters[index].grad = None

    def _put(self, index: int, gradient: Tensor | None) -> None:
        """Add a gradient, and finish the chunks that are full."""
        if self.joined:  # to its left sibling at once; 0 too is added, since -0 + 0 is another number
            self.views[self.slot - 1][index].add_(0.0 if gradient is None else gradient)
        elif gradient is None:
            self.views[self.slot][index].zero_()
        else:
            self.views[self.slot][index].copy_(gradient)
        self.arrived[index] = True
        self.missing[self.spots[index][1]] -= 1
        while self.filled < len(self.sizes) and self.missing[self.filled] == 0:
            self._finish_chunk(self.gradients, self.filled)
            self.filled += 1

    def _finish_chunk(self, vectors: "_Vectors", chunk: int) -> None:
        """Add up the nodes that the leaf completes, and send a node of this rank."""
        for right in range(self.slot - 1, self.slot - self.joined, -1):
            vectors.chunk(right - 1, chunk).add_(vectors.chunk(right, chunk))
        if self.completes is not None:
            vectors.send(self.completes, chunk)

    def finish(self) -> Tensor:
        assert self.tails is not None
        # Rounds in which others have more to send.
        for round in range(len(self.nodes[self.comm.rank]), max(map(len, self.nodes))):
            self._send_all(round)
        for wait in [*self.tails.finish(), *self.gradients.finish()]:
            wait()
        for p, view in zip(self.parameters, self.views[0], strict=True):
            p.grad = view
        return self.tails.held[0][: self.tail_length]


class _Vectors:
    """A vector for each node that this rank holds, all cut into the same chunks, and their sum over all ranks.

    In round n every rank that has an n-th node hands out slices of it. All ranks call `send` for the same rounds and chunks in
    the same order, then `finish`; afterwards the first buffer holds the sum."""

    def __init__(
        self, chunks: Sequence[int], depth: int, nodes: Sequence[Sequence[Node]], total: int, comm: Comm, like: Tensor
    ) -> None:
        """`chunks`: elements of each, multiples of the number of ranks. `nodes[r]`: the nodes that rank r hands out, in order."""
        self.chunks, self.nodes, self.comm = chunks, nodes, comm
        self.starts = [sum(chunks[:n]) for n in range(len(chunks))]
        # Zeros, since the gaps between the parameters are added up, too.
        self.held = [like.new_zeros(sum(chunks)) for _ in range(depth)]
        self.additions = additions([node for of_rank in nodes for node in of_rank], total)
        self.waits: dict[int, list[Wait]] = {}
        # By round: for each rank, whether it has a node; by round and chunk: this rank's slices of these nodes.
        self.has = [[len(of_rank) > round for of_rank in nodes] for round in range(max(map(len, nodes)))]
        self.received: dict[tuple[int, int], Tensor] = {}
        for round, has in enumerate(self.has if comm.size > 1 else ()):
            for number, size in enumerate(chunks):
                self.received[round, number] = like.new_zeros(sum(has) * (size // comm.size))

    def chunk(self, slot: int, chunk: int) -> Tensor:
        start = self.starts[chunk]
        return self.held[slot][start : start + self.chunks[chunk]]

    def send(self, round: int, chunk: int) -> None:
        if self.comm.size == 1:
            return
        width, has, received = self.chunks[chunk] // self.comm.size, self.has[round], self.received[round, chunk]
        sends = has[self.comm.rank]
        sent = self.chunk(round, chunk) if sends else received[:0]
        wait = self.comm.exchange(sent, [width * sends] * self.comm.size, received, [width * yes for yes in has])
        self.waits.setdefault(chunk, []).append(wait)

    def finish(self) -> list[Wait]:
        """Add up the received slices, and start handing out the sums; the answers wait for that."""
        if self.comm.size == 1:
            return []
        waits = []
        for chunk, size in enumerate(self.chunks):
            for wait in self.waits.pop(chunk):
                wait()
            # This rank's slice of each node of all ranks, in order.
            rounds = [iter(self.received[round, chunk].split(size // self.comm.size)) for round in range(len(self.has))]
            slices = [next(rounds[n]) for of_rank in self.nodes for n in range(len(of_rank))]
            for into, other in self.additions:
                slices[into].add_(slices[other])
            pieces = self.chunk(0, chunk).split(size // self.comm.size)
            pieces[self.comm.rank].copy_(slices[0])
            waits.append(self.comm.complete(pieces))
        return waits


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
