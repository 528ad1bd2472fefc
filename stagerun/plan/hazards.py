"""What is legal but worth a look in a stage: its learning rate, joints and update. Pure: numbers come from `schedule`."""

from dataclasses import dataclass
from fractions import Fraction

from stagerun.plan.update import place, update_notes
from stagerun.recipe import PadMode, Schedule, Solver, Stage, Transform
from stagerun.schedule import learning_rate
from stagerun.spec.digest import NAMES

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
    """One sentence for each thing worth a look: roundings, fields that say nothing, then hazards in the order of the stage's
    iterations."""
    solver = stage.solver
    rate = learning_rate(solver)
    first, last = rate(0), rate(solver.max_iter - 1)
    found = roundings(stage, schedule.data.train.images) + update_notes(stage)
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


def augmentation(solver: Solver) -> str:
    """What is done to the images at random, in a few words."""
    transform, parts = solver.transform, []
    if transform.pad:
        parts.append(f"pad {transform.pad}" + (" reflected" if transform.pad_mode is PadMode.REFLECT else ""))
    if transform.mirror:
        parts.append("mirror")
    if transform.random_resize:
        low, high = transform.random_resize.min_size, transform.random_resize.max_size
        parts.append(f"resize {low}" if low == high else f"resize {low}-{high}")
    if transform.random_aspect_ratio:
        r = transform.random_aspect_ratio
        parts.append(f"area {r.min_area_ratio:g}-{r.max_area_ratio:g}")
    if transform.random_resized_crop:
        c = transform.random_resized_crop
        parts.append(f"area {c.min_area_ratio:g}-{c.max_area_ratio:g}")
    if transform.crop_size:
        parts.append(f"crop {transform.crop_size}")
    if transform.color_jitter:
        parts.append("jitter")
    if transform.rand_augment:
        parts.append(f"RandAugment {transform.rand_augment.num_ops}x{transform.rand_augment.magnitude}")
    if transform.trivial_augment:
        parts.append("TrivialAugment")
    if transform.lighting_std:
        parts.append(f"lighting {transform.lighting_std:g}")
    if transform.cutout_size:
        parts.append(f"cutout {transform.cutout_size}")
    if solver.mixup_alpha:
        parts.append(f"mixup {solver.mixup_alpha:g}")
    if solver.cutmix_alpha:
        parts.append(f"cutmix {solver.cutmix_alpha:g}")
    if solver.label_smoothing:
        parts.append(f"label smoothing {solver.label_smoothing:g}")
    return ", ".join(parts) or "none"


def augmentation_changes(before: Transform, now: Transform) -> list[str]:
    """`field old -> new` for each part of the transform that differs."""
    changed = []
    for field in Transform.__dataclass_fields__:
        old, new = getattr(before, field), getattr(now, field)
        if old != new:
            changed.append(f"{NAMES.get(field, field)} {_short(old)} -> {_short(new)}")
    return changed


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


def _short(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return " ".join(f"{v:g}" for v in value) or "none"
    if isinstance(value, int | float):
        return f"{value:g}"
    fields = getattr(value, "__dataclass_fields__", {})
    inner = " ".join(f"{name}: {getattr(getattr(value, name), 'value', getattr(value, name))}" for name in fields)
    return "{ " + inner + " }"
