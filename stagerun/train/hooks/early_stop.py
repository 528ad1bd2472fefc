"""`early_stop`: ends a stage when evaluations no longer improve."""

import math
from collections.abc import Iterator

from stagerun.base.events import Note
from stagerun.base.recipe import Metric
from stagerun.engine.state import TrainState
from stagerun.schedule.early_stop import follow
from stagerun.train.context import StageRun
from stagerun.train.hooks import Evaluated, Seen


class EarlyStop:
    """Follows the evaluations of the trained weights, and marks the end of the stage in `state.best`, where the loop looks. All ranks have
    the same scores."""

    def __init__(self, run: StageRun, state: TrainState) -> None:
        self.stage, self.state = run.stage, state

    def on(self, event: Seen) -> Iterator[Seen]:
        yield event
        how = self.stage.solver.early_stop
        if how is None or not isinstance(event, Evaluated):
            return
        score = event.scores[0].score
        value = score.loss if how.metric is Metric.LOSS else 100 * score.top1
        if how.metric is Metric.MAP:
            value = math.nan if score.mean_ap is None else 100 * score.mean_ap
        best = self.state.best = follow(self.state.best, how, event.iter, value)
        if best.ended:
            first = f"{best.best:.4g} at iteration {best.at}" if best.best is not None else "no number so far"
            length = f"{event.iter} of {self.stage.solver.max_iter} iterations"
            text = f"early_stop: the last best {how.metric.value} is {first}; stage `{self.stage.name}` ends after {length}"
            yield Note(text=text)
