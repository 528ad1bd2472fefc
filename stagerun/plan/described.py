"""How a stage's weights are updated and its images transformed, in a few words, and which of its settings do nothing. Pure."""

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from stagerun.base.errors import Span
from stagerun.base.recipe import (
    LossType,
    MomentumForm,
    Normalization,
    OnNan,
    Origin,
    PadMode,
    Solver,
    Stage,
    Transform,
)
from stagerun.base.text import apart
from stagerun.language.values import layout
from stagerun.schedule import POLICIES, SOLVER_TYPES, fields_read, own_fields


def place(stage: Stage, field: str) -> str:
    """` (FILE:LINE)` where the field is written, or nothing."""
    span = stage.written(field)
    return f" ({span.path}:{span.line})" if span else ""


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


# Of the average that `ema_decay` keeps: a larger share of the stage's first weights is worth a look.
MOST_OF_FIRST = 0.1


@dataclass(frozen=True, slots=True)
class Unread:
    """A field of Solver that is written, at `span`, and not read. `name`: as it is written. `why`: the end of `NAME is not read`."""

    field: str
    name: str
    why: str
    origin: Origin
    span: Span


def unread_fields(stage: Stage) -> list[Unread]:
    found = []
    for field, why in unread(stage):
        origin = stage.origins.get(f"solver.{field}")
        if origin is not None and origin.span is not None:
            found.append(Unread(field, _written_as(field, origin), why, origin, origin.span))
    return found


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


def _written_as(field: str, origin: Origin) -> str:
    """The field's own name, or that of its partner in epochs."""
    name = origin.text.lstrip("[").partition(": ")[0]
    return name if name.endswith("_epoch") else field


def unread_rules(stage: Stage) -> list[str]:
    """The same for what stands inside `param`, as sentences."""
    solver = stage.solver
    if "adapt" not in fields_read(solver):
        return [f"`adapt` of param `{r.name}` is not read by type {solver.type}" for r in solver.param if not r.adapt]
    if not solver.local_lr_auto:
        return []
    rules = [r for r in solver.param if r.adapt and r.lr_mult not in (0, 1)]
    return [f"`lr_mult` {r.lr_mult:g} of param `{r.name}` is replaced by local_lr_auto" for r in rules]


def doubtful_values(stage: Stage) -> Iterator[tuple[str, str]]:
    """Sentences, and the field of Solver that each is about."""
    solver, kind = stage.solver, SOLVER_TYPES[stage.solver.type]
    if kind.momentum_is is not None and not solver.momentum:
        meaning, usual = kind.momentum_is
        yield f"momentum is 0, and {meaning} of type {solver.type}: {usual} is usual", "momentum"
    if kind.divides and solver.delta == 0:
        yield "delta is 0: a weight without a gradient divides 0 by 0", "delta"
    if solver.ema_decay is None:
        return
    first = solver.ema_decay ** (solver.max_iter // solver.ema_interval)
    if first == 1:
        text = f"ema_interval {solver.ema_interval} is never reached: the stage ends at {solver.max_iter}"
        yield text, "ema_interval"
    elif first > MOST_OF_FIRST:
        steps = f"{solver.ema_decay:g}^{solver.max_iter // solver.ema_interval}"
        yield (
            f"{100 * first:.3g} % of the average at the stage's end ({steps}) are the weights that it starts with",
            "ema_decay",
        )


# -- images

# The fields that turn pixels into the network's numbers.
_NUMBERS = ("channel_order", "mean_value", "std_value", "scale", "mean_file")


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
    return [f"{name} {' -> '.join(apart((old, new), 6, _short))}" for name, old, new in pairs if old != new]


def number_notes(stage: Stage, parent: Stage | None) -> list[str]:
    """What an evaluation, or else the parent, has otherwise where the network is given other numbers than in training. What changes inputs
    by less than 1 % is no difference."""
    solver, channels = stage.solver, stage.model.channels
    others = [("an evaluation", solver.test_transform)] if stage.data.val else []
    if parent is not None and parent.model.channels == channels:
        others.append((f"stage `{parent.name}`", parent.solver.transform))
    for who, other in others:
        if _same_numbers(solver.transform, other, channels):
            continue
        pairs = [(name, _number(other, name), _number(solver.transform, name)) for name in _NUMBERS]
        shown = [(name, *apart((seen, trained), 6, _short)) for name, seen, trained in pairs if seen != trained]
        return [f"{who} has {name} {seen}, training {trained}" for name, seen, trained in shown]
    return []


def _same_numbers(a: Transform, b: Transform, channels: int) -> bool:
    pairs = zip(input_ranges(a, channels), input_ranges(b, channels), strict=True)
    near = all(abs(x - y) <= 0.01 * abs(p[1] - p[0]) for p, q in pairs for x, y in zip(p, q, strict=True))
    return near and a.mean_file == b.mean_file and (channels == 1 or a.channel_order == b.channel_order)


def input_ranges(transform: Transform, channels: int) -> list[tuple[float, float]]:
    """What the pixels 0 and 255 of each channel become."""
    mean, std = ((v * channels)[:channels] for v in (transform.mean_value or (0.0,), transform.std_value or (1.0,)))
    factors = [transform.scale / s for s in std]
    return [((0 - m) * factor, (255 - m) * factor) for m, factor in zip(mean, factors, strict=True)]


def crop_size_ramp(solver: Solver) -> str:
    """How large the images of the stage are while that changes; '' where it doesn't."""
    ramp = solver.transform.crop_size_ramp
    if ramp is None:
        return ""
    start, end = (f"{at:g}" for at in (ramp.start_epoch, ramp.end_epoch))
    return f"images {ramp.start_size} -> {solver.transform.crop_size} pixels, epochs {start} to {end} of the stage"


def resizes(transform: Transform) -> bool:
    return bool(transform.random_resize or transform.random_aspect_ratio or transform.random_resized_crop)


def _number(transform: Transform, name: str) -> object:
    """The transform's value; of what is given by channel the numbers of all, or the one that all have."""
    value, default = getattr(transform, name), {"mean_value": 0.0, "std_value": 1.0}.get(name)
    if default is None:
        return value
    values = value or (default,)
    return values[:1] if len(set(values)) == 1 else values


def _short(value: object, digits: int) -> str:
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
