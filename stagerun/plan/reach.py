"""What of its policy a stage never gets to, and where it goes on beyond the policy's end. Pure."""

from stagerun.plan.update import place
from stagerun.recipe import DecayFrom, Stage
from stagerun.schedule import learning_rate, warm_up_end

# Policies that stay where they are after max_iter.
ENDING = ("linear", "cosine", "one_minus_sqrt", "one_cycle")


def reach_notes(stage: Stage) -> list[str]:
    """One sentence for each such thing."""
    solver = stage.solver
    if warm_up_end(solver) == solver.max_iter:
        return [f"is warm-up from end to end: {solver.lr_policy} is never used{place(stage, 'solver.warmup_iter')}"]
    if solver.lr_policy in _FOUND_BY:
        return _FOUND_BY[solver.lr_policy](stage)
    return _beyond_end(stage) if solver.lr_policy in ENDING else []


def _shift(stage: Stage) -> int:
    """The policy's own iteration at the start of the stage: 0 unless the stage begins further on, or the policy later."""
    solver = stage.solver
    return solver.policy_start_iter - (solver.warmup_iter if solver.decay_from is DecayFrom.WARMUP_END else 0)


def _end(stage: Stage) -> int:
    """The first of the policy's own iterations that the stage doesn't read."""
    return stage.solver.max_iter + _shift(stage)


def _poly_cyc(stage: Stage) -> list[str]:
    solver, end, where = stage.solver, _end(stage), place(stage, "solver.lr_iter")
    assert solver.lr_iter is not None
    if solver.lr_iter > end:
        return [
            f"uses {end} of the {solver.lr_iter} iterations of its poly_cyc; the last {solver.lr_iter - end} are never reached{where}"
        ]
    return _rises(stage, solver.lr_iter, where) if solver.lr_iter < end else []


def _poly(stage: Stage) -> list[str]:
    """It is read up to its end by any stage that begins at its start, and beyond it only by one that begins later."""
    solver = stage.solver
    own_end = _end(stage) - solver.policy_start_iter
    where = place(stage, "solver.policy_start_iter")
    return _rises(stage, own_end, where) if solver.policy_start_iter > 1 and solver.power else []


def _rises(stage: Stage, zero: int, where: str) -> list[str]:
    at = zero - _shift(stage)
    return [f"LR reaches zero at iteration {at} and rises again until {stage.solver.max_iter}{where}"]


def _beyond_end(stage: Stage) -> list[str]:
    solver = stage.solver
    if solver.policy_start_iter < 2:
        return []
    end = solver.max_iter - solver.policy_start_iter
    value, where = learning_rate(solver)(solver.max_iter - 1), place(stage, "solver.policy_start_iter")
    return [
        f"LR stays at {value:.4g} from iteration {max(end, 0)} on: policy_start_iter {solver.policy_start_iter}{where}"
    ]


def _multistep(stage: Stage) -> list[str]:
    late = [v for v in stage.solver.stepvalue if v >= _end(stage)]
    return _never(stage, f"stepvalue {late[0]}", "solver.stepvalue") if late else []


def _step(stage: Stage) -> list[str]:
    size = stage.solver.stepsize
    return _never(stage, f"stepsize {size}", "solver.stepsize") if size is not None and size >= _end(stage) else []


def _knots(stage: Stage) -> list[str]:
    end = _end(stage)
    late = [k for k in stage.solver.knot if k.iter > end]
    return _never(stage, f"the knot at iteration {late[0].iter:g}", "solver.knot") if late else []


def _plateau(stage: Stage) -> list[str]:
    first, left = stage.solver.plateau_winsize[0], stage.solver.max_iter - warm_up_end(stage.solver)
    return _never(stage, f"the end of plateau_winsize {first}", "solver.plateau_winsize") if first >= left else []


def _never(stage: Stage, what: str, field: str) -> list[str]:
    end = _end(stage)
    whose = "the stage" if end == stage.solver.max_iter else "lr_policy"
    return [f"{what} is never reached: {whose} ends at {end}{place(stage, field)}"]


_FOUND_BY = {
    "poly": _poly,
    "poly_cyc": _poly_cyc,
    "multistep": _multistep,
    "step": _step,
    "piecewise_linear": _knots,
    "plateau": _plateau,
}
