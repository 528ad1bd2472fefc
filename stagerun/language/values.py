"""One walk over the messages of a recipe: built from what is written, named as in solver files, and as one canonical text. Pure.

`layout` joins each value of a recipe with its field in stagerun.proto. Recipes of snapshots have no other names than these: `stored` reads
them from the canonical text.
"""

import dataclasses
import enum
import hashlib
import json
import types
from collections.abc import Collection, Iterator
from functools import cache
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from stagerun.base import recipe
from stagerun.base.proto import path_to
from stagerun.base.proto.enums_pb2 import CarryStart, Position
from stagerun.base.proto.stagerun_pb2 import same_as
from stagerun.base.units import epochs
from stagerun.language import tree
from stagerun.language.code import digest as digest_of
from stagerun.language.layers import partner
from stagerun.language.tree import SCHEDULE, Block, Scalar, literal
from stagerun.language.view import View

NONE = "none"
# Rates that `base_lr_batch` is for.
RATES = ("base_lr", "warmup_start_lr", "end_lr")

_RENAMED = {"stages": "stage", "ensembles": "ensemble", "parent": "from"}
# The language's words for false and true.
_WORDS = {
    "carry_momentum": (CarryStart.ZERO, CarryStart.KEEP),
    "carry_data": (Position.RESTART, Position.CONTINUE),
}
# Not in the canonical text: where values came from, what was derived from the text as written, and what only `run` looks at.
_NOT_STORED = set(
    "Stage.model files sets class_sizes imports identity origins span spare_classes sources solverstate_path Weights.state".split()
)


@dataclasses.dataclass(frozen=True, slots=True)
class Member:
    """An attribute of one of recipe's messages. `name` is its name in the canonical text. `fields` lead to it in the language, and `path` is
    their names: empty where it is derived from others, or from where the folder lies. `kind` is the type of one value, and `default`
    MISSING where there is none. A `quiet` one is not in the canonical text at its default."""

    attribute: str
    name: str
    fields: tuple[FieldDescriptor, ...]
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


def layout(kind: Any) -> tuple[Member, ...]:
    """The members of a message, in the recipe's order."""
    if kind not in _layouts:
        hints = get_type_hints(kind)
        _layouts[kind] = tuple(_member(kind, field, hints[field.name]) for field in dataclasses.fields(kind))
    return _layouts[kind]


def _member(kind: type, field: "dataclasses.Field[Any]", wanted: Any) -> Member:
    if isinstance(wanted, types.UnionType):  # `X | None`
        (wanted,) = (part for part in get_args(wanted) if part is not types.NoneType)
    repeated = get_origin(wanted) is tuple
    fields = path_to(kind, field.name)
    return Member(
        attribute=field.name,
        name=fields[0].name if len(fields) == 1 else _RENAMED.get(field.name, field.name),
        fields=fields,
        path=".".join(one.name for one in fields),
        kind=get_args(wanted)[0] if repeated else wanted,
        repeated=repeated,
        default=field.default if field.default_factory is dataclasses.MISSING else field.default_factory(),
        stored=not {field.name, f"{kind.__name__}.{field.name}"} & _NOT_STORED,
        quiet=tree.quiet(fields[-1]) if fields else field.name == "mean_path",
    )


Message = TypeVar("Message")


def build(kind: type[Message], view: View, **given: Any) -> Message:
    """The message that checked settings describe. `given` are the fields that are not one field of the language each."""
    names = [m.attribute for m in layout(kind) if m.fields and m.attribute not in given]
    return kind(**settings(kind, view, names), **given)


def settings(kind: type, view: View, names: Collection[str]) -> dict[str, Any]:
    """Some fields of a message. Doubtful if one of them could not be read."""
    return {member.attribute: _setting(member, view) for member in layout(kind) if member.attribute in names}


def _setting(member: Member, view: View) -> Any:
    *around, field = member.fields
    for message in around:
        view = view.inside(message.name)
    written = [value.value for value in view.block.entries[field.name].values] if view.has(field.name) else []
    if member.repeated:
        return tuple(_value(member.kind, value) for value in written)
    value = written[0] if written else tree.default(field)
    if value is None and (other := field.GetOptions().Extensions[same_as]):
        value = view.scalar(other)
    if value is None:
        assert member.default is not dataclasses.MISSING, field.name
        return member.default
    if member.attribute in _WORDS:
        return value == _WORDS[member.attribute][True].value
    return _value(member.kind, value)


def _value(kind: Any, value: Scalar | Block) -> Any:
    return build(kind, View(value)) if isinstance(value, Block) else kind(value)


# -- a recipe's values under the names that they have in solver files: `solver.transform_param.crop_size`


def members(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """The fields of a message with their names behind `key`, in the order of the recipe."""
    for member in layout(type(value)):
        name, held = f"{key}.{member.path}", getattr(value, member.attribute)
        if isinstance(value, recipe.Model) and member.attribute == "name":  # a net of Caffe's is known by its digest
            yield name, held if value.net is None else None
            yield f"{key}.caffe_net", None if value.net is None else held
        elif isinstance(value, recipe.Model) and member.attribute == "net" and held is not None:
            yield recipe.NET if key == "model" else f"{key}.net", net_digest(held)
        elif member.kind is recipe.Source and member.repeated:  # the first under the name of all
            yield name, held[0] if held else None
            yield from ((f"{name}.{other.name}", other) for other in held[1:])
        elif member.fields:
            yield name, _WORDS[member.attribute][held] if member.attribute in _WORDS else held


def net_digest(text: str) -> str:
    """That of a net of Caffe's, in its canonical form."""
    return digest_of([("net", text)])


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
    return str(value.value) if isinstance(value, enum.Enum) else literal(value)


def plain(value: Any) -> Any:
    """A value as JSON has it: numbers, texts, true and false, lists, objects; null for what is not set. Rates are finite."""
    if isinstance(value, tuple):
        return [plain(part) for part in value]
    if dataclasses.is_dataclass(value):
        return {name[1:]: plain(held) for name, held in members(value, "")}
    return value.value if isinstance(value, enum.Enum) else value


# -- what the language says of a field by that name


def identity(key: str, lr_policy: str = "") -> bool:
    """Whether snapshots depend on the field of that name, in a stage of that lr_policy."""
    fields = _fields(key)
    inside = fields[1:] if key.startswith("solver.") else fields
    counts = all(field is not None and tree.identity(field) for field in inside)
    return key == recipe.NET or (counts and is_read(key, lr_policy))


def is_read(key: str, lr_policy: str) -> bool:
    """Whether the policy reads the field: `average_loss`, which Caffe's files have for the display whatever the policy is."""
    return key != "solver.average_loss" or lr_policy == "plateau"


def unsaid(key: str) -> str:
    """The default of a field that identities and the canonical form leave out at its default; '' for another field."""
    field = field_of(key)
    if field is None or not tree.quiet(field):
        return ""
    return NONE if field.is_repeated else default_text(field)


# Defaults that the .proto can't state, and that follow from no other field.
_CONSTANT = {"warmup_iter": "0", "mean_value": "[0.0]", "std_value": "[1.0]"}


@cache
def default_text(field: FieldDescriptor) -> str:
    """The default of a field as in identities."""
    stated = tree.default(field)
    if stated is not None:
        return tree.canonical(stated, field)
    return _CONSTANT.get(field.name) or ("[]" if field.is_repeated else NONE)


def at_default(key: str, value: str) -> bool:
    """Whether a field has the default that the language states for it, or nothing."""
    field = field_of(key)
    return field is None or value in (NONE, "[]", default_text(field))


def known(key: str) -> bool:
    """Whether the language has the field of that name."""
    return field_of(key) is not None


def field_of(key: str) -> FieldDescriptor | None:
    """The field of that name; None if the language doesn't have it."""
    return _fields(key)[-1]


def _fields(key: str) -> list[FieldDescriptor | None]:
    """The fields that a name leads through, None at the end for one that the language does not have."""
    kind: Descriptor | None = SCHEDULE
    found: list[FieldDescriptor | None] = []
    for word in key.split("."):
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
    if key.startswith(recipe.CODE):
        return value, ""
    origin, field = stage.origins.get(key), field_of(key)
    in_epochs = _in_epochs(field, value, stage)
    if origin is None or origin.span is None:
        return value + in_epochs, ""
    if field is not None and (other := partner(field)) and origin.text.startswith(f"{other}: "):
        return value + in_epochs, origin.text
    batch = stage.origins.get("solver.base_lr_batch")
    if key.removeprefix("solver.") in RATES and batch is not None and batch.span is not None:
        return f"{value} for {stage.solver.batch_size}", f"{origin.text} for {batch.text}"
    return (value if origin.text.startswith(("{", "[{")) else origin.text) + in_epochs, ""


def _in_epochs(field: FieldDescriptor | None, value: str, stage: recipe.Stage) -> str:
    """` = 24.94 epochs` for a number of iterations of a stage, the same of knots, '' for another field."""
    images, batch = stage.data.train.images, stage.solver.batch_size
    if field is None:
        return ""
    if field.name == "knot":
        places = [f"{knot.iter * batch / images:.2f}" for knot in stage.solver.knot]
        return f" = at epochs {', '.join(places)}" if places else ""
    if not partner(field) or not value.isdecimal() or value == "0":
        return ""
    return f" = {epochs(int(value), images, batch):.2f} epochs"


# -- the canonical text


def canonical(schedule: recipe.Schedule) -> str:
    """Everything that the schedule says, defaults spelt out, durations in iterations, one block per stage. Equal
    schedules have equal texts, on every machine that has the folder at the same path. What is not set is left out.
    """
    global _newest
    newest = _newest
    if newest is None or newest[0] != schedule:
        newest = _newest = schedule, "\n".join(_lines(schedule)) + "\n"
    return newest[1]


# A run asks for the same one at each stage, and a text of hundreds takes a while. One assignment, so that threads may ask.
_newest: tuple[recipe.Schedule, str] | None = None


def _lines(message: Any, shared: recipe.Data | None = None) -> Iterator[str]:
    """`shared`: the schedule's data, around a stage."""
    around = message.data if isinstance(message, recipe.Schedule) else None
    for member in layout(type(message)):
        held = getattr(message, member.attribute)
        if not member.stored or (member.quiet and held == member.default):
            continue
        if member.attribute == "parent":
            held = held or ""
        if shared is not None and isinstance(held, recipe.Data):
            held = own_images(held, shared)
        for value in held if isinstance(held, tuple) else (held,):
            if dataclasses.is_dataclass(value):
                yield f"{member.name} {{"
                yield from (f"  {line}" for line in _lines(value, around))
                yield "}"
            elif value is not None:
                yield f"{member.name}: {text(value)}"


@dataclasses.dataclass(frozen=True, slots=True)
class StageData:
    """What a stage says of `recipe.Data`."""

    train: recipe.Source
    val: tuple[recipe.Source, ...]


def own_images(data: recipe.Data, shared: recipe.Data) -> StageData | None:
    """The images of a stage; None where they are the schedule's."""
    return None if (data.train, data.val) == (shared.train, shared.val) else StageData(data.train, data.val)


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
