"""Evaluations inside a stage. Every evaluation of a stage, including the one at its end, is one call of `evaluate_state`."""

import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from stagerun.base.events import Event, Stopped, TestDue, Tested, TestedBeside
from stagerun.base.recipe import Source, Stage
from stagerun.base.wings import ignored_in
from stagerun.comm import runs_of
from stagerun.engine.evaluate import Classifier, Measure, Score, score
from stagerun.engine.images import Batch, feed
from stagerun.engine.losses import evaluation_loss
from stagerun.engine.state import TrainState
from stagerun.engine.update import explained
from stagerun.system.pulse import Section, beating
from stagerun.train.context import Context, StageRun
from stagerun.train.hooks import Evaluated, Seen, SetScore
from stagerun.train.images import evaluated
from stagerun.train.stage_loop import normalise_for


class Evaluations:
    """Evaluates when an evaluation is due. Yields Evaluated, or Stopped if a stop was asked for meanwhile."""

    def __init__(self, run: StageRun, state: TrainState) -> None:
        self.run, self.state = run, state

    def on(self, event: Seen) -> Iterator[Seen]:
        yield event
        if not isinstance(event, TestDue):
            return
        scores = yield from evaluate_state(self.run, self.state, self.run.stage.solver.test_iter)
        if scores is None:
            reason = "asked to stop; the run resumes with its evaluation"
            yield Stopped(stage=event.stage, iter=event.iter, reason=reason)
            return
        self.state.tested = self.state.iter
        yield Evaluated(event.iter, scores)


def evaluate_state(
    run: StageRun, state: TrainState, test_iter: int | None
) -> Generator[Event, None, tuple[SetScore, ...] | None]:
    """Evaluate the trained weights and, where the stage has them, the averaged ones, on `test_iter` batches of each set or on all images.
    Collective. None if asked to stop."""
    state.show()
    scores: list[SetScore] = []
    for val in run.stage.data.val:
        for ema in (False,) if state.average is None else (False, True):
            began = time.monotonic()
            score = _score(run, state, val, test_iter, ema)
            if score is None:
                return None
            scores.append(SetScore(val.name, score, ema))
            event = Tested if val is run.stage.data.val[0] else TestedBeside
            figures: dict[str, Any] = {
                name: getattr(score, name) for name in ("images", "top1", "top5", "loss", "mean_ap")
            }
            figures |= {"val": val.name, "ema": ema, "seconds": time.monotonic() - began}
            yield event(stage=run.stage.name, iter=state.iter, **figures)
    return tuple(scores)


def _score(run: StageRun, state: TrainState, val: Source, test_iter: int | None, ema: bool) -> Score | None:
    worker, stage, solver = run.worker, run.stage, run.stage.solver
    # As in training; but if every batch has another shape, torch.compile would take a minute for each and then give up.
    eager = solver.compile and solver.test_transform.rectangular
    normalise = normalise_for(stage, solver.test_transform, worker.device)
    network = Classifier(state.model, normalise, solver.precision)
    with (
        explained(solver.test_batch_size, "test_batch_size"),
        state.average.in_place() if ema and state.average is not None else nullcontext(),
        torch.compiler.set_stance("force_eager") if eager else nullcontext(),
        evaluation(worker, stage, val, test_iter) as (batches, count),
    ):
        measure = Measure(normalise, evaluation_loss(solver), ignored_in(stage))
        return score(network, batches, count, measure, worker.comm, worker.stop)


@contextmanager
def evaluation(
    worker: Context, stage: Stage, val: Source, test_iter: int | None
) -> Iterator[tuple[Iterator[tuple[int, Batch]], int]]:
    """Yield this rank's batches of an evaluation with their numbers, and the number of batches of all ranks."""
    loader, size, comm = worker.images.test_loader(stage, val), stage.solver.test_batch_size, worker.comm
    images = len(loader.records)
    numbers = evaluated(stage, -(-images // size), test_iter)
    numbered = runs_of(len(numbers), comm.size)[comm.rank]
    requests = ((first, min(size, images - first)) for first in (numbers[n] * size for n in numbered))
    with (
        comm.pulse.section(Section.EVALUATION),
        loader.stream(requests) as batches,
        feed(batches, worker.device) as fed,
    ):
        yield zip(numbered, worker.images.labelled(beating(fed, comm.pulse), stage, val), strict=False), len(numbers)
