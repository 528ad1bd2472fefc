"""A schedule as a picture's data, before anything draws it. Pure: every number is one that `make_knobs` gives the trainer.

A stage's place counts along its path from the root, over all that was trained before it: a branch begins where it leaves its
parent. Stages that are not enabled have their place too.
"""

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from stagerun.base.recipe import DecayFrom, Ensemble, Schedule, Solver, Stage
from stagerun.base.text import listed
from stagerun.plan.described import JUMP, augmentation, joints, jumps
from stagerun.plan.ensembles import in_words, rule_in_words
from stagerun.schedule import learning_rate, make_knobs, synchronisations, warm_up_end
from stagerun.schedule.image_size import crop_size

# Stretches of a stage of which the first, the last, the least and the largest value are kept.
STRETCHES = 120
# A change from one iteration to the next is a jump where those before and after it are smaller than this share of it.
ISOLATED = 1 / 8
# Steps of `step` whose sides are kept, at most; finer stairs look like their slope.
STAIRS = 300


class Kind(enum.Enum):
    """What makes a learning rate jump."""

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


@lru_cache(maxsize=256)  # a page that is drawn at each save has one stage that has changed
def points_of(solver: Solver, begins: int = 0) -> tuple[tuple[Point, ...], tuple[Mark, ...]]:
    """The points that are kept of a stage's settings from iteration `begins` on, and the steps of its learning rate."""
    knobs, last = make_knobs(solver), solver.max_iter - 1
    sizes = _sizes(solver, last)
    steps = list(_steps(lambda i: knobs(i).lr, last))
    kept = {0, last, *(i for at in corners(solver) for i in (at - 1, at, at + 1) if 0 <= i <= last)}
    for at in [*(step.iter for step in steps), *sizes]:
        kept |= {max(0, at - 1), at}
    kept |= set(_extremes(lambda i: knobs(i).lr, last))
    points = []
    size = None
    for i in sorted({*kept, begins}):
        size = sizes.get(i, size)
        if i < begins:
            continue
        at_i = knobs(i)
        points.append(Point(i, at_i.lr, at_i.momentum, at_i.weight_decay, size))
    return tuple(points), tuple(step for step in steps if step.iter > begins)


def _extremes(value: Callable[[int], float], last: int) -> Iterator[int]:
    """In each stretch of iterations the first, the one with the least and the largest value, and the last. More of them towards
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
    """Whether the rates of four updates step between the second and the third, and there alone."""
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
    places += [solver.lr_iter] if solver.lr_iter is not None else []
    if solver.lr_policy == "step" and solver.stepsize is not None:
        stairs = (solver.max_iter + solver.policy_start_iter) // solver.stepsize
        places += [n * solver.stepsize for n in range(1, stairs + 1)] if stairs <= STAIRS else []
    if solver.decay_from is DecayFrom.WARMUP_END:
        places = [at + solver.warmup_iter for at in places]
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


__all__ = ["EnsemblePicture", "Kind", "Mark", "Picture", "Point", "StagePicture", "Unit", "make_picture"]

# So many of a stage's own steps are marked; a rate that falls each epoch has hundreds.
MOST_STEPS = 12


class Unit(enum.Enum):
    """What an x axis counts."""

    ITERATIONS = "iterations"
    EPOCHS = "epochs"
    IMAGES = "images"
    HOURS = "hours"


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePicture:
    """One stage. `begin_*`: where it begins. `images`: of an epoch. `seconds`: at its begin and at its end, counted from the
    seed; None if they are not known.

    `points` are in the order of their iterations; the first and last iteration, both sides of every jump, knots and extremes are among
    them. `steps`: how many the policy has, of which `marks` holds MOST_STEPS. `drops`: how often `plateau` may lower what is drawn.
    `meetings`: after how many iterations replicas are averaged. `side`: which of two schedules in one picture it is of, '' in a picture of
    one.
    """

    name: str
    parent: str | None
    parent_iter: int | None  # of the parent, where this stage leaves it
    leaves_early: bool  # before the parent's end
    enabled: bool
    iterations: int
    batch_size: int
    images: int
    begin_iterations: int
    begin_images: int
    begin_own: float  # the epochs before it, as images of its own set
    seconds: tuple[float, float] | None
    augmentation: str
    points: tuple[Point, ...]
    marks: tuple[Mark, ...]
    steps: int
    drops: int
    earliest_end: int  # the last iteration, unless `early_stop` may end it before
    meetings: tuple[int, ...] = ()
    side: str = ""
    average: str | None = None  # the ensemble that it starts from

    def x(self, iter: float, unit: Unit) -> float:
        """The place of an iteration of this stage. ValueError for hours that are not known."""
        if unit is Unit.ITERATIONS:
            return self.begin_iterations + iter
        if unit is Unit.HOURS:
            if self.seconds is None:
                raise ValueError(f"the hours of {self.name} are not known")
            begin, end = self.seconds
            return (begin + (end - begin) * iter / self.iterations) / 3600
        if unit is Unit.IMAGES:
            return self.begin_images + iter * self.batch_size
        return (self.begin_own + iter * self.batch_size) / self.images

    def line(self) -> list[tuple[int, float]]:
        """(iteration, rate) of its points, as they are joined: upright where it jumps, and the last rate up to the stage's end."""
        before = {mark.iter: mark.before for mark in self.marks if mark.jumps and mark.kind is not Kind.START}
        found = []
        for point in self.points:
            if point.iter in before:
                found.append((point.iter, before[point.iter]))
            found.append((point.iter, point.lr))
        return [*found, (self.iterations, self.points[-1].lr)]

    def until(self, iter: int) -> list[tuple[int, float]]:
        """The part of `line` up to an iteration, with a point there."""
        line = self.line()
        found = [point for point in line if point[0] <= iter]
        after = next((point for point in line if point[0] > iter), None)
        if after is None or found[-1][0] == iter:
            return found
        (a, low), (b, high) = found[-1], after
        return [*found, (iter, low + (high - low) * (iter - a) / (b - a))]

    def extent(self, unit: Unit) -> tuple[float, float]:
        return self.x(0, unit), self.x(self.iterations, unit)


# Members of an ensemble that are named beside it, at most.
MOST_NAMED = 12


@dataclass(frozen=True, slots=True)
class EnsemblePicture:
    """`members` in words, many snapshots of a stage as one; `points`: the stage and the iteration of each."""

    name: str
    rule: str
    members: tuple[str, ...]
    points: tuple[tuple[str, int], ...]

    @property
    def label(self) -> str:
        """The name, the rule and the members."""
        return f"{self.name} ({self.rule}): {listed(self.members, MOST_NAMED)}"


@dataclass(frozen=True, slots=True)
class Picture:
    """`stages` are in the order in which they run: parents before children."""

    name: str
    stages: tuple[StagePicture, ...]
    ensembles: tuple[EnsemblePicture, ...] = ()

    @property
    def sides(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(stage.side for stage in self.stages))

    def stage(self, name: str) -> StagePicture:
        return next(stage for stage in self.stages if stage.name == name)

    def places(self, ensemble: EnsemblePicture, unit: Unit) -> list[tuple[float, StagePicture, int]]:
        """Where its members are on an x axis, from left to right, each with its stage and iteration."""
        stages = {stage.name: stage for stage in self.stages}
        found = [(stages[name].x(iter, unit), stages[name], iter) for name, iter in ensemble.points]
        return sorted(found, key=lambda place: place[0])

    def joins(self, unit: Unit) -> Iterator[tuple[StagePicture, int | None]]:
        """The stages that are joined to what they start from: the number of the ensemble, None for the parent's line."""
        lanes, numbers = self.lanes(unit), {ensemble.name: n for n, ensemble in enumerate(self.ensembles)}
        for stage in self.stages:
            if stage.parent is not None and lanes[stage.name] != lanes[stage.parent]:
                yield stage, numbers.get(stage.average or "")

    def end(self, unit: Unit) -> float:
        return max(stage.extent(unit)[1] for stage in self.stages)

    def lanes(self, unit: Unit) -> dict[str, int]:
        """The line on which each stage's bands are drawn. The first stage to go on from a parent's end shares its line, unless
        it starts from an average; others have the first line that is free there. 0 is the trunk's."""
        taken: list[list[tuple[float, float]]] = []
        lanes: dict[str, int] = {}
        for stage in self.stages:
            own = _on(stage, lanes.get(stage.parent or ""))
            span = stage.extent(unit)
            free = (n for n in own if n >= len(taken) or all(_apart(span, other) for other in taken[n]))
            lane = next(free)
            if lane == len(taken):
                taken.append([])
            taken[lane].append(span)
            lanes[stage.name] = lane
        return lanes

    def curves(self, unit: Unit) -> dict[str, int]:
        """The number of each stage's curve, 0 for the trunk's: what goes on from a parent on its line is one curve with it. Each
        of two sides is one, whatever branches it has."""
        if len(self.sides) > 1:
            return {stage.name: self.sides.index(stage.side) for stage in self.stages}
        lanes, numbers, count = self.lanes(unit), dict[str, int](), 0
        for stage in self.stages:
            if stage.parent is not None and lanes[stage.parent] == lanes[stage.name]:
                numbers[stage.name] = numbers[stage.parent]
            else:
                numbers[stage.name] = count
                count += 1
        return numbers


def _on(stage: StagePicture, parents: int | None) -> Iterator[int]:
    """The lines that a stage may have, the best first: a branch does not come back to its trunk's."""
    if parents is not None and not stage.leaves_early and stage.average is None:
        yield parents
    least = 0 if parents is None else parents + 1
    while True:
        yield least
        least += 1


def _apart(one: tuple[float, float], other: tuple[float, float]) -> bool:
    # Stages that touch don't overlap; a billionth is what the sums of two paths may differ by.
    gap = 1e-9 * max(one[1], other[1])
    return one[1] <= other[0] + gap or other[1] <= one[0] + gap


def make_picture(schedule: Schedule, seconds: Callable[[str, int], float] | None = None) -> Picture:
    """`seconds`: (stage, iteration) -> how long it takes to come there from the seed, if that is known."""
    drawn: dict[str, StagePicture] = {}
    for stage in schedule.stages:
        parent = drawn[stage.parent] if stage.parent is not None else None
        drawn[stage.name] = _stage(schedule, stage, parent, seconds)
    return Picture(schedule.name, tuple(drawn.values()), tuple(_ensemble(schedule, one) for one in schedule.ensembles))


def _ensemble(schedule: Schedule, ensemble: Ensemble) -> EnsemblePicture:
    stages = [(schedule.stage(name), iter) for name, iter in ensemble.points]
    off = ", not evaluated: a member is not enabled" * any(not stage.enabled for stage, _ in stages)
    return EnsemblePicture(
        ensemble.name,
        rule_in_words(ensemble) + off,
        tuple(in_words(ensemble.members)),
        tuple((stage.name, stage.solver.max_iter if iter is None else iter) for stage, iter in stages),
    )


def _stage(
    schedule: Schedule, stage: Stage, parent: StagePicture | None, seconds: Callable[[str, int], float] | None
) -> StagePicture:
    solver = stage.solver
    leaves = None
    # Where its iteration 0 is, or would be: a stage with a .solverstate begins further on.
    begin_iterations = -stage.begins
    begin_images = begin_iterations * solver.batch_size
    begin_own: float = begin_images
    if parent is not None:
        leaves = schedule.start_iter(stage)
        begin_iterations = parent.begin_iterations + leaves
        begin_images = parent.begin_images + leaves * parent.batch_size
        begin_own = parent.begin_own + leaves * parent.batch_size
        if not stage.data.train.same(schedule.stage(parent.name).data.train):
            begin_own = parent.x(leaves, Unit.EPOCHS) * stage.data.train.images
    points, all_steps = points_of(solver, stage.begins)
    marks = [
        Mark(Kind.WARM_UP if one.iter else Kind.START, one.iter, one.before, one.after, jumps(schedule, stage, one))
        for one in joints(schedule, stage)
    ]
    found = {mark.iter for mark in marks}
    steps = [step for step in all_steps if step.iter not in found]
    return StagePicture(
        name=stage.name,
        parent=stage.parent,
        parent_iter=leaves,
        leaves_early=parent is not None and leaves != parent.iterations,
        enabled=stage.enabled,
        iterations=solver.max_iter,
        batch_size=solver.batch_size,
        images=stage.data.train.images,
        begin_iterations=begin_iterations,
        begin_images=begin_images,
        begin_own=begin_own,
        seconds=None if seconds is None else (seconds(stage.name, stage.begins), seconds(stage.name, solver.max_iter)),
        augmentation=augmentation(solver),
        points=points,
        marks=tuple(sorted(marks + steps[:MOST_STEPS], key=lambda mark: mark.iter)),
        steps=len(steps),
        earliest_end=solver.earliest_end,
        drops=len(solver.plateau_winsize) if solver.lr_policy == "plateau" else 0,
        meetings=synchronisations(solver),
        average=stage.average,
    )
