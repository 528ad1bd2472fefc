"""Whether the learning rate of a stage exists at every iteration; knots. Pure."""

import itertools
import math
from collections.abc import Callable

from stagerun import schedule
from stagerun.base import recipe
from stagerun.base.errors import Problems
from stagerun.base.recipe import DecayFrom
from stagerun.language.build import rate_settings
from stagerun.language.view import View


def check_learning_rate(stage: str, view: View, images: int | None, problems: Problems) -> None:
    """Reports a rate that is below zero, infinite or not a number; Doubtful if a field it needs could not be read. `images` (of an
    epoch) is None where it isn't known."""
    try:
        solver = _rate_settings(view, images)
    except OverflowError:
        message = "the learning rate for `batch_size` images is too large for a double"
        problems.add(
            view.place("base_lr_batch"), message, f"stage `{stage}`: it is multiplied by batch_size / base_lr_batch"
        )
        return
    if solver is None:
        return
    for drops in sorted({0, len(solver.plateau_winsize) if solver.lr_policy == "plateau" else 0}):
        for iteration in telling_iterations(solver):
            if what := _impossible(lambda n=drops, i=iteration: schedule.learning_rate(solver, n)(i)):  # type: ignore[misc]
                when = f"after {drops} drops" if drops else f"at iteration {iteration}"
                place = _culprit(solver, view)
                problems.add(view.place(place), f"the learning rate {what} {when}", _rate_hint(stage, solver))
                return


def _impossible(value: Callable[[], float]) -> str:
    """Why a setting can't have the value, as the end of `the learning rate ...`; '' where it can."""
    try:
        now = value()
    except (ValueError, ZeroDivisionError):
        return "is not a number"
    except OverflowError:
        now = math.inf
    if math.isinf(now):
        return "is too large for a double"
    return "" if now >= 0 else f"is {now:.6g}"


def _culprit(solver: recipe.Solver, view: View) -> str:
    """The field to point at."""
    for name in (schedule.POLICIES[solver.lr_policy].suspect, "base_lr"):
        if name in view.block.entries:
            return name
    return "lr_policy"


def _rate_settings(view: View, images: int | None) -> recipe.Solver | None:
    """A Solver that schedule.learning_rate can read. None if a field it needs is missing, or reported as wrong."""
    policy = view.text("lr_policy")
    if policy is None or not all(view.has(name) for name in ("base_lr", "max_iter", "batch_size")):
        return None
    # Fields that the rate does not depend on get made-up values.
    solver = recipe.Solver(**rate_settings(view, images), device_batch_size=1, random_seed=0, test_batch_size=1)
    complete = all(getattr(solver, name) not in (None, ()) for name in schedule.policy_fields(policy))
    ordered = all(a < b for a, b in itertools.pairwise(solver.stepvalue))
    ordered &= all(a.iter <= b.iter for a, b in itertools.pairwise(solver.knot))
    factor = not (schedule.POLICIES[policy].factor and solver.gamma is not None and solver.gamma < 0)
    return solver if complete and ordered and factor else None


def _own_start(solver: recipe.Solver) -> int:
    """Where the policy's own iterations begin, in those of warm-up and policy together."""
    return solver.warmup_iter if solver.decay_from is DecayFrom.WARMUP_END else 0


def telling_iterations(solver: recipe.Solver) -> list[int]:
    """Iterations of the stage among which is one with an impossible rate, if there is any: ends, joint,
    and where the sign or the direction turns."""
    first, last = solver.policy_start_iter, solver.policy_start_iter + solver.max_iter - 1
    found = {first, solver.warmup_iter - 1, solver.warmup_iter, last - 1, last}
    found |= {_own_start(solver) + place for place in _turns(solver)}
    return sorted(i - first for i in found if first <= i <= last)


def _turns(solver: recipe.Solver) -> set[int]:
    """Such places in the policy's own iterations."""
    found = {0}
    for knot in solver.knot:
        found |= {math.floor(knot.iter) - 1, math.floor(knot.iter), math.ceil(knot.iter)}
    for end in (solver.lr_iter, solver.max_iter - _own_start(solver)):
        found |= {end - 1, end, end + 1} if end is not None else set()
    if solver.lr_policy == "inv" and solver.gamma and solver.gamma < 0:
        zero = -1 / solver.gamma
        if zero <= solver.policy_start_iter + solver.max_iter:
            found |= {math.floor(zero), math.ceil(zero)}
    return found


def _rate_hint(stage: str, solver: recipe.Solver) -> str:
    reached = solver.policy_start_iter + solver.max_iter - _own_start(solver)
    if solver.lr_policy == "poly_cyc" and solver.lr_iter and solver.lr_iter < reached:
        if reached == solver.max_iter:
            return f"stage `{stage}` has {solver.max_iter} iterations; lr_iter must not be below that"
        return f"stage `{stage}` reads it up to iteration {reached - 1}; lr_iter must not be below that"
    if solver.lr_policy == "poly" and solver.policy_start_iter > 1:
        return f"stage `{stage}` reads lr_policy `poly` beyond its end, max_iter; `linear` stays at end_lr there"
    return f"stage `{stage}`, lr_policy `{solver.lr_policy}`"


# -- knots of piecewise_linear


def check_knots(view: View, whose: str, problems: Problems) -> None:
    """Two or more, in the order of their places, no more than two at one. `whose`: `lr_policy`, say. Doubtful."""
    if not view.has("knot"):
        return
    knots = [View(block) for block in view.block.blocks("knot")]
    if len(knots) == 1:
        message = f"piecewise_linear of `{whose}` has one knot, and a line two"
        problems.add(view.place("knot"), message, "write another, or lr_policy `fixed`" if whose == "lr_policy" else "")
    for earlier, later in itertools.pairwise(knots):
        if _place(later) < _place(earlier):
            message = f"the knot at {_written(later)} does not come after the one at {_written(earlier)}"
            problems.add(later.place("iter"), message, "knots are in the order of their places")
    for first, third in zip(knots, knots[2:], strict=False):
        if _place(first) == _place(third):
            message = f"three knots at {_written(third)}"
            problems.add(third.place("iter"), message, "two make a jump, and the one in between says nothing")


def _place(knot: View) -> float:
    place = knot.number("iter")
    assert place is not None
    return place


def _written(knot: View) -> str:
    """`epoch 5`, or `iteration 780`."""
    text = knot.block.entries["iter"].values[0].text
    name, mark, value = text.partition(": ")
    return f"{name} {value}" if mark else f"iteration {text}"
