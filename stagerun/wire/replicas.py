"""The replicas of a stage with `method: LOCAL` or `DILOCO`, as far as this rank has a part in them.

Replica r is the r-th of equal, contiguous runs of logical workers. The ranks that have some of its logical workers all hold its state,
and add its gradients up among themselves, along a tree of its own with `determinism: ELASTIC`: so the bits don't depend on
who holds what. The network has the tensors of one replica at a time, of which it is the `turn`, or what `show` puts there.
"""

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor

from stagerun.base.events import Event, Iterated, Synchronised
from stagerun.base.recipe import Determinism, Outer, Solver, SyncMomentum
from stagerun.comm import Comm, Reducer, make_reducer, runs_of
from stagerun.comm.reduce import Switch, chunks_of, views_of
from stagerun.engine.codec import digest
from stagerun.engine.loop import StageLoop
from stagerun.engine.parameters import still_in
from stagerun.engine.state import TrainState, momentum, weights
from stagerun.engine.update import BROKEN_OFF, Arithmetic, Outcome, Pieces, Summed, apply, not_finite, summed, too_fast
from stagerun.schedule import Knobs, parting, synchronisations
from stagerun.train.context import Context, StageRun
from stagerun.train.exchange import Read
from stagerun.train.progress import REPLICAS
from stagerun.wire.holding import NEEDED, Holding, Tensors, require_alike, slice_sum


class Replicas(Holding):
    """`runs`: the replicas that this rank has logical workers of, and which, counted from the replica's first. `owners`: the first rank of
    each, which speaks for it. `parted`: whether they go their own ways already."""

    file, field = REPLICAS, "sync_param"
    outer: "OuterUpdate | None" = None
    switch: Switch
    parted = shown = False
    held: int | None = None  # the replica that the network has now

    def __init__(self, state: TrainState, solver: Solver, determinism: Determinism, comm: Comm) -> None:
        """Collective."""
        super().__init__(state, solver, determinism, comm)
        assert solver.sync is not None
        self.sync, self.count = solver.sync, solver.sync.replicas
        self.start, self.meetings = parting(solver), frozenset(synchronisations(solver))
        self.logical_workers = solver.logical_workers // self.count
        self.live = weights(state) | momentum(state)
        # What differs between replicas. The counts, which are whole numbers, are the same in all, and so is what no update moves: in FP64 an
        # average of equal numbers may be another one.
        still = still_in(state.model, solver.param, solver.freeze)
        self.apart = {n: t for n, t in self.live.items() if t.is_floating_point() and n not in still}
        self.weights = {name: self.apart[name] for name in weights(state) if name in self.apart}
        self.trained: Tensors = {p.name: p.tensor for p in state.solver.parameters}
        self.kept: dict[int, Tensors] = {}  # of the replicas that the network has not, and of that one as it was
        self.reducers: dict[int, Reducer] = {}
        self.found: dict[str, int] = {}  # digests of all replicas, as of the last `gather`
        shares = shares_of(solver, comm.size)
        ranks = [[rank for rank, share in enumerate(shares) if r in share] for r in range(self.count)]
        self.owners, self.runs, self.own = [those[0] for those in ranks], shares[comm.rank], list(shares[comm.rank])
        parts = [comm.part(those) for those in ranks]
        self.groups = {r: (parts[r], [shares[rank][r] for rank in ranks[r]]) for r in self.own}

    def begin(self, run: StageRun, loop: StageLoop) -> Generator[Event, None, bool]:
        # At the stage's end all are the average.
        if run.resumes and self.start < self.state.iter < self.solver.max_iter:
            self._restore(run)
        return (yield from super().begin(run, loop))

    def make_reducer(self) -> Switch:
        for r, (comm, runs) in self.groups.items():
            assert comm is not None
            parameters = [p.tensor for p in self.state.solver.parameters]
            self.reducers[r] = make_reducer(self.determinism, parameters, comm, self.logical_workers, runs)
        self.switch = Switch(super().make_reducer() if self.state.iter < self.start else self.reducers[self.own[0]])
        return self.switch

    def train(self, worker: Context, read: Read) -> Generator[Event, None, None]:
        """Each Synchronised has what was sent since the one before, or since the replicas went apart."""
        iterations = since = 0  # and what was sent in them
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
        stop: Callable[[], bool],
        hopeless: Callable[[int], bool] = lambda done: False,
    ) -> Outcome:
        """Of each replica, from the iteration at which they part. `reducer` is `switch`, or around it.

        All gradients come before anything is moved, and the ranks tell each other a few numbers before it: so either all replicas are moved
        or none is, and all ranks report the same loss.
        """
        state = self.state
        if state.iter == self.start and not self.parted:
            self._part()
        if not self.parted:
            return super().update(pieces, knobs, reducer, how, stop, hopeless)
        state.statistics.to_training()
        part = replace(how, logical_workers=self.logical_workers)
        found: dict[int, Summed] = {}
        left, done, broken = iter(pieces), 0, False
        for r, run in self.runs.items():
            self._turn(r)
            mine = ((k, batch, k == run[-1]) for k, (_, batch, _) in zip(run, islice(left, len(run)), strict=True))

            def too_late(number: int, done: int = done) -> bool:
                nonlocal broken
                broken = broken or hopeless(done + number)
                return broken

            found[r] = summed(state, mine, reducer, part, stop, too_late)
            done += len(run)
        started = next(reversed(found.values())).started
        losses, wrong, stopping = self._agreed(found, part, how.normalise.device)
        loss = sum(losses) / how.logical_workers
        if stopping >= BROKEN_OFF:
            return Outcome(loss, True, time.monotonic() - started, broken_off=True)
        if not wrong:
            now = knobs if isinstance(knobs, Knobs) else knobs(loss)
            wrong = too_fast(state, now, loss)
        if wrong:
            state.statistics.forget()
            return Outcome(loss, stopping > 0, time.monotonic() - started, wrong)
        for number, (r, one) in enumerate(found.items()):
            self._turn(r)
            if number:
                state.statistics.once_more()
            for parameter in state.solver.parameters:
                parameter.tensor.grad = one.gradients[parameter.name]
            apply(state, one, now, part)
            reducer.accept()
        state.iter += 1
        met = self._meet() if state.iter in self.meetings else None
        return Outcome(loss, stopping > 0, time.monotonic() - started, met=met)

    def _agreed(
        self, found: dict[int, Summed], how: Arithmetic, device: torch.device
    ) -> tuple[list[float], str, float]:
        """(the loss of each replica, summed over its logical workers; what is not finite, '' if all is; how many ask to stop), the same on all
        ranks. Of each number all ranks but one add 0, so that the sums are exact."""
        told = torch.zeros(2 * self.count + 1, dtype=torch.float64)
        for r, one in found.items():
            if self.owners[r] == self.comm.rank:
                told[r], told[self.count + r] = one.loss_sum, _wrong(one, how)
                told[-1] += one.stopping
        told = told.to(device)
        self.comm.all_reduce(told)()
        losses, codes = told[: self.count].tolist(), told[self.count : -1].tolist()
        wrong = next((f"{_WHAT[int(code)].format(r)} not finite" for r, code in enumerate(codes) if code), "")
        return losses, wrong, float(told[-1])

    @torch.no_grad()
    def _part(self) -> None:
        self.parted, self.held = True, self.own[0]
        for r in self.own[1:]:
            self.kept[r] = {name: t.detach().clone() for name, t in self.live.items()}
        if self.sync.outer is not None:
            self.outer = OuterUpdate(self.trained, self.sync.outer)

    @torch.no_grad()
    def _turn(self, r: int) -> None:
        """The network is replica `r` of this rank."""
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
    def _meet(self) -> int:
        """Synchronise the replicas; return the bytes that this rank sent for it. Collective."""
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
        """Fill `out` with the mean over all replicas: the same bits for any number of ranks."""
        rows, tensors = [self.kept[r] for r in self.own if self.owners[r] == self.comm.rank], list(out.values())
        counts = [self.owners.count(rank) for rank in range(self.comm.size)]

        def mean(slices: Sequence[Tensor]) -> Tensor:
            total = slices[0].double()
            for other in slices[1:]:
                total.add_(other)
            return total.div_(self.count).to(slices[0].dtype)

        # A few at a time, which bounds the memory for it. No bit depends on how many.
        names = iter(out)
        for number in chunks_of([t.numel() for t in tensors], tensors[0].element_size()):
            chunk = {name: out[name] for name in islice(names, number)}
            length = sum(t.numel() for t in chunk.values())
            sent = tensors[0].new_zeros((len(rows), -(-length // self.comm.size) * self.comm.size))
            for row, kept in zip(sent, rows, strict=True):
                for part, name in zip(views_of(row[:length], list(chunk.values())), chunk, strict=True):
                    part.copy_(kept[name])
            whole = slice_sum(self.comm, sent, counts, mean)()
            for tensor, part in zip(chunk.values(), views_of(whole[:length], list(chunk.values())), strict=True):
                tensor.copy_(part)

    # -- snapshots

    def _differ(self) -> bool:
        """Whether a snapshot must hold them one by one: what is made of the stage's end needs the average alone."""
        return self.parted and self.state.iter < self.solver.max_iter

    def common(self) -> Tensors:
        return self.outer.remembered() if self.outer is not None and self.parted else {}

    def in_file(self) -> Tensors:
        if not self._differ():
            return {}
        return {f"{r}/{name}": t for r in range(self.count) for name, t in self.apart.items()} | self.common()

    def vector(self, number: int) -> Tensor:
        self._keep()
        mine = self.kept[number] if number in self.own else self.apart
        return torch.cat([mine[name].reshape(-1) for name in self.apart])

    def parts(self, number: int, vector: Tensor, file: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        return ((part, file[f"{number}/{name}"]) for name, part in self._split(vector).items())

    @torch.no_grad()
    def gather(self, keep: bool) -> Mapping[str, memoryview]:
        """`found` has then the digests of each replica, as this rank has it, or has just heard of it: the same on all ranks that compute
        right."""
        if self._differ():
            self.found = {f"replica {r}": digest(self.vector(r)) for r in self.own}
        return super().gather(keep)

    def heard(self, number: int, vector: Tensor) -> None:
        if number not in self.own:
            self.found[f"replica {number}"] = digest(vector)

    def take(self, number: int, vector: Tensor) -> None:
        if number in self.own:
            _copy(self._split(vector), self.kept[number])

    def digests(self) -> dict[str, int]:
        return super().digests() | (self.found if self._differ() else {})

    def needs_others(self) -> str:
        return NEEDED if self.parted and self.comm.size > 1 else ""

    @torch.no_grad()
    def _restore(self, run: StageRun) -> None:
        """Take the replicas from the snapshot, each as it was."""
        self._part()

        def fitted(saved: Tensors) -> Tensors:
            still = self.live.keys() - self.apart.keys()  # an earlier version saved what is frozen, too
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
        velocity = {f"velocity/{name}": t for name, t in self.velocity.items()}
        return {f"common/{name}": t for name, t in self.common.items()} | velocity


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


def _copy(source: Tensors, target: Tensors) -> None:
    """What both have."""
    for name, tensor in target.items():
        if name in source:
            tensor.copy_(source[name])


_WHAT = ("", "the loss of replica {} is", "a gradient of replica {} is", "BatchNorm's statistics of replica {} are")


def _wrong(one: Summed, how: Arithmetic) -> int:
    """Which of `_WHAT` is not finite; 0 if all is."""
    loss = one.loss_sum / how.logical_workers
    none: dict[str, Tensor] = {}
    checks = (loss, 0.0, none, 0.0), (loss, one.size, one.gradients, 0.0), (loss, one.size, one.gradients, one.moved)
    return next((code for code, check in enumerate(checks, 1) if not_finite(*check)), 0)
