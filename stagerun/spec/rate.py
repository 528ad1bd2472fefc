"""Whether the learning rate of a stage exists at every iteration. Pure."""

import itertools
import math

from stagerun import recipe, schedule
from stagerun.spec.problems import Problems
from stagerun.spec.view import View

# The field that makes a policy's learning rate impossible, where it is not base_lr.
CULPRITS = {
    "step": "gamma",
    "exp": "gamma",
    "multistep": "gamma",
    "inv": "gamma",
    "poly_cyc": "lr_iter",
    "sigmoid": "gamma",
}


def check_learning_rate(stage: str, view: View, problems: Problems) -> None:
    """Reports a rate that is below zero, infinite or no number; Doubtful if a field it needs could not be read."""
    solver = _rate_settings(view)
    if solver is None:
        return
    rate = schedule.learning_rate(solver)
    for iteration in _telling_iterations(solver):
        try:
            value = rate(iteration)
        except (ValueError, ZeroDivisionError):
            what = "is no number"
        except OverflowError:
            what = "is too large for a double"
        else:
            if math.isfinite(value) and value >= 0:
                continue
            what = f"is {value:.6g}"
        culprit = CULPRITS.get(solver.lr_policy, "base_lr")
        place = view.place(culprit if culprit in view.block.entries else "lr_policy")
        problems.add(place, f"the learning rate {what} at iteration {iteration}", _rate_hint(stage, solver))
        return


def _rate_settings(view: View) -> recipe.Solver | None:
    """A Solver that schedule.learning_rate can read. None if a field it needs is missing."""
    policy, base, length = view.text("lr_policy"), view.number("base_lr"), view.whole("max_iter")
    if policy is None or base is None or length is None:
        return None
    steps = tuple(int(s) for s in view.numbers("stepvalue"))
    gamma = view.number("gamma")
    solver = recipe.Solver(
        base_lr=base,
        lr_policy=policy,
        max_iter=length,
        power=view.number("power"),
        gamma=gamma,
        stepsize=view.whole("stepsize"),
        stepvalue=steps,
        lr_iter=view.whole("lr_iter"),
        warmup_iter=view.whole("warmup_iter") or 0,
        warmup_start_lr=view.number("warmup_start_lr") or 0.0,
        # What the rate does not depend on.
        batch_size=1,
        device_batch_size=1,
        random_seed=0,
        test_batch_size=1,
    )
    complete = all(getattr(solver, name) not in (None, ()) for name in schedule.policy_fields(policy))
    ordered = all(a < b for a, b in itertools.pairwise(steps))
    factor = not (policy in ("step", "exp", "multistep") and gamma is not None and gamma < 0)
    return solver if complete and ordered and factor else None


def _telling_iterations(solver: recipe.Solver) -> list[int]:
    """Iterations among which is one with an impossible rate, if there is any: ends, joint, and where the sign turns."""
    last = solver.max_iter - 1
    found = {0, solver.warmup_iter - 1, solver.warmup_iter, last - 1, last}
    if solver.lr_policy == "poly_cyc" and solver.lr_iter:
        found |= {solver.lr_iter, solver.lr_iter + 1}
    if solver.lr_policy == "inv" and solver.gamma and solver.gamma < 0:
        zero = -1 / solver.gamma
        if zero <= last:
            found |= {math.floor(zero), math.ceil(zero)}
    return sorted(i for i in found if 0 <= i <= last)


def _rate_hint(stage: str, solver: recipe.Solver) -> str:
    if solver.lr_policy == "poly_cyc" and solver.lr_iter and solver.lr_iter < solver.max_iter:
        return f"stage `{stage}` has {solver.max_iter} iterations; lr_iter must not be below that"
    return f"stage `{stage}`, lr_policy `{solver.lr_policy}`"
