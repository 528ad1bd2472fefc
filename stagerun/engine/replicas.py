"""The replicas of a stage with `sync_param`, as far as this rank has a part in them.

Replica r is the r-th of equal, contiguous runs of logical workers. The ranks that have some of its logical workers all hold its state,
and add its gradients up among themselves, along a tree of its own with `determinism: ELASTIC`: so the bits don't depend on
who holds what. The network has the tensors of one replica at a time, of which it is the `turn`, or what `show` puts there.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from stagerun.base.recipe import Determinism, Outer, Solver, SyncMomentum
from stagerun.comm import Comm, Reducer, make_reducer, runs_of
from stagerun.comm.reduce import Switch, views_of
from stagerun.engine.codec import digest
from stagerun.schedule import parting, synchronisations

Tensors = dict[str, Tensor]


class Replicas:
    """`own`: the replicas that this rank has logical workers of, and `runs` which, counted from the replica's first. `holders`: the first
    rank of each, which speaks for it. `parted`: whether they go their own ways already."""

    def __init__(
        self,
        weights: Tensors,
        momentum: Tensors,
        trained: Tensors,
        solver: Solver,
        determinism: Determinism,
        comm: Comm,
        still: Collection[str] = (),
    ) -> None:
        """`weights`, `momentum`: the live tensors of the network and its solver; `trained`: the parameters; `still`: the names of those
        of the network that no update moves. Collective."""
        assert solver.sync is not None
        self.sync, self.comm, self.count = solver.sync, comm, solver.sync.replicas
        self.start, self.meetings = parting(solver), frozenset(synchronisations(solver))
        self.max_iter, self.logical_workers = solver.max_iter, solver.logical_workers // self.count
        self.live = weights | momentum
        # What differs between replicas. The counts, which are whole numbers, are the same in all, and so is what is frozen: in FP64 an average
        # of equal numbers may be another one.
        self.apart = {n: t for n, t in self.live.items() if t.is_floating_point() and n not in still}
        self.weights = {name: self.apart[name] for name in weights if name in self.apart}
        self.trained, self.determinism = trained, determinism
        shares = shares_of(solver, comm.size)
        ranks = holders_of(shares, self.count)
        parts = [comm.part(those) for those in ranks]
        self.holders, self.runs = [those[0] for those in ranks], shares[comm.rank]
        self.shared = [r for r, those in enumerate(ranks) if len(those) > 1]  # those that several ranks hold
        self.own = list(self.runs)
        self._among: dict[int, tuple[Comm, list[range]]] = {}
        for r in self.own:
            part = parts[r]
            assert part is not None
            self._among[r] = part, [shares[rank][r] for rank in ranks[r]]
        self.reducers: dict[int, Reducer] = {}
        self.reducer: Switch | None = None
        self.parted = self.shown = False
        self.held: int | None = None  # the replica that the network has now
        self.kept: dict[int, Tensors] = {}  # of the others, and of that one as it was
        self.outer: OuterUpdate | None = None
        self.digests: dict[str, int] = {}

    def around(self, plain: Callable[[], Reducer], iter: int) -> Switch:
        """The reducer of a stage that goes on from `iter`; `plain` makes that of all workers."""
        parameters = list(self.trained.values())
        for r, (comm, runs) in self._among.items():
            size = self.logical_workers
            self.reducers[r] = make_reducer(self.determinism, parameters, comm, size, runs)  # type: ignore[arg-type]
        self.reducer = Switch(plain() if iter < self.start else self.reducers[self.own[0]])
        return self.reducer

    # -- whose turn it is

    def begin(self, iter: int) -> bool:
        """Whether the update after `iter` is one of each replica; at `start` they part."""
        if iter == self.start and not self.parted:
            self._part()
        return self.parted

    @torch.no_grad()
    def _part(self) -> None:
        self.parted = True
        self.held = self.own[0]
        for r in self.own[1:]:
            self.kept[r] = _like(self.live)
            _copy(self.live, self.kept[r])
        if self.sync.outer is not None:
            self.outer = OuterUpdate(self.trained, self.sync.outer)

    @torch.no_grad()
    def turn(self, r: int) -> None:
        """The network is replica `r` of this rank."""
        if self.held != r:
            self._keep()
            _copy(self.kept[r], self.live)
            self.held, self.shown = r, False
        assert self.reducer is not None
        self.reducer.now = self.reducers[r]

    def _keep(self) -> None:
        if self.held is not None:
            if self.held not in self.kept:
                self.kept[self.held] = _like(self.live)
            _copy(self.live, self.kept[self.held])
            self.held = None

    # -- what they have in common

    @torch.no_grad()
    def show(self) -> None:
        """The network is the average of the replicas, and remembers that of what they remember; they stay as they are. It is for what looks
        on, and counts for no traffic of training. Collective."""
        if self.parted and not self.shown:
            self._keep()
            before = self.comm.traffic.sent
            self._average(self.apart)
            self.comm.traffic.sent = before
            self.shown = True

    @torch.no_grad()
    def meet(self, iter: int) -> int | None:
        """The synchronisation after `iter` updates, and the bytes that this rank sent for it; None where there is none. Collective."""
        if not self.parted or iter not in self.meetings:
            return None
        before = self.comm.traffic.sent
        self._keep()
        joined = self.apart if self.sync.momentum is SyncMomentum.AVERAGE else self.weights
        self._average(joined)
        if self.outer is not None:
            self.outer.update(self.trained)
        for r in self.own:
            _copy(joined, {name: self.kept[r][name] for name in joined})
        return self.comm.traffic.sent - before

    def _average(self, out: Tensors) -> None:
        own = [[self.kept[r][name] for name in out] for r in self.own if self.holders[r] == self.comm.rank]
        average(self.comm, self.holders, own, list(out.values()))

    # -- snapshots

    def differ(self, iter: int) -> bool:
        """Whether a snapshot after `iter` updates must hold them one by one: what is made of the stage's end needs the average alone."""
        return self.parted and iter < self.max_iter

    def names(self) -> Tensors:
        """What `gather` hands over, by name, as tensors of the same shapes."""
        found = {f"{r}/{name}": t for r in range(self.count) for name, t in self.apart.items()}
        return found | self.common_by_name(self.trained)

    def common_by_name(self, like: Tensors | None = None) -> Tensors:
        """What all replicas have in common, by the names that it has in a snapshot: the live tensors, or of the shapes of `like`."""
        if self.sync.outer is None:
            return {}
        return remembered(like, like) if like is not None else self.outer.remembered() if self.outer else {}

    @torch.no_grad()
    def gather(self, take: Callable[[str, Tensor], None] | None) -> None:
        """Has rank 0's `take` see each tensor of each replica by its name, and those that all have in common. Collective. `digests` are
        then those of each replica, as this rank has it, or has just heard of it: the same on all ranks that compute right."""
        self._keep()
        for r in range(self.count):
            mine = self.kept[r] if r in self.own else self.apart
            vector = torch.cat([mine[name].reshape(-1) for name in self.apart])
            own = digest(vector) if r in self.own else None
            self.comm.broadcast(vector, self.holders[r])
            self.digests[f"replica {r}"] = digest(vector) if own is None else own
            if take is not None:
                for name, part in self._split(vector).items():
                    take(f"{r}/{name}", part)
        if take is not None:
            for name, tensor in self.common_by_name().items():
                take(name, tensor)

    @torch.no_grad()
    def hand_out(self, saved: Mapping[str, Tensor] | None) -> None:
        """The replicas are what rank 0 has `saved` of them. Collective."""
        self._part()
        self._keep()
        for r in range(self.count):
            vector = torch.cat([t.reshape(-1) for t in self.apart.values()])
            if saved is not None:
                for name, part in self._split(vector).items():
                    part.copy_(saved[f"{r}/{name}"])
            self.comm.broadcast(vector, 0)
            if r in self.own:
                _copy(self._split(vector), self.kept[r])
        for name, tensor in self.common_by_name().items():
            whole = (saved[name].to(tensor) if saved is not None else tensor).contiguous()
            self.comm.broadcast(whole, 0)
            tensor.copy_(whole)

    def _split(self, vector: Tensor) -> Tensors:
        parts = vector.split([t.numel() for t in self.apart.values()])
        return {name: part.view(t.shape) for (name, t), part in zip(self.apart.items(), parts, strict=True)}


class OuterUpdate:
    """The outer update of `method: DILOCO`: Douillard et al., DiLoCo (arXiv:2311.08105), algorithm 1.

    d = a - (mean of the replicas)    V = m*V + d    a -= r*(d + m*V) (Nesterov), a -= r*V (SGD)

    with a the weights that all replicas went on from, r `base_lr` and m `momentum` of `outer`. V is zero at first. That is torch's form
    of Nesterov's momentum, which the paper uses. Only what is trained has d; statistics of BatchNorm are the mean.
    """

    def __init__(self, trained: Mapping[str, Tensor], how: Outer) -> None:
        self.how = how
        self.common = {name: t.detach().clone() for name, t in trained.items()}
        self.velocity = {name: torch.zeros_like(t) for name, t in self.common.items()}

    @torch.no_grad()
    def update(self, trained: Mapping[str, Tensor]) -> None:
        """`trained`: the mean of the replicas, which becomes what they go on from."""
        a, v = list(self.common.values()), list(self.velocity.values())
        live = [trained[name] for name in self.common]
        d = torch._foreach_sub(a, live)
        torch._foreach_mul_(v, self.how.momentum)
        torch._foreach_add_(v, d)
        if self.how.type == "Nesterov":
            torch._foreach_add_(d, v, alpha=self.how.momentum)
        step = d if self.how.type == "Nesterov" else v
        torch._foreach_add_(a, step, alpha=-self.how.base_lr)
        torch._foreach_copy_(live, a)

    def remembered(self) -> dict[str, Tensor]:
        """What a snapshot holds of it, by name: the live tensors."""
        return remembered(self.common, self.velocity)


def remembered(common: Mapping[str, Tensor], velocity: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Both by the names that they have in a snapshot."""
    return {f"common/{n}": t for n, t in common.items()} | {f"velocity/{n}": t for n, t in velocity.items()}


def shares_of(solver: Solver, workers: int) -> list[dict[int, range]]:
    """By rank, the replicas that its logical workers belong to, and which of theirs they are, counted from the replica's first."""
    assert solver.sync is not None
    size = solver.logical_workers // solver.sync.replicas
    found: list[dict[int, range]] = []
    for run in runs_of(solver.logical_workers, workers):
        share = {}
        for r in range(run.start // size, -(-run.stop // size)):
            low, high = max(run.start, r * size), min(run.stop, (r + 1) * size)
            share[r] = range(low - r * size, high - r * size)
        found.append(share)
    return found


def holders_of(shares: Sequence[dict[int, range]], count: int) -> list[list[int]]:
    """By replica, the ranks that have some of it."""
    return [[rank for rank, share in enumerate(shares) if r in share] for r in range(count)]


def _like(tensors: Tensors) -> Tensors:
    return {name: torch.empty_like(t, requires_grad=False) for name, t in tensors.items()}


def _copy(source: Tensors, target: Tensors) -> None:
    """What both have."""
    for name, tensor in target.items():
        if name in source:
            tensor.copy_(source[name])


# -- the average of vectors that several ranks hold

# About so much of each vector at a time, which bounds the memory for it. No bit depends on it.
CHUNK_BYTES = 4 << 20


@torch.no_grad()
def average(comm: Comm, holders: Sequence[int], own: Sequence[Sequence[Tensor]], out: Sequence[Tensor]) -> None:
    """Fills `out`, a list of tensors of one dtype, with the mean over vectors, each a list like it. `holders[v]` is the rank that hands
    vector v in, which never falls; `own` are this rank's. Collective.

    Rank r gets slice r of every vector, adds them up in float64 in the order of the vectors, and hands the average out, the same bits for
    any number of ranks. Each sends (W-1)/W of what it holds and as much of one vector: with one each what a ring all-reduce sends."""
    for start, stop in _chunks(out):
        _average(comm, holders, [tensors[start:stop] for tensors in own], out[start:stop])


def _chunks(tensors: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
    start = size = 0
    for index, tensor in enumerate(tensors):
        size += tensor.nbytes
        if size >= CHUNK_BYTES or index == len(tensors) - 1:
            yield start, index + 1
            start, size = index + 1, 0


def _average(comm: Comm, holders: Sequence[int], own: Sequence[Sequence[Tensor]], out: Sequence[Tensor]) -> None:
    length = sum(t.numel() for t in out)
    width = -(-length // comm.size)
    sent = out[0].new_zeros((len(own), comm.size * width))
    for row, tensors in zip(sent, own, strict=True):
        for part, tensor in zip(views_of(row[:length], out), tensors, strict=True):
            part.copy_(tensor)
    # By rank, then by vector.
    sliced = sent.view(len(own), comm.size, width).transpose(0, 1).contiguous().view(-1)
    received = sliced.new_empty(len(holders) * width)
    counts = [sum(holder == rank for holder in holders) * width for rank in range(comm.size)]
    comm.exchange(sliced, [len(own) * width] * comm.size, received, counts)()
    first, *others = received.split(width)
    total = first.double()
    for other in others:
        total.add_(other)
    mean = total.div_(len(holders)).to(first.dtype)
    pieces = [mean if rank == comm.rank else torch.empty_like(mean) for rank in range(comm.size)]
    comm.complete(pieces)()
    for tensor, part in zip(out, views_of(torch.cat(pieces)[:length], out), strict=True):
        tensor.copy_(part)
