"""`early_stop` on every rank: what an evaluation inside the stage decides, and what a snapshot knows of those before."""

import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from stagerun.base.errors import ResumeRefused
from stagerun.base.events import Note
from stagerun.base.recipe import EarlyStop, Metric
from stagerun.engine.evaluate import Score
from stagerun.engine.state import TrainState
from stagerun.plan import State
from stagerun.schedule.early_stop import NOTHING_YET, BestSoFar, follow
from stagerun.train.agreement import rank0
from stagerun.train.progress import progress_of
from stagerun.train.worker import StageRun


def decide(run: StageRun, state: TrainState, score: Score) -> Iterator[Note]:
    """Takes an evaluation of the trained weights into account; says it where the stage ends by it. All ranks have the same score."""
    how, iter = run.stage.solver.early_stop, state.iter
    if how is None:
        return
    state.best = follow(state.best, how, iter, _value(how, score))
    if state.best.ended:
        best = state.best
        first = f"{best.best:.4g} at iteration {best.at}" if best.best is not None else "no number so far"
        what = f"the last best {how.metric.value} is {first}"
        text = (
            f"early_stop: {what}; stage `{run.stage.name}` ends after {iter} of {run.stage.solver.max_iter} iterations"
        )
        yield Note(text=text)


def _value(how: EarlyStop, score: Score) -> float:
    if how.metric is Metric.MAP:
        return math.nan if score.mean_ap is None else 100 * score.mean_ap
    return score.loss if how.metric is Metric.LOSS else 100 * score.top1


def saved_best(run: StageRun) -> BestSoFar:
    """What the snapshot knows, from rank 0. Collective. ResumeRefused if it knows nothing; it is of another definition then, and in a
    finished stage that is kept as it is that doesn't matter."""

    def saved() -> dict[str, Any]:
        found = progress_of(run.step.files).best if run.step.files is not None else None
        if found is None and run.planned.state is State.RESUME:
            raise ResumeRefused(
                f"the snapshot of stage `{run.stage.name}` does not say what it was tested for, and the stage has `early_stop`",
                "it was made without; take `--redo` for the stage, or another --out",
            )
        return asdict(found or NOTHING_YET)

    return BestSoFar(**rank0(run.worker.comm, saved))
