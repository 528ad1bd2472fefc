"""A recipe's values under the names that they have in solver files: `solver.transform_param.crop_size`. Pure.

Recipes of snapshots have no other names: they were read from `digest.canonical`.
"""

import dataclasses
import enum
from collections.abc import Iterator, Mapping
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from stagerun import recipe
from stagerun.spec import tree
from stagerun.spec.digest import NAMES
from stagerun.spec.layers import DURATIONS, PARTNER
from stagerun.spec.tree import SCHEDULE, SOLVER, quoted
from stagerun.units import epochs

NONE = "none"
# Rates that `base_lr_batch` is for.
RATES = ("base_lr", "warmup_start_lr", "start_lr", "end_lr")
ITERATIONS = frozenset(iterations for iterations, _ in DURATIONS)

# Where the language has a message that the recipe does without.
_PLACES: Mapping[tuple[type, str], str] = {
    (recipe.Model, "moving_average_fraction"): "batch_norm_param.moving_average_fraction",
    (recipe.Model, "eps"): "batch_norm_param.eps",
    (recipe.Solver, "carry_momentum"): "carry.momentum",
    (recipe.Solver, "carry_data"): "carry.data",
    (recipe.RandomAspectRatio, "interp_mode"): "resize_param.interp_mode",
    (recipe.RandomResize, "interp_mode"): "resize_param.interp_mode",
    (recipe.RandomResizedCrop, "interp_mode"): "resize_param.interp_mode",
}
_WORDS = {"carry_momentum": ("ZERO", "KEEP"), "carry_data": ("RESTART", "CONTINUE")}
# Derived from others, or from where the folder lies.
_DERIVED = {(recipe.Solver, "epoch_iter"), (recipe.Source, "path")}


def members(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """The fields of a message with their names behind `key`, in the order of the recipe."""
    kind = type(value)
    for field in dataclasses.fields(value):
        if (kind, field.name) in _DERIVED:
            continue
        held = getattr(value, field.name)
        if field.name in _WORDS:
            held = _Word(_WORDS[field.name][held])
        yield f"{key}.{_PLACES.get((kind, field.name)) or NAMES.get(field.name, field.name)}", held


class _Word(str):
    """The name of an enum's value, which is no text in quotes."""


def leaves(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Every field below a message, and its canonical text."""
    for name, held in members(value, key):
        if dataclasses.is_dataclass(held):
            yield from leaves(held, name)
        else:
            yield name, text(held)


def differing(a: Any, b: Any, key: str) -> Iterator[tuple[str, Any, Any]]:
    """(name, value, value) of what differs between two values: a message that only one has as a whole, else field by field."""
    if dataclasses.is_dataclass(a) and type(a) is type(b):
        for (name, one), (_, other) in zip(members(a, key), members(b, key), strict=True):
            yield from differing(one, other, name)
    elif a != b:
        yield key, a, b


def text(value: Any) -> str:
    """One text for one value, as in `recipe.Stage.identity`."""
    if value is None:
        return NONE
    if isinstance(value, tuple):
        return f"[{', '.join(map(text, value))}]"
    if dataclasses.is_dataclass(value):
        # A message inside another is written with the dots of a path: shorter, and what `explain` takes.
        said = [f"{name[1:]}: {shown}" for name, shown in leaves(value, "") if shown not in (NONE, "[]")]
        return "{ " + " ".join(said) + " }" if said else "{ }"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, enum.Enum):
        return str(value.value)
    if isinstance(value, _Word):
        return str(value)
    return quoted(value) if isinstance(value, str) else repr(value)


def plain(value: Any) -> Any:
    """A value as JSON has it: numbers, texts, true and false, lists, objects; null for what is not set. Rates are finite."""
    if isinstance(value, tuple):
        return [plain(part) for part in value]
    if dataclasses.is_dataclass(value):
        return {name[1:]: plain(held) for name, held in members(value, "")}
    if isinstance(value, enum.Enum):
        return value.value
    return str(value) if isinstance(value, str) else value


def identity(key: str, lr_policy: str = "") -> bool:
    """Whether snapshots depend on the field of that name, in a stage of that lr_policy."""
    fields = _fields(key)
    return all(field is not None and tree.identity(field) for field in fields) and is_read(key, lr_policy)


def is_read(key: str, lr_policy: str) -> bool:
    """Of `average_loss`, which Caffe's files have for the display, whatever the policy is: whether the policy reads it."""
    return key != "solver.average_loss" or lr_policy == "plateau"


def known(key: str) -> bool:
    """Whether the language has the field of that name."""
    return None not in _fields(key)


def _fields(key: str) -> list[FieldDescriptor | None]:
    """The fields that a name leads through, None at the end for one that the language does not have."""
    first, *words = key.split(".")
    kind, words = (SOLVER, words) if first == "solver" and words else (SCHEDULE, [first, *words])
    found: list[FieldDescriptor | None] = []
    for word in words:
        field = kind.fields_by_name.get(word) if kind is not None else None
        found.append(field)
        if field is None:
            break
        kind = field.message_type  # None where it is no message
    return found


def shown(key: str, value: str, stage: recipe.Stage, images: int) -> tuple[str, str]:
    """A field of a stage and its text -> the value as people read it, durations in epochs too, and what the file says where that
    is in another unit, or ''. A recipe that was read from a snapshot knows the value alone.
    """
    name = key.removeprefix("solver.")
    origin = stage.origins.get(key)
    epochs_too = _in_epochs(name, stage.solver, images)
    if origin is None or origin.span is None:
        return value + epochs_too, ""
    if name in PARTNER and origin.text.startswith(f"{PARTNER[name]}: "):
        return value + epochs_too, origin.text
    batch = stage.origins.get("solver.base_lr_batch")
    if name in RATES and batch is not None and batch.span is not None:
        return f"{value} for {stage.solver.batch_size}", f"{origin.text} for {batch.text}"
    return (value if origin.text.startswith(("{", "[{")) else origin.text) + epochs_too, ""


def _in_epochs(name: str, solver: recipe.Solver, images: int) -> str:
    """` = 24.94 epochs` for a number of iterations of a stage, the same of knots, '' for another field."""
    if name == "knot" or name.endswith(".knot"):
        curve = getattr(solver, name.partition(".")[0]) if "." in name else solver
        places = [f"{knot.iter * solver.batch_size / images:.2f}" for knot in (curve.knot if curve else ())]
        return f" = at epochs {', '.join(places)}" if places else ""
    value = getattr(solver, name) if name in ITERATIONS else None
    if isinstance(value, int) and value:
        return f" = {epochs(value, images, solver.batch_size):.2f} epochs"
    return ""
