"""What is legal but worth a look in a stage: its learning rate, joints, update and images. Pure: numbers come from `schedule`."""

from dataclasses import dataclass
from fractions import Fraction

from stagerun.plan.images import image_notes
from stagerun.plan.update import place, update_notes
from stagerun.recipe import Schedule, Solver, Stage
from stagerun.schedule import learning_rate

# A learning rate that is off by more than this share, where one would expect it to go on, is a jump worth a note.
JUMP = 0.05


@dataclass(frozen=True, slots=True)
class Joint:
    """Where the learning rate is not one policy's: `before` is the rate of the update before `iter`, `after` that of the
    one at `iter`. `place` is the parent's name at iteration 0, and `warm-up` where a warm-up ends."""

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
        found.append(Joint(stage.parent, 0, learning_rate(parent)(parent.max_iter - 1), rate(0)))
    if 0 < solver.warmup_iter < solver.max_iter:
        found.append(Joint("warm-up", solver.warmup_iter, rate(solver.warmup_iter - 1), rate(solver.warmup_iter)))
    return found


def notes(schedule: Schedule, stage: Stage) -> list[str]:
    """One sentence for each thing worth a look: roundings, fields that say nothing, images, then hazards in the order of the stage's
    iterations."""
    solver = stage.solver
    rate = learning_rate(solver)
    first, last = rate(0), rate(solver.max_iter - 1)
    found = roundings(stage, schedule.data.train.images) + update_notes(stage)
    found += image_notes(schedule, stage)
    for joint in joints(schedule, stage):
        found += _warmup_end(stage, solver, joint) if joint.iter else _join(joint)
    found += _unused(stage, solver)
    if last > 0.001 * max(first, solver.base_lr):
        found.append(f"ends at LR {last:.4g}, above zero")
    return found


def _warmup_end(stage: Stage, solver: Solver, joint: Joint) -> list[str]:
    """The ramp would reach base_lr at warmup_iter; the policy, read at the absolute iteration, may be elsewhere by then."""
    low, high = joint.before, joint.after
    if abs(high - solver.base_lr) <= JUMP * solver.base_lr:
        return []
    factor = f" (x{high / low:.3g})" if low > 0 else ""
    return [
        f"LR {'falls' if high < low else 'goes'} {low:.4g} -> {high:.4g}{factor} at iteration {solver.warmup_iter}, where the "
        f"warm-up to {solver.base_lr:g} ends and {solver.lr_policy} is read at the absolute iteration"
        f"{place(stage, 'solver.warmup_iter')}"
    ]


def _join(joint: Joint) -> list[str]:
    text = f"LR jumps {joint.before:.4g} -> {joint.after:.4g}"
    if joint.before <= 0 or joint.after <= 0:
        return [] if joint.before == joint.after else [f"{text} where it leaves `{joint.place}`"]
    factor = joint.after / joint.before
    return [] if abs(factor - 1) <= JUMP else [f"{text} (x{factor:.3g}) where it leaves `{joint.place}`"]


def roundings(stage: Stage, images: int) -> list[str]:
    """One sentence for each duration that was written in epochs and is no whole number of iterations."""
    found = []
    for field, origin in stage.origins.items():
        name, _, written = origin.text.partition(": ")
        value = getattr(stage.solver, field.removeprefix("solver."), None)
        if name.endswith("_epoch") and isinstance(value, int):
            exact = Fraction(repr(float(written))) * images / stage.solver.batch_size
            if exact != value:
                found.append(f"{origin.text} is {float(exact):.2f} iterations, rounded to {value}{place(stage, field)}")
    return found


def _unused(stage: Stage, solver: Solver) -> list[str]:
    end = solver.max_iter
    if solver.warmup_iter == end:
        return [f"is warm-up from end to end: {solver.lr_policy} is never used{place(stage, 'solver.warmup_iter')}"]
    if solver.lr_policy == "poly_cyc" and solver.lr_iter is not None:
        if solver.lr_iter > end:
            return [
                f"uses {end} of the {solver.lr_iter} iterations of its poly_cyc; the last {solver.lr_iter - end} are never "
                f"reached{place(stage, 'solver.lr_iter')}"
            ]
        if solver.lr_iter < end:
            return [
                f"LR reaches zero at iteration {solver.lr_iter} and rises again until {end}{place(stage, 'solver.lr_iter')}"
            ]
    if solver.lr_policy == "multistep":
        late = [v for v in solver.stepvalue if v >= end]
        if late:
            return [f"stepvalue {late[0]} is never reached: the stage ends at {end}{place(stage, 'solver.stepvalue')}"]
    if solver.lr_policy == "step" and solver.stepsize is not None and solver.stepsize >= end:
        return [
            f"stepsize {solver.stepsize} is never reached: the stage ends at {end}{place(stage, 'solver.stepsize')}"
        ]
    return []


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
    "max_",
    "transform_param",
    "test_",
    "carry",
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
