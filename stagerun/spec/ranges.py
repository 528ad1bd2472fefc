"""What a single value may be, whatever else is written: the ranges that the comments of stagerun.proto state. Pure."""

import re
from dataclasses import dataclass, replace

from stagerun.errors import Span, listing, nearest
from stagerun.schedule import CURVES, POLICIES, SOLVER_TYPES
from stagerun.spec.networks import FILLER_FIELDS, NETWORKS
from stagerun.spec.problems import Problems
from stagerun.spec.scalars import shown
from stagerun.spec.tree import SCHEDULE, Block, Entry, Scalar, Value


@dataclass(frozen=True, slots=True)
class Range:
    """From `low` (or just above) to `high` (or just below)."""

    low: float | None = None
    high: float | None = None
    above: bool = False
    below: bool = False

    def __contains__(self, value: object) -> bool:
        assert isinstance(value, int | float)
        low = self.low is None or (value > self.low if self.above else value >= self.low)
        return low and (self.high is None or (value < self.high if self.below else value <= self.high))

    def __str__(self) -> str:
        if self.low is None:
            return f"at most {self.high}"
        low = f"above {self.low}" if self.above else f"at least {self.low}"
        if self.high is None:
            return low
        return f"{low} and {'below' if self.below else 'at most'} {self.high}"


POSITIVE = Range(0, above=True)
NOT_NEGATIVE = Range(0)
COUNT = Range(1)
FRACTION = Range(0, 1, above=True)
# What is beyond these is a slip of the pen, and would take all memory or overflow.
PIXELS = Range(1, 65535)
FEW = Range(1, 1000)
ASPECT_RATIO = Range(0.001, 1000)
FACTOR = Range(0, 100)
ALPHA = Range(0, 1_000_000)

RANGES: dict[str, Range] = {
    "Schedule.seed": NOT_NEGATIVE,
    "Schedule.keep_snapshots": COUNT,
    "Model.num_classes": COUNT,
    "BatchNormParameter.moving_average_fraction": Range(0, 1, below=True),
    "BatchNormParameter.eps": POSITIVE,
    "FillerParameter.std": NOT_NEGATIVE,
    "Source.images": COUNT,
    "Data.loader_threads": Range(1, 1024),
    "Data.scratch_reserve": Range(0, 1_000_000_000),
    "Solver.base_lr": NOT_NEGATIVE,
    "Solver.power": NOT_NEGATIVE,
    "Solver.stepsize": COUNT,
    "Solver.stepsize_epoch": POSITIVE,
    "Solver.stepvalue": NOT_NEGATIVE,
    "Solver.stepvalue_epoch": NOT_NEGATIVE,
    "Solver.lr_iter": COUNT,
    "Solver.lr_epoch": POSITIVE,
    "Solver.warmup_iter": NOT_NEGATIVE,
    "Solver.warmup_epoch": NOT_NEGATIVE,
    "Solver.warmup_start_lr": NOT_NEGATIVE,
    "Solver.policy_start_iter": NOT_NEGATIVE,
    "Solver.policy_start_epoch": NOT_NEGATIVE,
    "Solver.base_lr_batch": COUNT,
    "Solver.end_lr": NOT_NEGATIVE,
    "Solver.start_lr": NOT_NEGATIVE,
    "Solver.peak_iter": COUNT,
    "Solver.peak_epoch": POSITIVE,
    "Solver.plateau_winsize": COUNT,
    "Solver.plateau_winsize_epoch": POSITIVE,
    "Solver.average_loss": COUNT,
    "Knot.iter": NOT_NEGATIVE,
    "Knot.epoch": NOT_NEGATIVE,
    "Knot.factor": NOT_NEGATIVE,
    "PolicyParameter.end_value": NOT_NEGATIVE,
    "PolicyParameter.power": NOT_NEGATIVE,
    "PolicyParameter.gamma": NOT_NEGATIVE,
    "Solver.max_iter": COUNT,
    "Solver.max_epoch": POSITIVE,
    "Solver.batch_size": COUNT,
    "Solver.device_batch_size": COUNT,
    "Solver.iter_size": COUNT,
    "Solver.momentum": Range(0, 1, below=True),
    "Solver.momentum2": Range(0, 1, below=True),
    "Solver.rms_decay": Range(0, 1, below=True),
    "Solver.delta": NOT_NEGATIVE,
    "Solver.local_gw_ratio": POSITIVE,
    "Solver.ema_decay": Range(0, 1, above=True, below=True),
    "Solver.ema_interval": COUNT,
    "Solver.max_nan": COUNT,
    "Solver.weight_decay": NOT_NEGATIVE,
    "Solver.clip_gradients": POSITIVE,
    "Solver.mixup_alpha": ALPHA,
    "Solver.cutmix_alpha": ALPHA,
    "Solver.label_smoothing": Range(0, 1, below=True),
    "Solver.random_seed": NOT_NEGATIVE,
    "Solver.display": NOT_NEGATIVE,
    "Solver.display_epoch": NOT_NEGATIVE,
    "Solver.test_interval": NOT_NEGATIVE,
    "Solver.test_epoch": NOT_NEGATIVE,
    "Solver.test_iter": COUNT,
    "Solver.test_batch_size": COUNT,
    "Solver.snapshot": NOT_NEGATIVE,
    "Solver.snapshot_epoch": NOT_NEGATIVE,
    "ParamSpec.lr_mult": NOT_NEGATIVE,
    "ParamSpec.decay_mult": NOT_NEGATIVE,
    "TransformParameter.crop_size": PIXELS,
    "TransformParameter.pad": Range(0, 65535),
    "TransformParameter.cutout_size": Range(0, 65535),
    "TransformParameter.lighting_std": FACTOR,
    "RandomAspectRatioParameter.min_area_ratio": FRACTION,
    "RandomAspectRatioParameter.max_area_ratio": FRACTION,
    "RandomAspectRatioParameter.aspect_ratio_change": FRACTION,
    "RandomAspectRatioParameter.max_attempt": FEW,
    "RandomResizeParameter.min_size": PIXELS,
    "RandomResizeParameter.max_size": PIXELS,
    "RandomResizedCropParameter.min_area_ratio": FRACTION,
    "RandomResizedCropParameter.max_area_ratio": FRACTION,
    "RandomResizedCropParameter.min_aspect_ratio": ASPECT_RATIO,
    "RandomResizedCropParameter.max_aspect_ratio": ASPECT_RATIO,
    "RandomResizedCropParameter.max_attempt": FEW,
    "ColorJitterParameter.brightness": FACTOR,
    "ColorJitterParameter.contrast": FACTOR,
    "ColorJitterParameter.saturation": FACTOR,
    "ColorJitterParameter.hue": Range(0, 0.5),
    "RandAugmentParameter.num_ops": FEW,
    "RandAugmentParameter.magnitude": NOT_NEGATIVE,
    "RandAugmentParameter.num_magnitude_bins": Range(2, 10_000),
    "Ensemble.batch_norm_iter": COUNT,
    "CropSizeRampParameter.start_size": PIXELS,
    "CropSizeRampParameter.start_epoch": NOT_NEGATIVE,
    "CropSizeRampParameter.end_epoch": POSITIVE,
    "CropSizeRampParameter.multiple": PIXELS,
}

# Numbers whose range is not an interval, or depends on another field.
FREE = {
    "Solver.gamma",
    "Model.channels",
    "TransformParameter.scale",
    "TransformParameter.mean_value",
    "TransformParameter.std_value",
    "FillerParameter.value",
    "FillerParameter.min",
    "FillerParameter.max",
    "FillerParameter.mean",
}

CHOICES: dict[str, tuple[str, ...]] = {
    "Model.name": tuple(NETWORKS),
    "Solver.lr_policy": tuple(POLICIES),
    "PolicyParameter.policy": CURVES,
    "Solver.type": tuple(SOLVER_TYPES),
    "Solver.regularization_type": ("L2", "L1"),
    "FillerParameter.type": tuple(FILLER_FIELDS),
}

_SCHEDULE_NAME = re.compile(r"(?!\.\.?$)[A-Za-z0-9_.-]+", re.ASCII)
_STAGE_NAME = re.compile(r"[A-Za-z0-9_-]+", re.ASCII)
LONGEST_NAME = 100
NOT_EMPTY = ("Source.source", "Data.scratch", "StageEntry.solver", "ParamSpec.name")


def is_schedule_name(name: str) -> bool:
    return _SCHEDULE_NAME.fullmatch(name) is not None


def sound(block: Block, problems: Problems) -> Block:
    """The block without the entries that hold a value out of range; those are reported, and doubtful from here on."""
    entries: dict[str, Entry] = {}
    doubtful = set(block.doubtful)
    for name, entry in block.entries.items():
        values = [_sound_value(block, entry, value, problems) for value in entry.values]
        if all(values):
            entries[name] = replace(entry, values=tuple(v for v in values if v))
        else:
            doubtful.add(name)
    return replace(block, entries=entries, doubtful=frozenset(doubtful))


def _sound_value(block: Block, entry: Entry, value: Value, problems: Problems) -> Value | None:
    if isinstance(value.value, Block):
        return replace(value, value=sound(value.value, problems))
    key = f"{block.kind.name}.{entry.field.name}"
    message, hint = _wrong(key, entry.field.name, value.value, value.text)
    if message:
        problems.add(value.span, message, hint)
        return None
    return value


def _wrong(key: str, name: str, value: Scalar, text: str) -> tuple[str, str]:
    """What is wrong with one value and what to do about it; ('', '') if nothing is."""
    if isinstance(value, str):
        return _wrong_text(key, name, value)
    if key in RANGES and value not in RANGES[key]:
        return f"`{name}` must be {RANGES[key]}, not {shown(text)}", _range_hint(key)
    if key == "Model.channels" and value not in (1, 3):
        return f"`channels` must be 1 or 3, not {shown(text)}", "1 is grey, 3 is colour"
    if key == "TransformParameter.std_value" and value == 0:
        return "`std_value` must not be 0", "each value is divided by it; 58.395 is torchvision's for red"
    if key == "TransformParameter.scale" and value == 0:
        return "`scale` must not be 0", "it would make every image black; 0.0078125 is 1/128"
    return "", ""


def _range_hint(key: str) -> str:
    return {
        "Solver.clip_gradients": "leave it out for no clipping",
        "Solver.test_iter": "leave it out to evaluate every image",
    }.get(key, "")


def _wrong_text(key: str, name: str, value: str) -> tuple[str, str]:
    if key in CHOICES and value not in CHOICES[key]:
        known = "`stagerun help Model.name` lists them" if key == "Model.name" else f"known: {listing(CHOICES[key])}"
        return f"`{name}` has no value `{shown(value)}`", nearest(value, CHOICES[key]) or known
    if key == "Schedule.name" and not is_schedule_name(value):
        return f"`{shown(value)}` can't be the name of a schedule", "letters, digits, `_`, `-` and `.` can be in it"
    if key == "Sweep.name" and not _STAGE_NAME.fullmatch(value):
        return f"`{shown(value)}` can't end the name of a stage", "letters, digits, `_` and `-` can be in it"
    if key == "StageEntry.name":
        if not _STAGE_NAME.fullmatch(value):
            return f"`{shown(value)}` can't be the name of a stage", "letters, digits, `_` and `-` can be in it"
        if len(value) > LONGEST_NAME:
            return (
                f"the name of a stage has {len(value)} characters",
                f"{LONGEST_NAME} at most: it becomes part of file names",
            )
        if value in SCHEDULE.fields_by_name:
            return f"a stage can't be named `{value}`", f"`--set {value}...` means the field of Schedule"
    if key == "Ensemble.name" and (not _STAGE_NAME.fullmatch(value) or len(value) > LONGEST_NAME):
        hint = f"letters, digits, `_` and `-` can be in it, {LONGEST_NAME} at most"
        return f"`{shown(value)}` can't be the name of an ensemble", hint
    if key in NOT_EMPTY and not value:
        return (
            f"`{name}` is empty",
            "leave it out for the default" if key != "Source.source" else "name the folder of the LMDB",
        )
    return "", ""


def folder_name_problem(name: str, place: Span, problems: Problems) -> None:
    """The folder's name is the schedule's where none is written."""
    if not is_schedule_name(name):
        hint = 'write `name: "..."` with letters, digits, `_`, `-` and `.`'
        problems.add(place, f"the folder's name `{shown(name)}` can't be the name of the schedule", hint)
