"""What is kept of a stage's settings to draw them: few points, and none missing that matters. Pure."""

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from stagerun.plan.hazards import JUMP
from stagerun.recipe import DecayFrom, Solver
from stagerun.schedule import learning_rate, make_knobs, warm_up_end
from stagerun.schedule.image_size import crop_size

# Stretches of a stage of which the first, the last, the least and the largest value are kept.
STRETCHES = 120
# A change from one iteration to the next is a jump where those before and after it are smaller than this share of it.
ISOLATED = 1 / 8
# Steps of `step` whose sides are kept, at most; finer stairs look like their slope.
STAIRS = 300


class Kind(enum.Enum):
    """What makes a learning rate go on elsewhere."""

    START = "start"  # of a stage that has a parent
    WARM_UP = "warm-up"  # its end
    STEP = "step"  # inside the policy


@dataclass(frozen=True, slots=True)
class Point:
    """The settings of the update from `iter` to `iter + 1`. `size`: side of the images; None where they stay as they are."""

    iter: int
    lr: float
    momentum: float
    weight_decay: float
    size: int | None


@dataclass(frozen=True, slots=True)
class Mark:
    """`before`: rate of the update before `iter`, of the parent where the stage starts; `after`: that of the one at `iter`.
    `jumps`: it is off by more than JUMP from where it would go on."""

    kind: Kind
    iter: int
    before: float
    after: float
    jumps: bool

    @property
    def factor(self) -> float | None:
        """None where either rate is zero."""
        return self.after / self.before if self.before > 0 and self.after > 0 else None


def points_of(solver: Solver) -> tuple[tuple[Point, ...], list[Mark]]:
    """What is kept of a stage's settings, and the steps of its learning rate."""
    knobs, last = make_knobs(solver), solver.max_iter - 1
    sizes = _sizes(solver, last)
    steps = list(_steps(lambda i: knobs(i).lr, last))
    kept = {0, last, *(i for at in corners(solver) for i in (at - 1, at, at + 1) if 0 <= i <= last)}
    for at in [*(step.iter for step in steps), *sizes]:
        kept |= {max(0, at - 1), at}
    kept |= set(_extremes(lambda i: knobs(i).lr, last))
    if solver.momentum_policy is not None:
        kept |= set(_extremes(lambda i: knobs(i).momentum, last))
    if solver.weight_decay_policy is not None:
        kept |= set(_extremes(lambda i: knobs(i).weight_decay, last))
    points = []
    size = None
    for i in sorted(kept):
        size = sizes.get(i, size)
        at_i = knobs(i)
        points.append(Point(i, at_i.lr, at_i.momentum, at_i.weight_decay, size))
    return tuple(points), steps


def _extremes(value: Callable[[int], float], last: int) -> Iterator[int]:
    """Of each stretch of iterations the first, the one with the least and the largest value, and the last. More of them towards
    both ends, where a logarithmic axis may show decades."""
    yield from (at for n in range((last + 1).bit_length()) for at in (2**n - 1, last + 1 - 2**n))
    length = -(-(last + 1) // STRETCHES)
    for first in range(0, last + 1, length):
        end = min(first + length, last + 1)
        values = [value(i) for i in range(first, end)]
        yield from (first, first + values.index(min(values)), first + values.index(max(values)), end - 1)


def _steps(rate: Callable[[int], float], last: int) -> Iterator[Mark]:
    """Where the rate changes by more than JUMP, and hardly at all just before and after."""
    if last < 3:
        return
    one, two, three = rate(0), rate(1), rate(2)
    for i in range(3, last + 1):
        four = rate(i)
        if _is_step(one, two, three, four):
            yield Mark(Kind.STEP, i - 1, two, three, True)
        one, two, three = two, three, four


def _is_step(one: float, two: float, three: float, four: float) -> bool:
    """Of the rates of four updates: between the second and the third, and there alone."""
    change = abs(three - two)
    return change > JUMP * max(two, three) and max(abs(two - one), abs(four - three)) < ISOLATED * change


def steps_at_corners(solver: Solver) -> list[Mark]:
    """The steps of a policy's own making, in their order: those of `points_of`, and without looking at every iteration."""
    rate, last = learning_rate(solver), solver.max_iter - 1
    found = []
    for at in sorted({i for corner in corners(solver) for i in (corner, corner + 1)} - {warm_up_end(solver)}):
        if 2 <= at < last and _is_step(*(rate(i) for i in range(at - 2, at + 2))):
            found.append(Mark(Kind.STEP, at, rate(at - 1), rate(at), True))
    return found


def corners(solver: Solver) -> Iterator[int]:
    """Where a curve of the stage may have a corner, at the iteration or up to the one after: policies count from where they begin."""
    places: list[float] = [*solver.stepvalue, *(knot.iter for knot in solver.knot)]
    places += [at for at in (solver.lr_iter, solver.peak_iter) if at is not None]
    if solver.lr_policy == "step" and solver.stepsize is not None:
        stairs = (solver.max_iter + solver.policy_start_iter) // solver.stepsize
        places += [n * solver.stepsize for n in range(1, stairs + 1)] if stairs <= STAIRS else []
    if solver.decay_from is DecayFrom.WARMUP_END:
        places = [at + solver.warmup_iter for at in places]
    for curve in (solver.momentum_policy, solver.weight_decay_policy):
        places += [knot.iter for knot in curve.knot] if curve is not None else []
    places = [warm_up_end(solver), *(at - solver.policy_start_iter for at in places)]
    yield from map(int, places)


def _sizes(solver: Solver, last: int) -> dict[int, int | None]:
    """Image size by the iteration from which it holds. It grows or it shrinks, so equal ends mean that nothing lies between."""

    def between(low: int, high: int) -> Iterator[tuple[int, int | None]]:
        a, b = crop_size(solver, low), crop_size(solver, high)
        if a == b:
            return
        if high - low == 1:
            yield high, b
            return
        middle = (low + high) // 2
        yield from between(low, middle)
        yield from between(middle, high)

    return {0: crop_size(solver, 0), **dict(between(0, last))}
