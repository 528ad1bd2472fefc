"""The walk over the messages of a recipe: to build them from written settings, name their fields as in solver files, and write one canonical
text. Pure.

`layout` joins each value of a recipe with its field in stagerun.proto. `stored` reads snapshots' recipes by the same names.
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
from stagerun.language.tree import SCHEDULE, Block, Scalar, View, literal

NONE = "none"
# Rates that `base_lr_batch` scales.
RATES = ("base_lr", "warmup_start_lr", "end_lr")

_RENAMED = {"stages": "stage", "ensembles": "ensemble", "parent": "from"}
# The language's words for false and true.
_WORDS = {"carry_momentum": (CarryStart.ZERO, CarryStart.KEEP), "carry_data": (Position.RESTART, Position.CONTINUE)}
# Not in the canonical text: origins of values, values derived from the text as written, and values for `run` only.
_NOT_STORED = set(
    "Stage.model files sets class_sizes imports identity origins span spare_classes sources solverstate_path Weights.state".split()
)


@dataclasses.dataclass(frozen=True, slots=True)
class Member:
    """An attribute of one of recipe's messages. `name`: in the canonical text. `fields` lead to it in the language, and `path` has their
    names; both are empty if it is derived from other values or the folder's path. `kind`: the type of one value; `default`: MISSING if
    required. The canonical text omits a `quiet` attribute at its default."""

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
    """Return the members of a message, in the recipe's order."""
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


def build(kind: type[Message], view: View, **derived: Any) -> Message:
    """Build the message that checked settings describe. `derived`: the values of attributes that are not a field of the language."""
    names = [m.attribute for m in layout(kind) if m.fields and m.attribute not in derived]
    return kind(**settings(kind, view, names), **derived)


def settings(kind: type, view: View, names: Collection[str]) -> dict[str, Any]:
    """Return some fields of a message. Doubtful if one of them could not be read."""
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


# -- a recipe's values by their names in solver files: `solver.transform_param.crop_size`


def members(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a message, named `KEY.FIELD`, in the order of the recipe."""
    for member in layout(type(value)):
        name, held = f"{key}.{member.path}", getattr(value, member.attribute)
        if isinstance(value, recipe.Model) and member.attribute == "name":  # a Caffe net is identified by its digest
            yield name, held if value.net is None else None
            yield f"{key}.caffe_net", None if value.net is None else held
        elif isinstance(value, recipe.Model) and member.attribute == "net" and held is not None:
            yield recipe.NET if key == "model" else f"{key}.net", net_digest(held)
        elif member.kind is recipe.Source and member.repeated:  # the first has the name of the list
            yield name, held[0] if held else None
            yield from ((f"{name}.{other.name}", other) for other in held[1:])
        elif member.fields:
            yield name, _WORDS[member.attribute][held] if member.attribute in _WORDS else held


def net_digest(text: str) -> str:
    """Return the digest of a Caffe net in its canonical form."""
    return digest_of([("net", text)])


def leaves(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yield every field below a message, and its canonical text."""
    for name, held in members(value, key):
        if dataclasses.is_dataclass(held):
            yield from leaves(held, name)
        elif held != "" or not isinstance(value, recipe.Source):  # most have no name
            yield name, text(held)


def differing(a: Any, b: Any, key: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, value, value) of the differences between two values: a message that one lacks as a whole, else field by field."""
    if dataclasses.is_dataclass(a) and type(a) is type(b):
        before, now = dict(members(a, key)), dict(members(b, key))
        for name in before | now:
            yield from differing(before.get(name), now.get(name), name)
    elif a != b:
        yield key, a, b


def text(value: Any) -> str:
    """Return the one text for a value, as in `recipe.Stage.identity`."""
    if value is None:
        return NONE
    if isinstance(value, tuple):
        return f"[{', '.join(map(text, value))}]"
    if dataclasses.is_dataclass(value):
        # A message inside another is written with the dots of a path: shorter, and as `--why` takes it.
        texts = [f"{name[1:]}: {shown}" for name, shown in leaves(value, "") if shown not in (NONE, "[]")]
        return "{ " + " ".join(texts) + " }" if texts else "{ }"
    return str(value.value) if isinstance(value, enum.Enum) else literal(value)


def plain(value: Any) -> Any:
    """Return a value as JSON: numbers, texts, true and false, lists, objects; null if not set. Rates are finite."""
    if isinstance(value, tuple):
        return [plain(part) for part in value]
    if dataclasses.is_dataclass(value):
        return {name[1:]: plain(held) for name, held in members(value, "")}
    return value.value if isinstance(value, enum.Enum) else value


# -- fields of the language by name


def identity(key: str, lr_policy: str = "") -> bool:
    """Return whether snapshots depend on the field of that name, in a stage of that lr_policy."""
    fields = _fields(key)
    inside = fields[1:] if key.startswith("solver.") else fields
    counts = all(field is not None and tree.identity(field) for field in inside)
    return key == recipe.NET or (counts and is_read(key, lr_policy))


def is_read(key: str, lr_policy: str) -> bool:
    """Return whether the policy reads the field: `average_loss`, which Caffe's files have for the display with any policy."""
    return key != "solver.average_loss" or lr_policy == "plateau"


def omitted_default(key: str) -> str:
    """Return the default of a field that identities and the canonical form omit at its default; '' for other fields."""
    field = field_of(key)
    if field is None or not tree.quiet(field):
        return ""
    return NONE if field.is_repeated else default_text(field)


# Constant defaults that the .proto can't state.
_CONSTANT = {"warmup_iter": "0", "mean_value": "[0.0]", "std_value": "[1.0]"}


@cache
def default_text(field: FieldDescriptor) -> str:
    """Return the default of a field as in identities."""
    stated = tree.default(field)
    if stated is not None:
        return tree.canonical(stated, field)
    return _CONSTANT.get(field.name) or ("[]" if field.is_repeated else NONE)


def at_default(key: str, value: str) -> bool:
    """Return whether a field has its stated default, or nothing."""
    field = field_of(key)
    return field is None or value in (NONE, "[]", default_text(field))


def field_of(key: str) -> FieldDescriptor | None:
    """Return the field of that name; None if the language lacks it."""
    return _fields(key)[-1]


def _fields(key: str) -> list[FieldDescriptor | None]:
    """Return the fields along a name, ending with None for an unknown field."""
    kind: Descriptor | None = SCHEDULE
    path: list[FieldDescriptor | None] = []
    for word in key.split("."):
        field = kind.fields_by_name.get(word) if kind is not None else None
        path.append(field)
        if field is None:
            break
        kind = field.message_type  # None if it is not a message
    return path


def shown(key: str, value: str, stage: recipe.Stage) -> tuple[str, str]:
    """Return the value of a stage's field for people, durations also in epochs, and the text of the file if it is in
    another unit, else ''. A recipe from a snapshot only has the value."""
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
    """Return ` = 24.94 epochs` for a number of iterations of a stage or for knots, '' for other fields."""
    images, batch = stage.data.train.images, stage.solver.batch_size
    if field is None:
        return ""
    if field.name == "knot":
        knots = [f"{knot.iter * batch / images:.2f}" for knot in stage.solver.knot]
        return f" = at epochs {', '.join(knots)}" if knots else ""
    if not partner(field) or not value.isdecimal() or value == "0":
        return ""
    return f" = {epochs(int(value), images, batch):.2f} epochs"


# -- the canonical text


def canonical(schedule: recipe.Schedule) -> str:
    """Return the whole schedule as text, with defaults, durations in iterations, one block per stage. Equal schedules
    have equal texts on every machine with the folder at the same path. Values that are not set are left out."""
    return "\n".join(_lines(schedule)) + "\n"


def _lines(message: Any, shared: recipe.Data | None = None) -> Iterator[str]:
    """Yield the lines of a message. `shared`: the schedule's data, for a stage."""
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
    """The part of `recipe.Data` that a stage can override."""

    train: recipe.Source
    val: tuple[recipe.Source, ...]


def own_images(data: recipe.Data, shared: recipe.Data) -> StageData | None:
    """Return the images of a stage; None if they are the schedule's."""
    return None if (data.train, data.val) == (shared.train, shared.val) else StageData(data.train, data.val)


def digest(schedule: recipe.Schedule) -> str:
    """Return the sha256, in hex, of everything training depends on: the identities of the stages in running order,
    their parents, the parents' iterations, and teachers. Excludes names of stages, paths and reporting options."""
    position = {stage.name: number for number, stage in enumerate(schedule.stages)}
    made_from = [
        [
            None if stage.parent is None else position[stage.parent],
            sorted(stage.identity.items()),  # includes the iteration
            *([position[stage.solver.teacher]] if stage.solver.teacher is not None else []),
            *([position[s] for s, _ in schedule.ensemble(stage.average).points] if stage.average is not None else []),
        ]
        for stage in schedule.stages
    ]
    return hashlib.sha256(json.dumps(made_from, separators=(",", ":")).encode()).hexdigest()
