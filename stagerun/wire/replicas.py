"""The replicas of a stage with `method: LOCAL` or `DILOCO` on this rank.

Replica r is the r-th of equal, contiguous runs of logical workers. All ranks with some of its logical workers hold its state
and add its gradients up among themselves, along one tree per replica with `determinism: ELASTIC`: so the bits don't depend on
the placement. The network has the tensors of one replica at a time (`_turn`), or the average (`show`).
"""

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from stagerun.base.events import Event, Iterated, Synchronised
from stagerun.base.recipe import Determinism, Outer, Solver, SyncMomentum
from stagerun.comm import Comm, Reducer, make_reducer, runs_of
from stagerun.comm.reduce import Switch, chunks_of
from stagerun.engine.codec import Digests, Tensors, digest
from stagerun.engine.loop import StageLoop
from stagerun.engine.parameters import still_in
from stagerun.engine.state import TrainState, momentum, weights
from stagerun.engine.update import (
    BROKEN_OFF,
    Arithmetic,
    Outcome,
    Pieces,
    Stop,
    Summed,
    apply,
    not_finite,
    summed,
    too_fast,
)
from stagerun.schedule import Knobs, parting, synchronisations
from stagerun.train.context import Context, StageRun
from stagerun.train.exchange import Read
from stagerun.train.progress import REPLICAS
from stagerun.wire.holding import NEEDED, Holding, flat, require_alike, slice_sum


class Replicas(Holding):
    """`runs`: by replica, this rank's logical workers, counted from the replica's first. `owners`: the first rank of each replica, which reports
    for it. `parted`: whether replicas differ by now."""

    file, field = REPLICAS, "sync_param"
    outer: "OuterUpdate | None" = None
    switch: Switch
    parted = shown = False
    held: int | None = None  # the replica in the network

    def __init__(self, state: TrainState, solver: Solver, determinism: Determinism, comm: Comm) -> None:
        """Collective."""
        super().__init__(state, solver, determinism, comm)
        assert solver.sync is not None
        self.sync, self.count = solver.sync, solver.sync.replicas
        self.start, self.meetings = parting(solver), frozenset(synchronisations(solver))
        self.logical_workers = solver.logical_workers // self.count
        self.live = weights(state) | momentum(state)
        # Tensors that differ between replicas: neither counts nor frozen tensors, since in FP64 an average of equal numbers may differ from
        # them.
        still = still_in(state.model, solver.param, solver.freeze)
        self.apart = {n: t for n, t in self.live.items() if t.is_floating_point() and n not in still}
        self.weights = {name: self.apart[name] for name in weights(state) if name in self.apart}
        self.trained: Tensors = {p.name: p.tensor for p in state.solver.parameters}
        self.kept: dict[int, Tensors] = {}  # replicas outside the network; the one in it as it was
        self.reducers: dict[int, Reducer] = {}
        self.replica_digests: Digests = {}  # as of the last `gather`
        shares = shares_of(solver, comm.size)
        ranks = [[rank for rank, share in enumerate(shares) if r in share] for r in range(self.count)]
        self.owners, self.runs, self.local = [some[0] for some in ranks], shares[comm.rank], list(shares[comm.rank])
        parts = [comm.part(some) for some in ranks]
        self.groups = {r: (parts[r], [shares[rank][r] for rank in ranks[r]]) for r in self.local}

    def begin(self, run: StageRun, loop: StageLoop) -> Generator[Event, None, bool]:
        # At the stage's end all replicas are the average.
        if run.resumes and self.start < self.state.iter < self.solver.max_iter:
            self._restore(run)
        return (yield from super().begin(run, loop))

    def make_reducer(self) -> Switch:
        for r, (comm, runs) in self.groups.items():
            assert comm is not None
            parameters = [p.tensor for p in self.state.solver.parameters]
            self.reducers[r] = make_reducer(self.determinism, parameters, comm, self.logical_workers, runs)
        self.switch = Switch(super().make_reducer() if self.state.iter < self.start else self.reducers[self.local[0]])
        return self.switch

    def train(self, worker: Context, read: Read) -> Generator[Event, None, None]:
        """Add to each Synchronised the bytes sent since the previous one, or since the replicas parted."""
        iterations = since = 0  # and bytes sent in them
        for event in super().train(worker, read):
            if isinstance(event, Iterated):
                iterations, since = (iterations + 1, since + event.sent_bytes) if event.iter > self.start else (0, 0)
            elif isinstance(event, Synchronised):
                event = replace(event, iterations=iterations, sent_bytes=since)
                iterations = since = 0
            yield event

    # -- an update

    def update(
        self,
        pieces: Pieces,
        knobs: Knobs | Callable[[float], Knobs],
        reducer: Reducer,
        how: Arithmetic,
        stop: Stop,
        hopeless: Callable[[int], bool] = lambda done: False,
    ) -> Outcome:
        """Update each replica, from the iteration at which they part. `reducer` is `switch`, or wraps it.

        All gradients come first, and the ranks exchange a few numbers: so either all replicas are updated or none, and all ranks report the
        same loss.
        """
        state = self.state
        if state.iter == self.start and not self.parted:
            self._part()
        if not self.parted:
            return super().update(pieces, knobs, reducer, how, stop, hopeless)
        state.statistics.to_training()
        part = replace(how, logical_workers=self.logical_workers)
        sums: dict[int, Summed] = {}
        left, done, broken = iter(pieces), 0, False
        for r, run in self.runs.items():
            self._turn(r)
            share = ((k, batch, k == run[-1]) for k, (_, batch, _) in zip(run, islice(left, len(run)), strict=True))

            def too_late(number: int, done: int = done) -> bool:
                nonlocal broken
                broken = broken or hopeless(done + number)
                return broken

            sums[r] = summed(state, share, reducer, part, stop, too_late)
            done += len(run)
        losses, wrong, stopping = self._agreed(sums, part, how.normalise.device)
        loss = sum(losses) / how.logical_workers

        def outcome(**more: Any) -> Outcome:
            return Outcome(loss, stopping > 0, time.monotonic() - sums[self.local[-1]].started, **more)

        if stopping >= BROKEN_OFF:
            return outcome(broken_off=True)
        if not wrong:
            now = knobs if isinstance(knobs, Knobs) else knobs(loss)
            wrong = too_fast(state, now, loss)
        if wrong:
            state.statistics.forget()
            return outcome(wrong=wrong)
        for number, (r, one) in enumerate(sums.items()):
            self._turn(r)
            if number:
                state.statistics.once_more()
            for parameter in state.solver.parameters:
                parameter.tensor.grad = one.gradients[parameter.name]
            apply(state, one, now, part)
            reducer.accept()
        state.iter += 1
        return outcome(met=self._meet() if state.iter in self.meetings else None)

    def _agreed(self, sums: dict[int, Summed], how: Arithmetic, device: torch.device) -> tuple[list[float], str, float]:
        """Return the loss of each replica, summed over its logical workers; what is not finite, if anything; how many ask to stop: the same on all
        ranks. For each number all ranks but one add 0, so that the sums are exact."""
        numbers = torch.zeros(2 * self.count + 1, dtype=torch.float64)
        for r, one in sums.items():
            if self.owners[r] == self.comm.rank:
                numbers[r], numbers[self.count + r] = one.loss_sum, _wrong(one, how)
                numbers[-1] += one.stopping
        numbers = numbers.to(device)
        self.comm.all_reduce(numbers)()
        losses, codes = numbers[: self.count].tolist(), numbers[self.count : -1].tolist()
        wrong = next((f"{_WHAT[int(code)].format(r)} not finite" for r, code in enumerate(codes) if code), "")
        return losses, wrong, float(numbers[-1])

    @torch.no_grad()
    def _part(self) -> None:
        self.parted, self.held = True, self.local[0]
        for r in self.local[1:]:
            self.kept[r] = {name: t.detach().clone() for name, t in self.live.items()}
        if self.sync.outer is not None:
            self.outer = OuterUpdate(self.trained, self.sync.outer)

    @torch.no_grad()
    def _turn(self, r: int) -> None:
        """Load replica `r` of this rank into the network."""
        if self.held != r:
            self._keep()
            _copy(self.kept[r], self.live)
            self.held, self.shown = r, False
        self.switch.now = self.reducers[r]

    def _keep(self) -> None:
        if self.held is not None:
            if self.held not in self.kept:
                self.kept[self.held] = {name: torch.empty_like(t, requires_grad=False) for name, t in self.live.items()}
            _copy(self.live, self.kept[self.held])
            self.held = None

    # -- averages

    @torch.no_grad()
    def show(self) -> None:
        """Load the average of the replicas, and of what their updates remember, into the network; replicas stay unchanged. It is for evaluations and
        the like, and doesn't count as traffic of training. Collective."""
        if self.parted and not self.shown:
            self._keep()
            before = self.comm.traffic.sent
            self._average(self.apart)
            self.comm.traffic.sent = before
            self.shown = True

    @torch.no_grad()
    def _meet(self) -> int:
        """Synchronise the replicas; return the bytes that this rank sent. Collective."""
        before = self.comm.traffic.sent
        self._keep()
        joined = self.apart if self.sync.momentum is SyncMomentum.AVERAGE else self.weights
        self._average(joined)
        if self.outer is not None:
            self.outer.update(self.trained)
        for r in self.local:
            _copy(joined, {name: self.kept[r][name] for name in joined})
        return self.comm.traffic.sent - before

    def _average(self, out: Tensors) -> None:
        """Fill `out` with the mean over all replicas: the same bits for any number of ranks."""
        rows = [self.kept[r] for r in self.local if self.owners[r] == self.comm.rank]
        counts = [self.owners.count(rank) for rank in range(self.comm.size)]

        def mean(slices: Sequence[Tensor]) -> Tensor:
            total = slices[0].double()
            for other in slices[1:]:
                total.add_(other)
            return total.div_(self.count)

        # A few at a time, which bounds memory. No bit depends on how many.
        vectors, names = [flat(tensor) for tensor in out.values()], iter(out)
        for number in chunks_of(list(map(len, vectors)), vectors[0].element_size()):
            chunk, vectors = vectors[:number], vectors[number:]
            some = list(islice(names, number))
            sent = [[flat(kept[name]) for name in some] for kept in rows]
            slice_sum(self.comm, sent, counts, chunk, mean, chunk[0].dtype)()

    # -- snapshots

    def _differ(self) -> bool:
        """Return whether a snapshot must hold each replica: a stage's end needs only the average."""
        return self.parted and self.state.iter < self.solver.max_iter

    def common(self) -> Tensors:
        return self.outer.remembered() if self.outer is not None and self.parted else {}

    def in_file(self) -> Tensors:
        if not self._differ():
            return {}
        return {f"{r}/{name}": t for r in range(self.count) for name, t in self.apart.items()} | self.common()

    def vector(self, number: int) -> Tensor:
        self._keep()
        tensors = self.kept[number] if number in self.local else self.apart
        return torch.cat([tensors[name].reshape(-1) for name in self.apart])

    def parts(self, number: int, vector: Tensor, file: Tensors) -> Iterator[tuple[Tensor, Tensor]]:
        return ((part, file[f"{number}/{name}"]) for name, part in self._split(vector).items())

    @torch.no_grad()
    def gather(self, keep: bool) -> Mapping[str, memoryview]:
        """Add digests of each replica, as this rank holds or receives it: the same on all ranks that compute correctly."""
        if self._differ():
            self.replica_digests = {f"replica {r}": digest(self.vector(r)) for r in self.local}
        return super().gather(keep)

    def heard(self, number: int, vector: Tensor) -> None:
        if number not in self.local:
            self.replica_digests[f"replica {number}"] = digest(vector)

    def take(self, number: int, vector: Tensor) -> None:
        if number in self.local:
            _copy(self._split(vector), self.kept[number])

    def digests(self) -> Digests:
        return super().digests() | (self.replica_digests if self._differ() else {})

    def needs_others(self) -> str:
        return NEEDED if self.parted and self.comm.size > 1 else ""

    @torch.no_grad()
    def _restore(self, run: StageRun) -> None:
        """Restore each replica from the snapshot."""
        self._part()

        def fitted(saved: Tensors) -> Tensors:
            still = self.live.keys() - self.apart.keys()  # an earlier version saved frozen tensors, too
            saved = {name: t for name, t in saved.items() if name.partition("/")[2] not in still}
            require_alike(saved, self.in_file())
            return saved

        self.restore(run, fitted)

    def _split(self, vector: Tensor) -> Tensors:
        parts = vector.split([t.numel() for t in self.apart.values()])
        return {name: part.view(t.shape) for (name, t), part in zip(self.apart.items(), parts, strict=True)}


class OuterUpdate:
    """The outer update of `method: DILOCO`: Douillard et al., DiLoCo (arXiv:2311.08105), algorithm 1.

    d = a - (mean of the replicas)    V = m*V + d    a -= r*(d + m*V) (Nesterov), a -= r*V (SGD)

    with a the weights from which all replicas continued, r `base_lr` and m `momentum` of `outer`. V is zero at first. That is torch's form
    of Nesterov's momentum, which the paper uses. Only trained tensors have d; statistics of BatchNorm are the mean.
    """

    def __init__(self, trained: Tensors, how: Outer) -> None:
        self.how = how
        self.common = {name: t.detach().clone() for name, t in trained.items()}
        self.velocity = {name: torch.zeros_like(t) for name, t in self.common.items()}

    @torch.no_grad()
    def update(self, trained: Tensors) -> None:
        """`trained`: the mean of the replicas; it becomes their next start."""
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

    def remembered(self) -> Tensors:
        """Return the live tensors for a snapshot, by name."""
        velocity = {f"velocity/{name}": t for name, t in self.velocity.items()}
        return {f"common/{name}": t for name, t in self.common.items()} | velocity


def shares_of(solver: Solver, workers: int) -> list[dict[int, range]]:
    """Return for each rank: its logical workers by replica, counted from the replica's first."""
    assert solver.sync is not None
    size = solver.logical_workers // solver.sync.replicas
    shares: list[dict[int, range]] = []
    for run in runs_of(solver.logical_workers, workers):
        share = {}
        for r in range(run.start // size, -(-run.stop // size)):
            low, high = max(run.start, r * size), min(run.stop, (r + 1) * size)
            share[r] = range(low - r * size, high - r * size)
        shares.append(share)
    return shares


def _copy(source: Tensors, target: Tensors) -> None:
    """Copy the tensors that both have."""
    for name, tensor in target.items():
        if name in source:
            tensor.copy_(source[name])


_WHAT = ("", "the loss of replica {} is", "a gradient of replica {} is", "BatchNorm's statistics of replica {} are")


def _wrong(one: Summed, how: Arithmetic) -> int:
    """Return the index in `_WHAT` of what is not finite; 0 if everything is."""
    loss = one.loss_sum / how.logical_workers
    none: Tensors = {}
    checks = (loss, 0.0, none, 0.0), (loss, one.size, one.gradients, 0.0), (loss, one.size, one.gradients, one.moved)
    return next((code for code, check in enumerate(checks, 1) if not_finite(*check)), 0)
