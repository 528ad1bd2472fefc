"""What a file says, as written: blocks of entries with their places. Values; no meaning yet."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from google.protobuf.descriptor import Descriptor, EnumValueDescriptor, FieldDescriptor

from stagerun.base.errors import Span
from stagerun.language.proto import stagerun_pb2

Scalar = bool | int | float | str
MESSAGE = FieldDescriptor.TYPE_MESSAGE

SCHEDULE: Descriptor = stagerun_pb2.Schedule.DESCRIPTOR
SOLVER: Descriptor = stagerun_pb2.Solver.DESCRIPTOR
SOURCE: Descriptor = stagerun_pb2.Source.DESCRIPTOR


@dataclass(frozen=True, slots=True)
class Value:
    """One value. An enum's is its name. `text` is how it is written, '' for a block. `names`: where each of the arguments stands that
    a function is called with."""

    value: "Scalar | Block"
    text: str
    span: Span
    names: Mapping[str, Span] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class Entry:
    """A field that is written: one value, or for a repeated field all of them, in order."""

    field: FieldDescriptor
    name: Span
    values: tuple[Value, ...]

    @property
    def place(self) -> Span:
        """Where a mistake in the value is shown: the value, or the name of a block."""
        return self.values[0].span if self.values and not is_message(self.field) else self.name


@dataclass(frozen=True, slots=True)
class Block:
    """A message. `doubtful` are fields that someone tried to write and that could not be read, so that nothing is known
    of them; in a `broken` block (its end is missing) that holds for every field that is not there. `own` has the places of
    a stage's own settings with the layer of each: "stage" for its file or `solver_param`, "sweep". Others are inherited, or of `--set`.
    """

    kind: Descriptor
    place: Span
    entries: Mapping[str, Entry] = field(default_factory=dict)
    doubtful: frozenset[str] = frozenset()
    broken: bool = False
    own: Mapping[Span, str] = field(default_factory=dict)

    def block(self, name: str) -> "Block | None":
        """The message in a singular field."""
        entry = self.entries.get(name)
        value = entry.values[0].value if entry else None
        return value if isinstance(value, Block) else None

    def blocks(self, name: str) -> "Iterator[Block]":
        """The messages in a field."""
        entry = self.entries.get(name)
        for value in entry.values if entry else ():
            if isinstance(value.value, Block):
                yield value.value

    def walk(self) -> "Iterator[tuple[Block, Entry]]":
        """Every entry of this block and of the blocks in it, with the block it stands in."""
        for name, entry in self.entries.items():
            yield self, entry
            for inner in self.blocks(name):
                yield from inner.walk()


def is_message(field: FieldDescriptor) -> bool:
    return bool(field.type == MESSAGE)


def identity(field: FieldDescriptor) -> bool:
    """Whether a change of the field makes snapshots stale."""
    return bool(field.GetOptions().Extensions[stagerun_pb2.identity])


def quiet(field: FieldDescriptor) -> bool:
    """Whether identities and the canonical form leave the field out at its default."""
    return bool(field.GetOptions().Extensions[stagerun_pb2.quiet])


def retired(field: FieldDescriptor) -> str:
    """What to write instead of a field that schedules can't set any more; '' for every other field."""
    return str(field.GetOptions().Extensions[stagerun_pb2.retired])


def retired_value(value: EnumValueDescriptor) -> str:
    """The same of one value of an enum."""
    return str(value.GetOptions().Extensions[stagerun_pb2.retired_value])


def fields(kind: Descriptor) -> list[FieldDescriptor]:
    """Fields of a message that schedules can set, in the order of the .proto."""
    return [field for field in kind.fields if not retired(field)]


def default(field: FieldDescriptor) -> Scalar | None:
    """The default that the .proto states: an enum's by name, None where there is none."""
    if not field.has_default_value:
        return None
    if field.enum_type is not None:
        return str(field.enum_type.values_by_number[field.default_value].name)
    value: Scalar = field.default_value
    return value


def canonical(value: Scalar, field: FieldDescriptor) -> str:
    """One text for one value, whichever way it was written."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if field.enum_type is not None:
        return str(value)
    if isinstance(value, str):
        return quoted(value)
    if field.type == FieldDescriptor.TYPE_DOUBLE:
        return repr(float(value) + 0.0)  # -0.0 is 0.0
    return str(value)


def quoted(text: str) -> str:
    r"""A string literal of the text format: \ooo for what doesn't print."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else "".join(f"\\{b:03o}" for b in c.encode()) for c in escaped) + '"'
