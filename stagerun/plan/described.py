"""How a stage's weights are updated and its images transformed, in a few words, and which of its settings are read. Pure."""

import enum

from stagerun.base.recipe import LossType, MomentumForm, Normalization, OnNan, PadMode, Solver, Stage, Transform
from stagerun.base.text import apart
from stagerun.language.values import layout
from stagerun.schedule import POLICIES, SOLVER_TYPES, fields_read, own_fields


def loss(solver: Solver) -> str:
    """'' where it is what it is by default."""
    how = solver.loss
    if how is None or how.type is LossType.SOFTMAX:
        return ""
    if how.type is LossType.BINARY:
        mean = "outputs" if how.normalization is Normalization.FULL else "images"
        return f"loss: BINARY, each class by itself, mean over {mean}"
    if how.type is LossType.PYTHON:
        return f"loss: `{how.function}`" + (f" with {how.args}" if how.args else "")
    return f"loss: DISTILL, taught by `{how.teacher}`, temperature {how.temperature:g}, weight {how.weight:g}"


def described(solver: Solver) -> str:
    """The type and those of its settings that matter, `delta` left out; then the average, if one is kept."""
    read = fields_read(solver)
    parts = [solver.type]
    parts += [f"momentum {solver.momentum:g}"] if "momentum" in read else []
    parts += [f"{n} {getattr(solver, n):g}" for n in ("momentum2", "rms_decay") if n in read]
    if "momentum_form" in read and solver.momentum_form is MomentumForm.TORCH:
        parts.append("momentum_form TORCH")
    if "local_gw_ratio" in read:
        name = "local_lr_auto" if solver.local_lr_auto else "local_gw_ratio"
        over = f" over {solver.local_lr_passes} passes" if solver.local_lr_passes > 1 else ""
        parts.append(f"{name} {solver.local_gw_ratio:g}{over}")
    if solver.weight_decay and solver.regularization_type != "L2":
        parts.append(solver.regularization_type)
    if solver.ema_decay is not None:
        every = f" every {solver.ema_interval} iterations" if solver.ema_interval > 1 else ""
        parts.append(f"EMA {solver.ema_decay:g}{every}")
    return ", ".join(parts)


def unread(stage: Stage) -> list[tuple[str, str]]:
    """(field, why) of all that the stage doesn't read, written or not, as the end of `FIELD is not read`."""
    solver = stage.solver
    of_policies = {name for kind in POLICIES for name in own_fields(kind)}
    found = [(n, f" by lr_policy {solver.lr_policy}") for n in sorted(of_policies - {*own_fields(solver.lr_policy)})]
    of_types = {name for kind in SOLVER_TYPES.values() for name in kind.reads} - {"adapt", "local_lr_auto"}
    for name in sorted(of_types - fields_read(solver)):
        without = " without local_lr_auto" if (name, solver.type) == ("local_gw_ratio", "SGD") else ""
        found.append((name, f" by type {solver.type}{without}"))
    if "local_lr_passes" not in fields_read(solver):
        found.append(("local_lr_passes", ": local_lr_auto is false"))
    if not solver.warmup_iter:
        found += [("warmup_start_lr", ": there is no warm-up"), ("decay_from", ": there is no warm-up")]
    if not solver.weight_decay:
        found.append(("regularization_type", ": weight_decay is 0"))
    if solver.ema_decay is None:
        found.append(("ema_interval", ": there is no ema_decay"))
    if not solver.test_interval:
        found.append(("test_iter", ": there is no test_interval, and the evaluation after a stage covers every image"))
    if solver.on_nan is OnNan.STOP:
        found.append(("max_nan", ": on_nan is STOP"))
    return found


# Fields whose changes are shown elsewhere: learning rate and length in the table, the images and what is carried on lines of
# their own.
_SHOWN = (
    "base_lr", "lr_policy", "power", "gamma", "step", "lr_", "warmup", "decay_from", "policy_start", "end_lr", "knot", "plateau",
    "average_loss", "max_", "transform_param", "test_", "carry", "compress_param", "sync_param", "loss", "early_stop",
)  # fmt: skip


def solver_changes(parent: Stage, stage: Stage) -> list[str]:
    """`field old -> new` for each setting of the update that is not the parent's: weight_decay, type, batch_size, ..."""
    found = []
    for field, new in stage.identity.items():
        name = field.removeprefix("solver.")
        old = parent.identity.get(field)
        if field.startswith("solver.") and not name.startswith(_SHOWN) and old not in (None, new):
            found.append(f"{name} {old} -> {new}".replace('"', ""))
    return found


# -- images


def augmentation(solver: Solver) -> str:
    """What is done to the images at random, in a few words."""
    transform, parts = solver.transform, []
    if transform.python:
        parts.append(transform.python)
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
        ramp = transform.crop_size_ramp
        parts.append(f"crop {ramp.start_size} -> {transform.crop_size}" if ramp else f"crop {transform.crop_size}")
    if transform.rand_augment:
        parts.append(f"RandAugment {transform.rand_augment.num_ops}x{transform.rand_augment.magnitude}")
    if transform.trivial_augment:
        parts.append("TrivialAugment")
    if transform.cutout_size:
        parts.append(f"cutout {transform.cutout_size}")
    if solver.mixup_alpha:
        parts.append(f"mixup {solver.mixup_alpha:g}")
    if solver.cutmix_alpha:
        parts.append(f"cutmix {solver.cutmix_alpha:g}")
    if solver.label_smoothing:
        parts.append(f"label smoothing {solver.label_smoothing:g}")
    if solver.class_weight:
        parts.append(f"class weights {min(solver.class_weight):g}-{max(solver.class_weight):g}")
    return ", ".join(parts) or "none"


def augmentation_changes(before: Transform, now: Transform) -> list[str]:
    """`field old -> new` for each part of the transform that differs."""
    pairs = ((m.name, getattr(before, m.attribute), getattr(now, m.attribute)) for m in layout(Transform))
    return [f"{name} {' -> '.join(apart((old, new), 6, short))}" for name, old, new in pairs if old != new]


def crop_size_ramp(solver: Solver) -> str:
    """How large the images of the stage are while that changes; '' where it doesn't."""
    ramp = solver.transform.crop_size_ramp
    if ramp is None:
        return ""
    start, end = (f"{at:g}" for at in (ramp.start_epoch, ramp.end_epoch))
    return f"images {ramp.start_size} -> {solver.transform.crop_size} pixels, epochs {start} to {end} of the stage"


def short(value: object, digits: int) -> str:
    if value is None:
        return "none"
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, enum.Enum):
        return str(value.value)
    if isinstance(value, tuple):
        return " ".join(f"{v:.{digits}g}" for v in value) or "none"
    if isinstance(value, int | float):
        return f"{value:.{digits}g}"
    fields = getattr(value, "__dataclass_fields__", {})
    inner = " ".join(f"{name}: {getattr(getattr(value, name), 'value', getattr(value, name))}" for name in fields)
    return "{ " + inner + " }"
