"""The evaluation of an ensemble on one rank: one pass over the images by the networks of its members, and the result."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace

from stagerun.base.events import EnsembleTested, Event, Stopped
from stagerun.base.recipe import EnsembleRule
from stagerun.base.wings import ignored_in
from stagerun.engine.evaluate import Classifier, Measure, Score, score, together
from stagerun.engine.update import explained
from stagerun.plan.ensembles import made_from, tested_set
from stagerun.system.typed import read_as
from stagerun.train.agreement import rank0
from stagerun.train.averaging import average_of, keep
from stagerun.train.finish import finite
from stagerun.train.hooks.evaluations import evaluation
from stagerun.train.members import EnsembleRun, StopRequested
from stagerun.train.results import write_result


def test_ensemble(run: EnsembleRun) -> Iterator[Event]:
    """Evaluate the ensemble and write its result. Collective; ends after a Stopped, or after EnsembleTested.

    A kill leaves no trace, and the next run evaluates again. ResumeRefused for a snapshot of another network.
    """
    began, ensemble = time.monotonic(), run.ensemble
    size = min(stage.solver.test_batch_size for stage in run.stages)
    try:
        with explained(size, "test_batch_size"):
            # The top-1 of members inside a stage, which were not evaluated yet.
            before = {
                ensemble.members[number]: _score(run, [run.member(number)], size).top1
                for number, (_, iter) in enumerate(ensemble.points)
                if iter is not None
            }
            if ensemble.rule is EnsembleRule.WEIGHT_AVERAGE:
                members = [(yield from average_of(run))]
            else:
                members = [run.member(number) for number in range(len(run.stages))]
            scored = _score(run, members, size)
    except StopRequested:
        stage, iter = run.begins_at
        yield Stopped(stage=stage, iter=iter, reason=f"asked to stop; ensemble `{ensemble.name}` is left out")
        return
    if ensemble.averages:
        rank0(run.worker.comm, lambda: keep(run, members[0].model))  # before its result
    result = rank0(run.worker.comm, lambda: _result(run, scored, before, time.monotonic() - began))
    yield read_as(EnsembleTested, result)


def _score(run: EnsembleRun, members: Sequence[Classifier], size: int) -> Score:
    """Evaluate on all images of the first validation set, `size` at a time. Collective."""
    first, worker = run.stages[0], run.worker
    stage = replace(first, solver=replace(first.solver, test_batch_size=size))
    answer = together(members, run.ensemble.rule)
    images = evaluation(worker, stage, stage.data.val[0], worker.final_test_iter)  # `check` wants a set
    with images as (batches, count):
        measure = Measure(members[0].normalise, ignored=ignored_in(first))
        scored = score(answer, batches, count, measure, worker.comm, worker.stop)
    if scored is None:
        raise StopRequested
    return scored


def _result(run: EnsembleRun, scored: Score, before: dict[str, float], seconds: float) -> dict[str, object]:
    """Write the result on rank 0, and return it. `before`: top-1 of members from before a stage's end."""
    keeper, schedule, members = run.worker.rank0_keeper, run.worker.schedule, run.ensemble.members
    ends = {t.result.stage: t.result.top1 for t in run.trained if t.result is not None}
    alone = {name: top1 for name in members if (top1 := before.get(name, ends.get(name))) is not None}
    best = max(alone, key=lambda name: alone[name])
    tested = EnsembleTested(
        name=run.ensemble.name,
        images=scored.images,
        top1=scored.top1,
        top5=scored.top5,
        loss=finite(scored.loss),
        seconds=seconds,
        best=best,
        best_top1=alone[best],
        mean_top1=sum(alone.values()) / len(alone),
        attempt=keeper.attempt,
        serial=keeper.serial,
        alone=tuple(alone[name] for name in members if name in alone),
        tested_set=tested_set(schedule, run.stages[0]),
        **made_from(schedule, run.ensemble, [trained.ref for trained in run.trained]),
    )
    keeper.require_held()
    write_result(keeper.disk, keeper.out, tested)
    return asdict(tested)
