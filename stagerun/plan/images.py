"""What is done to the images of a stage: in a few words, and what of it deserves a look. Pure."""

import enum

from stagerun.plan.update import place
from stagerun.recipe import PadMode, Schedule, Solver, Stage, Transform
from stagerun.schedule.image_size import crop_size
from stagerun.spec.values import layout

# What turns pixels into the numbers that the network gets, and what counts where nothing is given.
_NUMBERS: dict[str, float | None] = {"channel_order": None, "mean_value": 0.0, "std_value": 1.0, "scale": None}


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
        ramp = transform.crop_size_ramp
        parts.append(f"crop {ramp.start_size} -> {transform.crop_size}" if ramp else f"crop {transform.crop_size}")
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
    pairs = ((m.name, getattr(before, m.attribute), getattr(now, m.attribute)) for m in layout(Transform))
    return [f"{name} {_short(old)} -> {_short(new)}" for name, old, new in pairs if old != new]


def image_notes(schedule: Schedule, stage: Stage) -> list[str]:
    """One sentence for each thing about the size of training images, then for each way in which an evaluation shows the network
    something else than training does."""
    solver, found = stage.solver, _ramp_notes(stage)
    if schedule.data.val is None:
        return found
    if _resizes(solver.transform) and not _resizes(solver.test_transform):
        shown = f"the centre {crop} x {crop} pixels" if (crop := solver.test_transform.crop_size) else "the whole"
        found.append(
            f"training resizes images, an evaluation doesn't: it shows {shown} of each as it is stored; "
            "test_transform_param { random_resize_param { min_size: ... } } makes its shorter side that long first"
        )
    for name in _NUMBERS:
        trained, tested = (_number(t, name) for t in (solver.transform, solver.test_transform))
        if trained != tested:
            where = place(stage, f"solver.test_transform_param.{name}")
            where = where or place(stage, f"solver.transform_param.{name}")
            found.append(
                f"an evaluation has {name} {_short(tested)}, training {_short(trained)}: the network is given other numbers "
                f"than it was trained on{where}"
            )
    return found


def crop_size_ramp(solver: Solver) -> str:
    """How large the images of the stage are while that changes; '' where it doesn't."""
    ramp = solver.transform.crop_size_ramp
    if ramp is None:
        return ""
    start, end = (f"{at:g}" for at in (ramp.start_epoch, ramp.end_epoch))
    return f"images {ramp.start_size} -> {solver.transform.crop_size} pixels, epochs {start} to {end} of the stage"


def _ramp_notes(stage: Stage) -> list[str]:
    solver, ramp = stage.solver, stage.solver.transform.crop_size_ramp
    if ramp is None:
        return []
    found, where = [], place(stage, "solver.transform_param.crop_size_ramp_param.end_epoch")
    last = crop_size(solver, solver.max_iter - 1)
    if last != solver.transform.crop_size:
        found.append(f"crop_size {solver.transform.crop_size} is never reached: the stage ends at {last} pixels{where}")
    if solver.compile:
        found.append("compile: the network is compiled again for each size of its images")
    return found


def _resizes(transform: Transform) -> bool:
    return bool(transform.random_resize or transform.random_aspect_ratio or transform.random_resized_crop)


def _number(transform: Transform, name: str) -> object:
    """The transform's value; of what is given by channel the numbers of all, or the one that all have."""
    value, default = getattr(transform, name), _NUMBERS[name]
    if default is None:
        return value
    values = value or (default,)
    return values[:1] if len(set(values)) == 1 else values


def _short(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, enum.Enum):
        return str(value.value)
    if isinstance(value, tuple):
        return " ".join(f"{v:g}" for v in value) or "none"
    if isinstance(value, int | float):
        return f"{value:g}"
    fields = getattr(value, "__dataclass_fields__", {})
    inner = " ".join(f"{name}: {getattr(getattr(value, name), 'value', getattr(value, name))}" for name in fields)
    return "{ " + inner + " }"
