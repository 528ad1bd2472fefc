"""What a single value may be, whatever else is written: the bounds of stagerun.proto, choices and names. Pure."""

import operator
import re
from collections.abc import Callable
from dataclasses import replace

from google.protobuf.descriptor import FieldDescriptor

from stagerun.base.code import WrongCode, code_of
from stagerun.base.errors import Problems, Span, listing, nearest
from stagerun.language.consent import NEEDED, Consent
from stagerun.language.lexer import shown
from stagerun.language.networks import FILLER_FIELDS, NETWORKS, code_in, is_foreign
from stagerun.language.proto import stagerun_pb2
from stagerun.language.tree import SCHEDULE, SOURCE, Block, Entry, Scalar, Value
from stagerun.schedule import POLICIES, SOLVER_TYPES
from stagerun.schedule.averages import DECAYS

# The options of the .proto that bound a number; their names are the words of the message.
_BOUNDS = (
    (stagerun_pb2.at_least, operator.ge),
    (stagerun_pb2.above, operator.gt),
    (stagerun_pb2.at_most, operator.le),
    (stagerun_pb2.below, operator.lt),
)


def bounds(field: FieldDescriptor) -> list[tuple[str, float, Callable[[float, float], bool]]]:
    """(`at least`, 1, whether a value is that) for each bound of a field."""
    options = field.GetOptions()
    stated = [(bound, holds) for bound, holds in _BOUNDS if options.HasExtension(bound)]
    return [(bound.name.replace("_", " "), options.Extensions[bound], holds) for bound, holds in stated]


def bounds_missed(field: FieldDescriptor, value: float) -> str:
    """What a number must be, `at least 0 and below 1`; '' where it is."""
    stated = bounds(field)
    if all(holds(value, bound) for _, bound, holds in stated):
        return ""
    return " and ".join(f"{word} {int(bound) if bound.is_integer() else bound}" for word, bound, _ in stated)


CHOICES: dict[str, tuple[str, ...]] = {
    "Model.name": tuple(NETWORKS),
    "Solver.lr_policy": tuple(POLICIES),
    "Solver.type": tuple(SOLVER_TYPES),
    "Solver.regularization_type": ("L2", "L1"),
    "FillerParameter.type": tuple(FILLER_FIELDS),
    "OuterParameter.type": ("Nesterov", "SGD"),
    "Ensemble.shape": tuple(DECAYS),
}

# Retired texts, and what to write instead.
RETIRED = {
    "Solver.lr_policy": {
        "one_cycle": 'write `lr_policy: "cosine"` with `warmup_iter` and `decay_from: WARMUP_END`',
        "triangular": 'write `lr_policy: "piecewise_linear"` with a `knot` at each corner',
    }
}

_SCHEDULE_NAME = re.compile(r"(?!\.\.?$)[A-Za-z0-9_.-]+", re.ASCII)
_STAGE_NAME = re.compile(r"[A-Za-z0-9_-]+", re.ASCII)
LONGEST_NAME = 100
NOT_EMPTY = (
    "Source.source",
    "Data.scratch",
    "StageEntry.solver",
    "Solver.solverstate",
    "TransformParameter.mean_file",
    "Solver.net",
    "Model.caffe_net",
    "ParamSpec.name",
    "CompressionRule.name",
    "Solver.freeze",
    "WeightsParameter.file",
    "WeightsParameter.drop",
    "Rename.from",
    "Rename.to",
)


_EMPTY = {
    **dict.fromkeys(("Solver.net", "Model.caffe_net"), "name the prototxt of the net"),
    "Source.source": "name the folder of the LMDB",
    "WeightsParameter.file": "name a file, `OUT:STAGE`, `torchvision/NAME` or `timm/NAME`",
    **dict.fromkeys(("Rename.from", "Rename.to"), 'write a pattern: `rename { from: "module.*" to: "*" }`'),
}


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
    message, hint = _wrong(f"{block.kind.name}.{entry.field.name}", entry.field, value.value, value.text)
    if message:
        problems.add(value.span, message, hint)
        return None
    return value


_HINTS = {
    "Solver.max_iter": "`enabled: false` leaves a stage out",
    "Solver.max_epoch": "`enabled: false` leaves a stage out",
    "Solver.power": "1 is a straight line to zero, 2 falls faster at first",
    "Solver.weight_decay": "0 is none",
    "Solver.batch_size": "the images of one update, over all workers",
    "Solver.device_batch_size": "the images of one forward pass",
    "TransformParameter.crop_size": "leave it out for images as large as they are",
    "Solver.clip_gradients": "leave it out for no clipping",
    "Solver.test_iter": "leave it out to evaluate every image",
    "CompressionParameter.ratio": "0.01 sends one value in a hundred",
    "CompressionRule.ratio": "0.01 sends one value in a hundred",
}


def _wrong(key: str, field: FieldDescriptor, value: Scalar, text: str) -> tuple[str, str]:
    """What is wrong with one value and what to do about it; ('', '') if nothing is."""
    if isinstance(value, str):
        if NEEDED.get(key) is Consent.CODE and (key != "Model.name" or is_foreign(value)):
            try:
                code_in(value) if key == "Model.name" else code_of(value)
            except WrongCode as wrong:
                return wrong.message, wrong.hint
            return "", ""
        return _wrong_text(key, field.name, value)
    if missed := bounds_missed(field, value):
        return f"`{field.name}` must be {missed}, not {shown(text)}", _HINTS.get(key, "")
    if key == "Model.channels" and value not in (1, 3):
        return f"`channels` must be 1 or 3, not {shown(text)}", "1 is grey, 3 is colour"
    if key == "TransformParameter.std_value" and value == 0:
        return "`std_value` must not be 0", "each value is divided by it; 58.395 is torchvision's for red"
    if key == "TransformParameter.scale" and value == 0:
        return "`scale` must not be 0", "it would make every image black; 0.0078125 is 1/128"
    return "", ""


def _wrong_text(key: str, name: str, value: str) -> tuple[str, str]:
    if hint := RETIRED.get(key, {}).get(value):
        return f"`{name}: {shown(value)}` was retired", hint
    if key in CHOICES and value not in CHOICES[key]:
        known = "`stagerun help Model.name` lists them" if key == "Model.name" else f"known: {listing(CHOICES[key])}"
        if value == "?":
            return f"`{name}` is still a question", known
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
    if key == "Source.name" and (not _STAGE_NAME.fullmatch(value) or value in SOURCE.fields_by_name):
        return f"`{shown(value)}` can't be the name of a validation set", "letters, digits, `_` and `-` can be in it"
    if key in NOT_EMPTY and not value:
        return (
            f"`{name}` is empty",
            _EMPTY.get(key, "leave it out for the default"),
        )
    return "", ""


def folder_name_problem(name: str, place: Span, problems: Problems) -> None:
    """The folder's name is the schedule's where none is written."""
    if not is_schedule_name(name):
        hint = 'write `name: "..."` with letters, digits, `_`, `-` and `.`'
        problems.add(place, f"the folder's name `{shown(name)}` can't be the name of the schedule", hint)
