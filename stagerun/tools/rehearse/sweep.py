"""The sweep as values: its rates, the loss over them, and what that suggests. Pure.

Leslie N. Smith, arXiv:1506.01186, in the form that fastai has made usual (`Learner.lr_find`): the rate grows exponentially, the loss is
smoothed, and where that is 4 times its lowest the sweep ends.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from stagerun.base.recipe import Method, Schedule
from stagerun.base.text import count

BETA = 0.98  # of the smoothed loss
DIVERGED = 4.0  # times the lowest smoothed loss
# Left out of suggestions: the first tenth of a sweep, where the mean has hardly begun, and the last points, where it has diverged.
FIRST, LAST = 10, 5
LEAST = 3  # points without these
SIGNIFICANT = 3  # standard errors that the smoothed loss falls by


@dataclass(frozen=True, slots=True)
class Point:
    """`smoothed`: the exponential mean of the losses so far, as an Adam moment is corrected for its start."""

    lr: float
    loss: float
    smoothed: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """`iterations`: that were asked for; `ended`: why there are fewer points, in words, '' if there aren't."""

    schedule: str
    stage: str
    start: str
    batch_size: int
    iterations: int
    points: tuple[Point, ...]
    ended: str = ""


@dataclass(frozen=True, slots=True)
class Suggestion:
    """`steepest`: where the smoothed loss falls fastest over the logarithm of the rate. `tenth`: a tenth of the rate at which it is lowest.
    None: not known."""

    steepest: float | None
    tenth: float | None


def rate(i: int, start: float, end: float, iterations: int) -> float:
    """The rate of the iteration with that number, 0-based."""
    return start * (end / start) ** (i / max(1, iterations - 1))


class Smoothing:
    """The points as they come."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self._mean, self._lowest = 0.0, math.inf

    def add(self, lr: float, loss: float) -> bool:
        """Whether the loss has diverged with this one."""
        self._mean = BETA * self._mean + (1 - BETA) * loss
        value = self._mean / (1 - BETA ** (len(self.points) + 1))
        self.points.append(Point(lr, loss, value))
        self._lowest = min(self._lowest, value)
        return value > DIVERGED * self._lowest


def _descent(sweep: Sweep) -> tuple[Sequence[Point], str]:
    """The points down to the lowest smoothed loss: what falls behind that falls from where it had diverged to. Or none, and why."""
    first = sweep.iterations // FIRST
    kept = sweep.points[first : len(sweep.points) - LAST]
    if len(kept) < LEAST:
        few = count(len(sweep.points), "iteration")
        return (), f"{few} gave too little for a suggestion: take more --iters, or a smaller --last-rate"
    lowest = min(range(len(kept)), key=lambda i: kept[i].smoothed)
    if lowest == 0:
        return (), "the loss never fell: take a smaller --first-rate, or more --iters"
    # Standard errors: half of all differences of two losses of deviation 1 are below 0.954, and the first mean is a part of the last one.
    deviation = median(abs(b.loss - a.loss) for a, b in pairwise(sweep.points[: first + lowest + 1])) / 0.954
    noise = deviation * math.sqrt(1 / (first + 1) - 1 / (first + lowest + 1))
    if kept[0].smoothed - kept[lowest].smoothed < SIGNIFICANT * noise:
        return (), "the loss fell by no more than chance makes it fall, which tells no rate: take more --iters"
    return kept[: lowest + 1], ""


def suggestion(sweep: Sweep) -> Suggestion:
    points, why = _descent(sweep)
    if why:
        return Suggestion(None, None)
    # All steps are equally long on the logarithm's axis.
    steepest = min(pairwise(points), key=lambda pair: pair[1].smoothed - pair[0].smoothed)
    return Suggestion(steepest[0].lr, points[-1].lr / 10)


def warnings(sweep: Sweep) -> list[str]:
    """What keeps the suggestions from being good ones."""
    points, why = _descent(sweep)
    if not why and not sweep.ended and points[-1] is sweep.points[-LAST - 1]:
        why = "the loss was still falling at the last rate: take a larger --last-rate"
    return [f"the sweep ended early: {sweep.ended}"] * bool(sweep.ended) + [why] * bool(why)


def swept(schedule: Schedule, name: str, iterations: int) -> tuple[Schedule, tuple[str, ...]]:
    """The schedule with that stage alone, of plain updates with nothing between them, and what of the stage is left out, in words."""
    stage = schedule.stage(name)
    left_out = []
    solver = stage.solver
    if solver.sync is not None:
        left_out.append("`sync_param`: all workers update together")
    if solver.compress is not None and solver.compress.method is Method.AUTO:
        left_out.append("`compress_param`: AUTO has chosen nothing, and gradients are dense")
        solver = replace(solver, compress=None)
    if schedule.teacher_model(stage) is not None:
        left_out.append("`loss`: its teacher; the label alone counts")
        solver = replace(solver, loss=None)
    # One iteration more than are run, so that the last one isn't the stage's end.
    cut = replace(solver, sync=None, early_stop=None, max_iter=iterations + 1, display=0, snapshot=0, test_interval=0)
    alone = replace(stage, solver=cut, parent=None, parent_iter=None, average=None)
    left = replace(schedule, stages=(alone,), ensembles=())
    return left.with_data(lambda data: replace(data, scratch=None, val=())), tuple(left_out)


def shown(points: Sequence[Point], rows: int) -> list[Point]:
    """That many of them, evenly spread, the first and the last among them."""
    last = len(points) - 1
    return [points[i] for i in dict.fromkeys(round(last * n / max(1, rows - 1)) for n in range(rows))]
