"""Whether the learning rate of a stage exists at every iteration. Pure."""

import itertools
import math

from stagerun import recipe, schedule
from stagerun.recipe import DecayFrom
from stagerun.spec.build import rate_settings
from stagerun.spec.problems import Problems
from stagerun.spec.view import View

# The field that makes a policy's learning rate impossible, where it is not base_lr.
CULPRITS = {
    "step": "gamma",
    "exp": "gamma",
    "multistep": "gamma",
    "inv": "gamma",
    "poly": "policy_start_iter",
    "poly_cyc": "lr_iter",
    "sigmoid": "gamma",
    "plateau": "gamma",
    "exp_epoch": "gamma",
    "piecewise_linear": "knot",
}
# The policies whose gamma is a factor, and not a rate that may be below zero.
FACTORS = ("step", "exp", "multistep", "plateau", "exp_epoch")


def check_learning_rate(stage: str, view: View, images: int | None, problems: Problems) -> None:
    """Reports a rate that is below zero, infinite or no number; Doubtful if a field it needs could not be read. `images` (of an
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
            what = _wrong(solver, drops, iteration)
            if what:
                when = f"after {drops} drops" if drops else f"at iteration {iteration}"
                place = _culprit(solver, view)
                problems.add(view.place(place), f"the learning rate {what} {when}", _rate_hint(stage, solver))
                return


def _wrong(solver: recipe.Solver, drops: int, iteration: int) -> str:
    try:
        value = schedule.learning_rate(solver, drops)(iteration)
    except (ValueError, ZeroDivisionError):
        return "is no number"
    except OverflowError:
        return "is too large for a double"
    if math.isinf(value):
        return "is too large for a double"
    return "" if value >= 0 else f"is {value:.6g}"


def _culprit(solver: recipe.Solver, view: View) -> str:
    """The field to point at."""
    for name in (CULPRITS.get(solver.lr_policy, "base_lr"), "base_lr"):
        if name in view.block.entries:
            return name
    return "lr_policy"


def _rate_settings(view: View, images: int | None) -> recipe.Solver | None:
    """A Solver that schedule.learning_rate can read. None if a field it needs is missing, or reported as wrong."""
    policy = view.text("lr_policy")
    if policy is None or not all(view.has(name) for name in ("base_lr", "max_iter", "batch_size")):
        return None
    # What the rate does not depend on is made up.
    solver = recipe.Solver(**rate_settings(view, images), device_batch_size=1, random_seed=0, test_batch_size=1)
    complete = all(getattr(solver, name) not in (None, ()) for name in schedule.policy_fields(policy))
    ordered = all(a < b for a, b in itertools.pairwise(solver.stepvalue))
    ordered &= all(a.iter <= b.iter for a, b in itertools.pairwise(solver.knot))
    factor = not (policy in FACTORS and solver.gamma is not None and solver.gamma < 0)
    cycle = solver.peak_iter is None or policy != "one_cycle" or solver.peak_iter < solver.max_iter - _own_start(solver)
    return solver if complete and ordered and factor and cycle else None


def _own_start(solver: recipe.Solver) -> int:
    """Where the policy's own iterations begin, in those of warm-up and policy together."""
    return solver.warmup_iter if solver.decay_from is DecayFrom.WARMUP_END else 0


def telling_iterations(solver: recipe.Solver) -> list[int]:
    """Iterations of the stage among which is one with an impossible rate, momentum or weight decay, if there is any: ends, joint,
    and where the sign or the direction turns."""
    first, last = solver.policy_start_iter, solver.policy_start_iter + solver.max_iter - 1
    found = {first, solver.warmup_iter - 1, solver.warmup_iter, last - 1, last}
    found |= {_own_start(solver) + place for place in _turns(solver)}
    return sorted(i - first for i in found if first <= i <= last)


def _turns(solver: recipe.Solver) -> set[int]:
    """Such places in the policy's own iterations."""
    found = {0}
    knots = [*solver.knot]
    for curve in (solver.momentum_policy, solver.weight_decay_policy):
        knots += curve.knot if curve else ()
    for knot in knots:
        found |= {math.floor(knot.iter) - 1, math.floor(knot.iter), math.ceil(knot.iter)}
    for end in (solver.lr_iter, solver.peak_iter, solver.max_iter - _own_start(solver)):
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
