"""An ensemble on one rank: its members' networks from their last snapshots, one pass over the images, and the result."""

import json
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor, nn

from stagerun.base.errors import ResumeRefused
from stagerun.base.events import EnsembleTested, Event, Note, StageFinished, Stopped
from stagerun.base.recipe import Ensemble, EnsembleRule, Stage
from stagerun.base.snapshots import SnapshotRef
from stagerun.comm import runs_of
from stagerun.engine.averages import BatchStatistics
from stagerun.engine.codec import decode, encode
from stagerun.engine.device import dtype_of
from stagerun.engine.ensemble import Member, WeightMean, take_statistics, together
from stagerun.engine.evaluate import Score, score
from stagerun.engine.feed import feed
from stagerun.engine.parameters import frozen_norms
from stagerun.engine.state import restore, to_channels_last
from stagerun.engine.update import explained
from stagerun.language.nets import ignored_in
from stagerun.models import build
from stagerun.plan.counting import tested_set
from stagerun.plan.ensembles import made_from
from stagerun.schedule.averages import weights
from stagerun.store.logged import ensemble_of
from stagerun.system.pulse import Section, beating
from stagerun.train.agreement import hand_out, rank0
from stagerun.train.environment import environment_of
from stagerun.train.finish import evaluation, finite
from stagerun.train.progress import WEIGHTS
from stagerun.train.results import write_ensemble
from stagerun.train.stage_start import arithmetic_of, normalise_for
from stagerun.train.stored import most_bytes
from stagerun.train.worker import Context, StageRun


@dataclass(frozen=True, slots=True)
class Trained:
    """A member as rank 0 has it: the snapshot, which was verified, and how it does by itself, where its stage ends with it."""

    ref: SnapshotRef
    result: StageFinished | None = None


@dataclass(frozen=True, slots=True)
class EnsembleRun:
    """An ensemble that comes next, on one worker. `trained`, in the order of the members, is rank 0's. `start_of`: the stage that it is
    averaged for; '' for its evaluation."""

    worker: Context
    ensemble: Ensemble
    trained: Sequence[Trained] = ()
    start_of: str = ""

    @property
    def stages(self) -> list[Stage]:
        return [self.worker.schedule.stage(name) for name, _ in self.ensemble.points]

    @property
    def begins_at(self) -> tuple[str, int]:
        """Stage and iteration of the member that is trained last."""
        running = [stage.name for stage in self.worker.schedule.stages]
        lengths = {stage.name: stage.solver.max_iter for stage in self.stages}
        return max(
            ((name, lengths[name] if iter is None else iter) for name, iter in self.ensemble.points),
            key=lambda end: (running.index(end[0]), end[1]),
        )


class _AskedToStop(Exception):
    """In the midst of a pass over images, on all ranks."""


def test_ensemble(run: EnsembleRun) -> Iterator[Event]:
    """Evaluates the ensemble and writes its result. Collective; ends after a Stopped, or after EnsembleTested.

    A kill leaves nothing of it, and it is evaluated anew. ResumeRefused for a snapshot of another network.
    """
    began = time.monotonic()
    size = min(stage.solver.test_batch_size for stage in run.stages)
    try:
        with explained(size, "test_batch_size"):
            # The top-1 of members that no stage ends with: no one has evaluated them yet.
            before = {
                run.ensemble.members[number]: _score(run, [_member(run, number)], size).top1
                for number, (_, iter) in enumerate(run.ensemble.points)
                if iter is not None
            }
            if run.ensemble.rule is EnsembleRule.WEIGHT_AVERAGE:
                members = [(yield from _weight_average(run))]
            else:
                members = [_member(run, number) for number in range(len(run.stages))]
            found = _score(run, members, size)
    except _AskedToStop:
        stage, iter = run.begins_at
        yield Stopped(stage=stage, iter=iter, reason=f"asked to stop; ensemble `{run.ensemble.name}` is left out")
        return
    if run.ensemble.rule.averages:
        rank0(run.worker.comm, lambda: _keep(run, members[0].model))
    yield _result(run, found, before, time.monotonic() - began)


def _member(run: EnsembleRun, number: int) -> Member:
    """A network with its trained weights, the same on every rank. Collective."""
    stage = run.stages[number]
    model = _network(run, stage)

    def fill() -> None:
        trained = run.trained[number]
        with _of_this_network(trained):
            restore(dict(model.state_dict()), _weights(run, trained))

    rank0(run.worker.comm, fill)
    hand_out(run.worker.comm, model.state_dict().values())
    return _as_member(run, model, stage)


def _weights(run: EnsembleRun, trained: Trained) -> dict[str, Tensor]:
    """Read when it is its turn, so that rank 0 holds those of one member at a time. ResumeRefused for one damaged since it was verified."""
    keeper, ref = run.worker.keeper, trained.ref
    assert keeper is not None
    files = keeper.read(ref, most_bytes(run.worker.schedule.stage(ref.stage).model))
    if files is None:
        raise ResumeRefused(
            f"snapshot {ref.name} was damaged meanwhile", "type the same command again: it is made anew"
        )
    return decode(files.get(WEIGHTS, b""))


def averaged_start(run: StageRun) -> Generator[Event, None, dict[str, bytes] | None]:
    """The files that a stage which starts from an average starts with, on rank 0: its weights; empty on the others. Collective; None after
    a Stopped: what was computed is lost, and computed anew."""
    worker, name = run.worker, run.stage.average
    assert name is not None
    trained = [Trained(ref) for ref in run.planned.averaged]
    of = EnsembleRun(worker, worker.schedule.ensemble(name), trained, run.stage.name)
    try:
        average = yield from _weight_average(of)
    except _AskedToStop:
        reason = f"asked to stop; ensemble `{name}` is averaged anew"
        yield Stopped(stage=run.stage.name, iter=run.planned.iter, reason=reason)
        return None
    if worker.comm.rank != 0:
        return {}
    return {WEIGHTS: encode(average.model.state_dict())}


def _as_member(run: EnsembleRun, model: nn.Module, stage: Stage) -> Member:
    solver = stage.solver
    normalise = normalise_for(stage.model, solver, solver.test_transform, run.worker.device, stage.identity)
    return Member(model, normalise, solver.precision)


def _weight_average(run: EnsembleRun) -> Generator[Event, None, Member]:
    """The network with the mean of the weights of its members, and its own BatchNorm statistics, the same on every rank.
    Collective. It computes as the first of all members does."""
    stage = run.stages[0]
    model = _network(run, stage)
    frozen = frozen_norms(model, stage.solver.freeze)
    statistics = BatchStatistics(model, frozen)

    def fill() -> None:
        if len(run.trained) < len(run.ensemble.members):
            raise ResumeRefused(f"not all snapshots that ensemble `{run.ensemble.name}` is averaged from are there")
        mean, shape = WeightMean(model), run.ensemble.shape
        iters = [trained.ref.iter for trained in run.trained]
        shares = weights(shape, sorted(iters))
        for trained in run.trained:
            share = None if shape is None else shares[sorted(iters).index(trained.ref.iter)]
            with _of_this_network(trained):
                mean.add(_weights(run, trained), share)
        with _of_this_network(run.trained[0]):
            restore(dict(model.state_dict()), mean.mean())

    rank0(run.worker.comm, fill)
    hand_out(run.worker.comm, model.state_dict().values())
    if statistics.layers:
        images = run.ensemble.batch_norm_iter * stage.solver.batch_size
        what = f"stage {run.start_of} starts from " * bool(run.start_of) + f"ensemble {run.ensemble.name}"
        yield Note(text=f"{what}: BatchNorm statistics of the averaged network, over {images} images")
        if not _take_statistics(run, model, statistics, frozen):
            raise _AskedToStop
    return _as_member(run, model, stage)


def _take_statistics(
    run: EnsembleRun, model: nn.Module, statistics: BatchStatistics, frozen: Sequence[nn.Module]
) -> bool:
    """Over the first member's images of training, from the start of its epoch 0, at the size that it ends with."""
    stage, iterations = run.stages[0], run.ensemble.batch_norm_iter
    solver = replace(stage.solver, transform=replace(stage.solver.transform, crop_size_ramp=None))
    workers = runs_of(solver.logical_workers, run.worker.comm.size)[run.worker.comm.rank]
    how = arithmetic_of(stage.model, replace(solver, loss=None), run.worker.device, identity=stage.identity)
    how = replace(how, clip_gradients=None)
    size = solver.device_batch_size
    asked = ((i * solver.batch_size + worker * size, size) for i in range(iterations) for worker in workers)
    loader = run.worker.images.loader(replace(stage, solver=solver))
    pulse = run.worker.comm.pulse
    with pulse.section(Section.EVALUATION), loader.stream(asked) as batches, feed(batches, run.worker.device) as fed:
        return take_statistics(
            model, statistics, frozen, beating(fed, pulse), iterations, workers, how, run.worker.comm, run.worker.stop
        )


def _score(run: EnsembleRun, members: Sequence[Member], size: int) -> Score:
    """All images of the first validation set, `size` at a time. Collective."""
    first = run.stages[0]
    stage = replace(first, solver=replace(first.solver, test_batch_size=size))
    answer, worker = together(members, run.ensemble.rule), run.worker
    images = evaluation(worker, stage, stage.data.val[0], worker.final_test_iter)  # `check` wants a set
    with images as (batches, count):
        found = score(answer, batches, count, members[0].normalise, worker.comm, worker.stop, ignored=ignored_in(first))
    if found is None:
        raise _AskedToStop
    return found


def _network(run: EnsembleRun, stage: Stage) -> nn.Module:
    """The stage's network on the device, in the stage's precision and memory format. Not compiled: one evaluation is not worth
    it."""
    solver = stage.solver
    torch.manual_seed(solver.random_seed)
    model = build(stage.model).to(run.worker.device, dtype_of(solver.precision))
    if solver.channels_last:
        to_channels_last(model)
    return model


@contextmanager
def _of_this_network(trained: Trained) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ResumeRefused(
            f"snapshot {trained.ref.name} does not fit the network of the schedule: {error}",
            "it was made by another model or stagerun; take another --out to start anew",
        ) from error


def _keep(run: EnsembleRun, model: nn.Module) -> None:
    """Rank 0's: the averaged network is saved before its result is, for `eval`, `predict` and `export`."""
    keeper, worker, stage = run.worker.keeper, run.worker, run.stages[0]
    assert keeper is not None
    iter = max(trained.ref.iter for trained in run.trained if trained.ref.stage == stage.name)
    bits = environment_of(worker.schedule, stage, worker.device, worker.comm.size, worker.others)
    keeper.commit_average(run.ensemble.name, stage, iter, encode(model.state_dict()), bits)


def _result(run: EnsembleRun, found: Score, before: dict[str, float], seconds: float) -> EnsembleTested:
    """Written to disk by rank 0, the same on every rank. `before`: top-1 of members from before a stage's end."""

    def result() -> dict[str, object]:
        assert run.worker.keeper is not None
        ends = {
            t.result.stage: t.result.top1 for t in run.trained if t.result is not None and t.result.top1 is not None
        }
        alone = {name: top1 for name in run.ensemble.members if (top1 := (before | ends).get(name)) is not None}
        best = max(alone, key=lambda name: alone[name])
        tested = EnsembleTested(
            name=run.ensemble.name,
            images=found.images,
            top1=found.top1,
            top5=found.top5,
            loss=finite(found.loss),
            seconds=seconds,
            best=best,
            best_top1=alone[best],
            mean_top1=sum(alone.values()) / len(alone),
            attempt=run.worker.keeper.attempt,
            serial=run.worker.keeper.serial,
            alone=tuple(alone[name] for name in run.ensemble.members if name in alone),
            tested_set=tested_set(run.worker.schedule, run.stages[0]),
            **made_from(run.worker.schedule, run.ensemble, [t.ref for t in run.trained]),
        )
        run.worker.keeper.require_held()
        write_ensemble(run.worker.keeper.disk, run.worker.keeper.out, tested)
        return asdict(tested)

    return ensemble_of(json.dumps(rank0(run.worker.comm, result)).encode())
