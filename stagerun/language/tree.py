"""What a file says, as written: blocks of entries with their places. Values; no meaning yet. And what the .proto says of a field."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache

from google.protobuf.descriptor import Descriptor, EnumValueDescriptor, FieldDescriptor

from stagerun.base.errors import Span
from stagerun.base.proto import default as default
from stagerun.base.proto import stagerun_pb2

Scalar = bool | int | float | str

SCHEDULE: Descriptor = stagerun_pb2.Schedule.DESCRIPTOR
SOLVER: Descriptor = stagerun_pb2.Solver.DESCRIPTOR
SOURCE: Descriptor = stagerun_pb2.Source.DESCRIPTOR


@dataclass(frozen=True, slots=True)
class Value:
    """One value. An enum's is its name. `text` is how it is written, '' for a block. `names`: the places of the arguments that a function
    is called with."""

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
        return next(self.blocks(name), None)

    def blocks(self, name: str) -> "Iterator[Block]":
        """The messages in a field."""
        entry = self.entries.get(name)
        for value in entry.values if entry else ():
            if isinstance(value.value, Block):
                yield value.value

    def text(self, name: str) -> str | None:
        """The text in a singular field; None where it isn't written."""
        value = self.entries[name].values[0].value if name in self.entries else None
        return value if isinstance(value, str) else None

    def changed(self, name: str, change: "Callable[[Block], Block]") -> "Block":
        """The message with each message in a field changed."""
        entry = self.entries.get(name)
        if entry is None:
            return self
        values = [replace(v, value=change(v.value)) if isinstance(v.value, Block) else v for v in entry.values]
        return replace(self, entries={**self.entries, name: replace(entry, values=tuple(values))})

    def walk(self) -> "Iterator[tuple[Block, Entry]]":
        """Every entry of this block and of the blocks in it, with the block it stands in."""
        for name, entry in self.entries.items():
            yield self, entry
            for inner in self.blocks(name) if is_message(entry.field) else ():
                yield from inner.walk()


# -- the options of the .proto, each looked up once for each field: a schedule of hundreds of stages asks a million times


@cache
def is_message(field: FieldDescriptor) -> bool:
    return bool(field.type == FieldDescriptor.TYPE_MESSAGE)


@cache
def identity(field: FieldDescriptor) -> bool:
    """Whether a change of the field makes snapshots stale."""
    return bool(field.GetOptions().Extensions[stagerun_pb2.identity])


@cache
def quiet(field: FieldDescriptor) -> bool:
    """Whether identities and the canonical form leave the field out at its default."""
    return bool(field.GetOptions().Extensions[stagerun_pb2.quiet])


@cache
def retired(field: FieldDescriptor) -> str:
    """What to write instead of a field that schedules can't set any more; '' for every other field."""
    return str(field.GetOptions().Extensions[stagerun_pb2.retired])


@cache
def takes_arguments(field: FieldDescriptor) -> bool:
    """Whether the field is `{ name: value ... }` with any names."""
    return bool(field.GetOptions().Extensions[stagerun_pb2.arguments])


def retired_value(value: EnumValueDescriptor) -> str:
    """What to write instead of a value of an enum; '' for every other value."""
    return str(value.GetOptions().Extensions[stagerun_pb2.retired_value])


def fields(kind: Descriptor) -> list[FieldDescriptor]:
    """Fields of a message that schedules can set, in the order of the .proto."""
    return [field for field in kind.fields if not retired(field)]


def canonical(value: Scalar, field: FieldDescriptor) -> str:
    """One text for one value, whichever way it was written."""
    if field.enum_type is not None:
        return str(value)
    return literal(float(value) + 0.0 if field.type == FieldDescriptor.TYPE_DOUBLE else value)  # -0.0 is 0.0


def literal(value: Scalar | tuple[Scalar, ...]) -> str:
    """A value in the text format, or a list of them."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(literal, value))}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    return quoted(value) if isinstance(value, str) else repr(value)


def quoted(text: str) -> str:
    r"""A string literal of the text format: \ooo for what doesn't print."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else "".join(f"\\{b:03o}" for b in c.encode()) for c in escaped) + '"'


def seen_by(settings: Block, schedule: Block) -> Block:
    """The Schedule as the stage of these settings has it: with a network and images of its own in place of those that all share. What
    could not be read of the stage's is doubtful."""
    seen = _replaced(schedule, settings, ("model", "data"))
    data, shared = settings.block("data"), schedule.block("data")
    if data is not None and shared is not None:
        both = _replaced(shared, data, ("train", "val"))
        return seen.changed("data", lambda _: both)
    return seen


def _replaced(shared: Block, own: Block, names: Iterable[str]) -> Block:
    """A message with some fields of another one, as far as that has them."""
    found = {name: own.entries[name] for name in names if name in own.entries}
    unknown = {name for name in names if name in own.doubtful or own.broken} - found.keys()
    if not found and not unknown:
        return shared
    entries = {name: entry for name, entry in shared.entries.items() if name not in unknown} | found
    return replace(shared, entries=entries, doubtful=(shared.doubtful - found.keys()) | unknown)
