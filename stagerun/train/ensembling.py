"""An ensemble on one rank: its members' networks from their last snapshots, one pass over the images, and the result."""

import json
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

import torch
from torch import nn

from stagerun.base.errors import ResumeRefused
from stagerun.base.events import EnsembleTested, Event, Note, StageFinished, Stopped
from stagerun.base.recipe import Ensemble, EnsembleRule, Stage
from stagerun.base.snapshots import SnapshotRef
from stagerun.comm import runs_of
from stagerun.engine.averages import BatchStatistics
from stagerun.engine.codec import decode
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
from stagerun.store.logged import ensemble_of
from stagerun.system.pulse import Section, beating
from stagerun.train.agreement import hand_out, rank0
from stagerun.train.finish import finite
from stagerun.train.images import evaluated
from stagerun.train.results import write_ensemble
from stagerun.train.stage_start import arithmetic_of, normalise_for
from stagerun.train.worker import Worker


@dataclass(frozen=True, slots=True)
class Trained:
    """A member as rank 0 has it: the end of its stage, the bytes of its weights, and how it does by itself."""

    ref: SnapshotRef
    weights: bytes
    result: StageFinished


@dataclass(frozen=True, slots=True)
class EnsembleRun:
    """An ensemble that comes next, on one worker. `trained`, in the order of the members, is rank 0's."""

    worker: Worker
    ensemble: Ensemble
    trained: Sequence[Trained] = ()

    @property
    def stages(self) -> list[Stage]:
        return [self.worker.schedule.stage(name) for name in self.ensemble.members]


def test_ensemble(run: EnsembleRun) -> Iterator[Event]:
    """Evaluates the ensemble and writes its result. Collective; ends after a Stopped, or after EnsembleTested.

    A kill leaves nothing of it, and it is evaluated anew. ResumeRefused for a snapshot of another network.
    """
    began = time.monotonic()
    size = min(stage.solver.test_batch_size for stage in run.stages)
    found: Score | None = None
    with explained(size, "test_batch_size"):
        if run.ensemble.rule is EnsembleRule.WEIGHT_AVERAGE:
            average = yield from _weight_average(run)
            members = [average] if average is not None else []
        else:
            members = [_member(run, number) for number in range(len(run.stages))]
        if members:
            found = _score(run, members, size)
    if found is None:
        last = run.stages[-1]
        reason = f"asked to stop; ensemble `{run.ensemble.name}` is left out"
        yield Stopped(stage=last.name, iter=last.solver.max_iter, reason=reason)
        return
    yield _result(run, found, time.monotonic() - began)


def _member(run: EnsembleRun, number: int) -> Member:
    """A network with its trained weights, the same on every rank. Collective."""
    stage = run.stages[number]
    model = _network(run, stage)

    def fill() -> None:
        trained = run.trained[number]
        with _of_this_network(trained):
            restore(dict(model.state_dict()), decode(trained.weights))

    rank0(run.worker.comm, fill)
    hand_out(run.worker.comm, model.state_dict().values())
    return _as_member(run, model, stage)


def _as_member(run: EnsembleRun, model: nn.Module, stage: Stage) -> Member:
    solver = stage.solver
    normalise = normalise_for(stage.model, solver, solver.test_transform, run.worker.device, stage.identity)
    return Member(model, normalise, solver.precision)


def _weight_average(run: EnsembleRun) -> Generator[Event, None, Member | None]:
    """The network with the mean of the weights and its own BatchNorm statistics, the same on every rank; None if asked to stop.
    Collective. It computes as the first member does."""
    stage = run.stages[0]
    model = _network(run, stage)
    frozen = frozen_norms(model, stage.solver.freeze)
    statistics = BatchStatistics(model, frozen)

    def fill() -> None:
        mean = WeightMean(model)
        for trained in run.trained:
            with _of_this_network(trained):
                mean.add(decode(trained.weights))
        with _of_this_network(run.trained[0]):
            restore(dict(model.state_dict()), mean.mean())

    rank0(run.worker.comm, fill)
    hand_out(run.worker.comm, model.state_dict().values())
    if statistics.layers:
        images = run.ensemble.batch_norm_iter * stage.solver.batch_size
        yield Note(
            text=f"ensemble {run.ensemble.name}: BatchNorm statistics of the averaged network, over {images} images"
        )
        if not _take_statistics(run, model, statistics, frozen):
            return None
    yield from run.worker.images.replacing(stage).news_of_all(run.worker.comm)
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


def _score(run: EnsembleRun, members: Sequence[Member], size: int) -> Score | None:
    """All images, `size` at a time. Collective; None if asked to stop."""
    first = run.stages[0]
    stage = replace(first, solver=replace(first.solver, test_batch_size=size))
    loader = run.worker.images.test_loader(stage, stage.data.val[0])  # `check` wants one
    images = len(loader.records)
    numbers = evaluated(stage, -(-images // size), run.worker.final_test_iter)
    mine = runs_of(len(numbers), run.worker.comm.size)[run.worker.comm.rank]
    asked = ((begin, min(size, images - begin)) for begin in (numbers[n] * size for n in mine))
    answer, pulse = together(members, run.ensemble.rule), run.worker.comm.pulse
    with pulse.section(Section.EVALUATION), loader.stream(asked) as batches, feed(batches, run.worker.device) as fed:
        fed = beating(fed, pulse)
        return score(
            answer,
            zip(mine, fed, strict=False),
            len(numbers),
            members[0].normalise,
            run.worker.comm,
            run.worker.stop,
            ignored=ignored_in(first),
        )


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


def _result(run: EnsembleRun, found: Score, seconds: float) -> EnsembleTested:
    """Written to disk by rank 0, the same on every rank."""

    def result() -> dict[str, object]:
        assert run.worker.keeper is not None
        alone = {t.result.stage: t.result.top1 for t in run.trained if t.result.top1 is not None}
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
            tested_set=tested_set(run.worker.schedule, run.stages[0]),
            **made_from(run.worker.schedule, run.ensemble, [t.ref for t in run.trained]),
        )
        run.worker.keeper.require_held()
        write_ensemble(run.worker.keeper.disk, run.worker.keeper.out, tested)
        return asdict(tested)

    return ensemble_of(json.dumps(rank0(run.worker.comm, result)).encode())
