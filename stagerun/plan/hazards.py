"""What to know of a stage's learning rate: its joints, its end. Pure: numbers come from `schedule`."""

from dataclasses import dataclass

from stagerun.base.recipe import DecayFrom, OnNan, Schedule, Solver, Stage
from stagerun.plan.counting import points_averaged
from stagerun.plan.described import place
from stagerun.schedule import learning_rate, own_fields, warm_up_end
from stagerun.schedule.averages import DECAYS

# A learning rate that is off by more than this share, where one would expect it to go on, is a jump worth a note.
JUMP = 0.05


@dataclass(frozen=True, slots=True)
class Joint:
    """Where the learning rate is not one policy's: `before` is the rate of the update before `iter`, `after` that of the
    one at `iter`. `place` is the parent's name at iteration 0, and `warm-up` where a warm-up ends. Rates of `plateau` are those
    before any drop."""

    place: str
    iter: int
    before: float
    after: float


def joints(schedule: Schedule, stage: Stage) -> list[Joint]:
    """The stage's joints, in the order of its iterations; jumps or not."""
    solver = stage.solver
    rate = learning_rate(solver)
    found = []
    if stage.parent is not None:
        parent = schedule.stage(stage.parent).solver
        found.append(Joint(stage.parent, 0, learning_rate(parent)(schedule.start_iter(stage) - 1), rate(0)))
    end = warm_up_end(solver)
    if stage.begins < end < solver.max_iter:
        found.append(Joint("warm-up", end, rate(end - 1), rate(end)))
    return found


def notes(schedule: Schedule, stage: Stage) -> list[str]:
    """One sentence for each thing to know of the learning rate, in the order of the stage's iterations. What looks wrong is a finding of
    lint."""
    solver = stage.solver
    rate = learning_rate(solver)
    first, last = rate(stage.begins), rate(solver.max_iter - 1)
    found: list[str] = []
    if solver.on_nan is OnNan.ROLLBACK and not solver.snapshot and not schedule.branch_points(stage.name):
        found.append("without a `snapshot` in its midst, `on_nan: ROLLBACK` goes back to the stage's start")
    for joint in joints(schedule, stage):
        if joint.iter:
            found += _warmup_end(stage, solver, joint)
        elif schedule.stage(joint.place).solver.lr_policy != "plateau":  # whose last rate no one knows
            found += _join(joint, stage.average or joint.place)
    found += reach_notes(stage)
    if solver.lr_policy == "plateau":
        found.append(_drops(stage, solver))
    elif last > 0.001 * max(first, solver.base_lr) and not (_decays_to_zero(solver) or _goes_on(schedule, stage)):
        found.append(f"ends at LR {last:.4g}, above zero")
    return found


def _decays_to_zero(solver: Solver) -> bool:
    """Whether the policy comes to zero in one more step: `linear` over 30 iterations ends at a thirtieth."""
    if solver.lr_policy in ("poly", "poly_cyc"):
        whole = (solver.power or 0) >= 1 and (solver.lr_policy == "poly" or solver.lr_iter == solver.max_iter)
    else:
        whole = solver.lr_policy in DECAYS and not solver.end_lr
    return whole and not solver.policy_start_iter and warm_up_end(solver) < solver.max_iter


def _goes_on(schedule: Schedule, stage: Stage) -> bool:
    """Whether another stage starts from it, at its end or within: a rate above zero is meant to be there."""
    return any(
        other.enabled and (other.parent == stage.name or stage.name in dict(points_averaged(schedule, other)))
        for other in schedule.stages
    )


def _warmup_end(stage: Stage, solver: Solver, joint: Joint) -> list[str]:
    """The ramp would reach base_lr at warmup_iter; the policy, read at the absolute iteration, may be elsewhere by then."""
    low, high = joint.before, joint.after
    if abs(high - solver.base_lr) <= JUMP * solver.base_lr:
        return []
    factor = f" (x{high / low:.3g})" if low > 0 else ""
    begins = "begins" if solver.decay_from is DecayFrom.WARMUP_END else "is read at the absolute iteration"
    return [
        f"LR {'falls' if high < low else 'goes'} {low:.4g} -> {high:.4g}{factor} at iteration {joint.iter}, where the "
        f"warm-up to {solver.base_lr:g} ends and {solver.lr_policy} {begins}"
        f"{place(stage, 'solver.warmup_iter')}"
    ]


def _drops(stage: Stage, solver: Solver) -> str:
    """What the plan can't show about a plateau."""
    most = len(solver.plateau_winsize)
    low = learning_rate(solver, most)(solver.max_iter - 1)
    times = "once" if most == 1 else f"up to {most} times"
    where = place(stage, "solver.plateau_winsize")
    return f"LR drops {times}, down to {low:.4g}, when the loss stands still; shown is the rate before{where}"


def _join(joint: Joint, start: str) -> list[str]:
    """`start`: the stage or the ensemble that it starts from."""
    text, where = f"LR jumps {joint.before:.4g} -> {joint.after:.4g}", f"where it leaves `{start}`"
    if joint.before <= 0 or joint.after <= 0:
        return [] if joint.before == joint.after else [f"{text} {where}"]
    factor = joint.after / joint.before
    return [] if abs(factor - 1) <= JUMP else [f"{text} (x{factor:.3g}) {where}"]


# Fields whose changes are shown elsewhere: learning rate and length in the table, the images and what is carried on lines of
# their own.
_SHOWN = (
    "base_lr",
    "lr_policy",
    "power",
    "gamma",
    "step",
    "lr_",
    "warmup",
    "decay_from",
    "policy_start",
    "end_lr",
    "knot",
    "plateau",
    "average_loss",
    "max_",
    "transform_param",
    "test_",
    "carry",
    "compress_param",
    "sync_param",
    "loss",
    "early_stop",
)


def solver_changes(parent: Stage, stage: Stage) -> list[str]:
    """`field old -> new` for each setting of the update that is not the parent's: weight_decay, type, batch_size, ..."""
    found = []
    for field, new in stage.identity.items():
        name = field.removeprefix("solver.")
        old = parent.identity.get(field)
        if field.startswith("solver.") and not name.startswith(_SHOWN) and old not in (None, new):
            found.append(f"{name} {old} -> {new}".replace('"', ""))
    return found


# -- the part of its policy that a stage never reaches, and iterations beyond the policy's end


def reach_notes(stage: Stage) -> list[str]:
    """One sentence for each such hazard."""
    solver = stage.solver
    if warm_up_end(solver) == solver.max_iter:
        return [f"is warm-up from end to end: {solver.lr_policy} is never used{place(stage, 'solver.warmup_iter')}"]
    if solver.lr_policy in ("poly", "poly_cyc"):
        return _poly_cyc(stage) if solver.lr_policy == "poly_cyc" else _poly(stage)
    # A policy with an end stays there after max_iter.
    return _beyond_end(stage) if "end_lr" in own_fields(solver.lr_policy) else []


def _shift(stage: Stage) -> int:
    """The policy's own iteration at the start of the stage: 0 unless the stage begins further on, or the policy later."""
    solver = stage.solver
    return solver.policy_start_iter - (solver.warmup_iter if solver.decay_from is DecayFrom.WARMUP_END else 0)


def policy_end(stage: Stage) -> int:
    """The first of the policy's own iterations that the stage doesn't read."""
    return stage.solver.max_iter + _shift(stage)


def _poly_cyc(stage: Stage) -> list[str]:
    solver, end, where = stage.solver, policy_end(stage), place(stage, "solver.lr_iter")
    assert solver.lr_iter is not None
    if solver.lr_iter > end:
        used = f"{end}" if not stage.begins else f"iterations {stage.begins + _shift(stage)} to {end}"
        left = f"the last {solver.lr_iter - end} are never reached{where}"
        return [f"uses {used} of the {solver.lr_iter} iterations of its poly_cyc; {left}"]
    return _rises(stage, solver.lr_iter, where) if solver.lr_iter < end else []


def _poly(stage: Stage) -> list[str]:
    """It is read up to its end by any stage that begins at its start, and beyond it only by one that begins later."""
    solver = stage.solver
    own_end = policy_end(stage) - solver.policy_start_iter
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
