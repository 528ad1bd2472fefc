"""One walk over the messages of a recipe: built from what is written, named as in solver files, and as one canonical text. Pure.

`layout` says where each field stands in the language. Recipes of snapshots have no other names than these: `stored` reads
them from the canonical text.
"""

import dataclasses
import enum
import hashlib
import json
import types
from collections.abc import Collection, Iterator
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from google.protobuf.descriptor import FieldDescriptor

from stagerun.base import recipe
from stagerun.base.units import epochs
from stagerun.language import tree
from stagerun.language.code import digest as digest_of
from stagerun.language.layers import durations, partner
from stagerun.language.tree import SCHEDULE, SOLVER, quoted
from stagerun.language.view import View

NONE = "none"
# Rates that `base_lr_batch` is for.
RATES = ("base_lr", "warmup_start_lr", "end_lr")

# Fields of recipe that have another name in the language, in the canonical text too.
_RENAMED = {
    "stages": "stage",
    "ensembles": "ensemble",
    "parent": "from",
    "transform": "transform_param",
    "test_transform": "test_transform_param",
    "random_aspect_ratio": "random_aspect_ratio_param",
    "random_resize": "random_resize_param",
    "random_resized_crop": "random_resized_crop_param",
    "color_jitter": "color_jitter_param",
    "rand_augment": "rand_augment_param",
    "crop_size_ramp": "crop_size_ramp_param",
    "compress": "compress_param",
    "sync": "sync_param",
    "audit": "audit_param",
    "from_": "from",
}
# Fields that the language has inside a message that the recipe doesn't have.
_INSIDE = {
    "moving_average_fraction": "batch_norm_param.moving_average_fraction",
    "eps": "batch_norm_param.eps",
    "moving_average_passes": "batch_norm_param.moving_average_passes",
    "carry_momentum": "carry.momentum",
    "carry_data": "carry.data",
    "interp_mode": "resize_param.interp_mode",
}
# The language's words for false and true.
_WORDS = {
    "carry_momentum": ("ZERO", "KEEP"),
    "carry_data": ("RESTART", "CONTINUE"),
}
# Derived from others, or from where the folder lies: the language has no such field.
_DERIVED = {
    "epoch_iter", "path", "sources", "labels_path", "labels_digest", "input_shape", "state", "solverstate_path", "mean_path"
}  # fmt: skip
# Not in the canonical text: where values came from, what was derived from the text as written, and what only `run` looks at.
_NOT_STORED = {
    "Stage.model",
    "files",
    "sets",
    "class_sizes",
    "imports",
    "identity",
    "origins",
    "span",
    "spare_classes",
    "sources",
    "solverstate_path",
    "Weights.state",
}
# Fields that default to another field of their message.
_SAME_AS = {"max_size": "min_size", "test_batch_size": "device_batch_size"}


@dataclasses.dataclass(frozen=True, slots=True)
class Member:
    """A field of one of recipe's messages. `attribute` is its name there, `name` that in the canonical text, `path` the way to it in the
    language. `kind` is the type of one value, and `default` MISSING where there is none. A `quiet` one is not in the canonical text at
    its default."""

    attribute: str
    name: str
    path: str
    kind: type
    repeated: bool
    default: Any
    stored: bool
    quiet: bool

    @property
    def is_message(self) -> bool:
        return dataclasses.is_dataclass(self.kind)


_layouts: dict[type, tuple[Member, ...]] = {}
# Messages of which some fields are quiet, and what their names begin with.
_MAY_BE_QUIET = {
    recipe.Model: "model.",
    recipe.Source: "data.val.",
    recipe.Solver: "solver.",
    recipe.Sync: "solver.sync_param.",
    recipe.Loss: "solver.loss.",
    recipe.Transform: "solver.transform_param.",
}


def layout(kind: Any) -> tuple[Member, ...]:
    """The members of a message, in the recipe's order."""
    if kind not in _layouts:
        hints = get_type_hints(kind)
        prefix = _MAY_BE_QUIET.get(kind, "")
        _layouts[kind] = tuple(_member(kind, field, hints[field.name], prefix) for field in dataclasses.fields(kind))
    return _layouts[kind]


def _member(kind: type, field: "dataclasses.Field[Any]", wanted: Any, prefix: str) -> Member:
    if get_origin(wanted) in (Union, types.UnionType):  # `X | None`
        (wanted,) = (part for part in get_args(wanted) if part is not types.NoneType)
    repeated = get_origin(wanted) is tuple
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    name = _RENAMED.get(field.name, field.name)
    path = _INSIDE.get(field.name, name)
    return Member(
        attribute=field.name,
        name=name,
        path=path,
        kind=get_args(wanted)[0] if repeated else wanted,
        repeated=repeated,
        default=default,
        stored=not {field.name, f"{kind.__name__}.{field.name}"} & _NOT_STORED,
        quiet=bool(prefix and unsaid(prefix + path)) or field.name == "mean_path",
    )


Message = TypeVar("Message")


def build(kind: type[Message], view: View, **given: Any) -> Message:
    """The message that checked settings describe. `given` are the fields that are not one field of the language each."""
    names = [m.attribute for m in layout(kind) if m.attribute not in given and m.attribute != "mean_path"]
    return kind(**settings(kind, view, names), **given)


def settings(kind: type, view: View, names: Collection[str]) -> dict[str, Any]:
    """Some fields of a message. Doubtful if one of them could not be read."""
    return {member.attribute: _setting(member, view) for member in layout(kind) if member.attribute in names}


def _setting(member: Member, view: View) -> Any:
    *around, name = member.path.split(".")
    for message in around:
        view = view.inside(message)
    if member.repeated and member.is_message:
        return tuple(build(member.kind, inner) for inner in view.views(name))
    if member.repeated and issubclass(member.kind, enum.Enum):
        return tuple(member.kind(text) for text in view.texts(name))
    if member.repeated:
        return view.texts(name) if member.kind is str else view.numbers(name)
    if member.is_message:
        found = view.view(name)
        return build(member.kind, found) if found is not None else member.default
    value = view.scalar(name)
    if value is None and name in _SAME_AS:
        value = view.scalar(_SAME_AS[name])
    if value is None:
        assert member.default is not dataclasses.MISSING, name
        return member.default
    if member.attribute in _WORDS:
        return _WORDS[member.attribute].index(str(value)) == 1
    return member.kind(value)


# -- a recipe's values under the names that they have in solver files: `solver.transform_param.crop_size`


def members(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """The fields of a message with their names behind `key`, in the order of the recipe."""
    for member in layout(type(value)):
        if member.attribute not in _DERIVED:
            held = getattr(value, member.attribute)
            if isinstance(value, recipe.Model) and member.attribute in ("name", "net"):
                yield from _which_network(value, member.attribute, key)
                continue
            if member.attribute in _WORDS:
                held = _Word(_WORDS[member.attribute][held])
            if member.kind is recipe.Source and member.repeated:  # the first under the name of all
                yield f"{key}.{member.path}", held[0] if held else None
                yield from ((f"{key}.{member.path}.{other.name}", other) for other in held[1:])
                continue
            yield f"{key}.{member.path}", held


def _which_network(model: recipe.Model, attribute: str, key: str) -> Iterator[tuple[str, Any]]:
    """A net of Caffe's is known by its digest, and not by where it lies."""
    if attribute == "name":
        yield f"{key}.name", model.name if model.net is None else None
        yield f"{key}.caffe_net", None if model.net is None else model.name
    elif model.net is not None:
        yield recipe.NET if key == "model" else f"{key}.net", net_digest(model.net)


def net_digest(text: str) -> str:
    """That of a net of Caffe's, in its canonical form."""
    return digest_of([("net", text)])


class _Word(str):
    """The name of an enum's value, which is not a text in quotes."""


def leaves(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Every field below a message, and its canonical text."""
    for name, held in members(value, key):
        if dataclasses.is_dataclass(held):
            yield from leaves(held, name)
        elif held != "" or not isinstance(value, recipe.Source):  # most have no name
            yield name, text(held)


def differing(a: Any, b: Any, key: str) -> Iterator[tuple[str, Any, Any]]:
    """(name, value, value) of what differs between two values: a message that only one has as a whole, else field by field."""
    if dataclasses.is_dataclass(a) and type(a) is type(b):
        before, now = dict(members(a, key)), dict(members(b, key))
        for name in before | now:
            yield from differing(before.get(name), now.get(name), name)
    elif a != b:
        yield key, a, b


def text(value: Any) -> str:
    """One text for one value, as in `recipe.Stage.identity`."""
    if value is None:
        return NONE
    if isinstance(value, tuple):
        return f"[{', '.join(map(text, value))}]"
    if dataclasses.is_dataclass(value):
        # A message inside another is written with the dots of a path: shorter, and what `--why` takes.
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
    if key == recipe.NET:
        return True
    fields = _fields(key)
    return all(field is not None and tree.identity(field) for field in fields) and is_read(key, lr_policy)


def is_read(key: str, lr_policy: str) -> bool:
    """Whether the policy reads the field: `average_loss`, which Caffe's files have for the display whatever the policy is."""
    return key != "solver.average_loss" or lr_policy == "plateau"


def unsaid(key: str) -> str:
    """The default of a field that identities and the canonical form leave out at its default; '' for another field."""
    field = _fields(key)[-1]
    if field is None or not tree.quiet(field):
        return ""
    value = tree.default(field)
    return NONE if value is None else tree.canonical(value, field)


# Defaults that the .proto does not state, and that follow from no other field.
CONSTANT = {"warmup_iter": "0", "mean_value": "[0.0]", "std_value": "[1.0]"}


def at_default(key: str, value: str) -> bool:
    """Whether a field has the default that the language states for it, or nothing."""
    field = _fields(key)[-1]
    if field is None or value in (NONE, "[]", CONSTANT.get(field.name)):
        return True
    stated = tree.default(field)
    return stated is not None and value == tree.canonical(stated, field)


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
        kind = field.message_type  # None where it is not a message
    return found


def shown(key: str, value: str, stage: recipe.Stage) -> tuple[str, str]:
    """A field of a stage and its text -> the value as people read it, durations in epochs too, and what the file says where that
    is in another unit, or ''. A recipe that was read from a snapshot knows the value alone.
    """
    name = key.removeprefix("solver.")
    if key.startswith(recipe.CODE):
        return value, ""
    origin = stage.origins.get(key)
    epochs_too = _in_epochs(key, value, stage.solver, stage.data.train.images)
    if origin is None or origin.span is None:
        return value + epochs_too, ""
    field = _fields(key)[-1]
    if field is not None and (other := partner(field)) and origin.text.startswith(f"{other}: "):
        return value + epochs_too, origin.text
    batch = stage.origins.get("solver.base_lr_batch")
    if name in RATES and batch is not None and batch.span is not None:
        return f"{value} for {stage.solver.batch_size}", f"{origin.text} for {batch.text}"
    return (value if origin.text.startswith(("{", "[{")) else origin.text) + epochs_too, ""


def _in_epochs(key: str, value: str, solver: recipe.Solver, images: int) -> str:
    """` = 24.94 epochs` for a number of iterations of a stage, the same of knots, '' for another field."""
    name = key.removeprefix("solver.")
    if name == "knot":
        places = [f"{knot.iter * solver.batch_size / images:.2f}" for knot in solver.knot]
        return f" = at epochs {', '.join(places)}" if places else ""
    field = _fields(key)[-1]
    if (
        field is None
        or field.name not in dict(durations(field.containing_type))
        or not value.isdecimal()
        or value == "0"
    ):
        return ""
    return f" = {epochs(int(value), images, solver.batch_size):.2f} epochs"


# -- the canonical text


def canonical(schedule: recipe.Schedule) -> str:
    """Everything that the schedule says, defaults spelt out, durations in iterations, one block per stage. Equal
    schedules have equal texts, on every machine that has the folder at the same path. What is not set is left out.
    """
    global _newest
    known = _newest
    if known is None or known[0] != schedule:
        known = _newest = schedule, "\n".join(_lines(schedule)) + "\n"
    return known[1]


# A run asks for the same one at each stage, and a text of hundreds takes a while. One assignment, so that threads may ask.
_newest: tuple[recipe.Schedule, str] | None = None


def _lines(message: Any, shared: recipe.Data | None = None) -> Iterator[str]:
    """`shared`: the schedule's data, around a stage."""
    for member in layout(type(message)):
        if not member.stored:
            continue
        held = getattr(message, member.attribute)
        if member.quiet and held == member.default:
            continue
        if member.attribute == "parent":
            held = held or ""
        if shared is not None and isinstance(held, recipe.Data):
            held = own_images(held, shared)
        for value in held if isinstance(held, tuple) else (held,):
            if dataclasses.is_dataclass(value):
                yield f"{member.name} {{"
                around = (
                    message.data if isinstance(message, recipe.Schedule) and isinstance(value, recipe.Stage) else None
                )
                yield from (f"  {line}" for line in _lines(value, around))
                yield "}"
            elif value is not None:
                yield f"{member.name}: {text(value)}"


@dataclasses.dataclass(frozen=True, slots=True)
class StageImages:
    """What a stage says of `recipe.Data`."""

    train: recipe.Source
    val: tuple[recipe.Source, ...]


def own_images(data: recipe.Data, shared: recipe.Data) -> StageImages | None:
    """The images of a stage; None where they are the schedule's."""
    return None if (data.train, data.val) == (shared.train, shared.val) else StageImages(data.train, data.val)


def digest(schedule: recipe.Schedule) -> str:
    """sha256, in hex, of what training depends on: the settings of each stage that snapshots are made from, in running order, which stage
    and iteration of it each starts from, and which one teaches it. Names of stages, paths and what is only looked at are not in it.
    """
    place = {stage.name: number for number, stage in enumerate(schedule.stages)}
    made_from = [
        [
            None if stage.parent is None else place[stage.parent],
            sorted(stage.identity.items()),  # has the iteration
            *([place[stage.solver.teacher]] if stage.solver.teacher is not None else []),
            *([place[s] for s, _ in schedule.ensemble(stage.average).points] if stage.average is not None else []),
        ]
        for stage in schedule.stages
    ]
    return hashlib.sha256(json.dumps(made_from, separators=(",", ":")).encode()).hexdigest()
