"""A file's contents as written: blocks of entries with their positions, not interpreted yet, or
read with their defaults (`View`); and the options of a field in the .proto."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, reduce
from typing import Any

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
    """A value; an enum value is its name. `text`: as written, '' for a block. `names`: the positions of a function's arguments."""

    value: "Scalar | Block"
    text: str
    span: Span
    names: Mapping[str, Span] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class Entry:
    """A written field: one value, or for a repeated field all of them, in order."""

    field: FieldDescriptor
    name: Span
    values: tuple[Value, ...]

    @property
    def place(self) -> Span:
        """Return where to show a mistake in the value: the value, or the name of a block."""
        return self.values[0].span if self.values and not is_message(self.field) else self.name


@dataclass(frozen=True, slots=True)
class Block:
    """A message. `doubtful`: fields that are written but could not be read, so that their values are unknown; in a
    `broken` block (its end is missing) every missing field is doubtful. `layers`: the positions of a stage's settings
    with their layer: "stage" for its file or `solver_param`, "sweep". Other settings are inherited, or from `--set`."""

    kind: Descriptor
    place: Span
    entries: Mapping[str, Entry] = field(default_factory=dict)
    doubtful: frozenset[str] = frozenset()
    broken: bool = False
    layers: Mapping[Span, str] = field(default_factory=dict)

    def block(self, name: str) -> "Block | None":
        """Return the message in a singular field."""
        return next(self.blocks(name), None)

    def blocks(self, name: str) -> "Iterator[Block]":
        """Yield the messages in a field."""
        entry = self.entries.get(name)
        for value in entry.values if entry else ():
            if isinstance(value.value, Block):
                yield value.value

    def text(self, name: str) -> str | None:
        """Return the text in a singular field; None if it isn't written."""
        value = self.entries[name].values[0].value if name in self.entries else None
        return value if isinstance(value, str) else None

    def changed(self, name: str, change: "Callable[[Block], Block]") -> "Block":
        """Return the message with each message in a field changed."""
        entry = self.entries.get(name)
        if entry is None:
            return self
        values = [replace(v, value=change(v.value)) if isinstance(v.value, Block) else v for v in entry.values]
        return replace(self, entries={**self.entries, name: replace(entry, values=tuple(values))})

    def walk(self) -> "Iterator[tuple[Block, Entry]]":
        """Yield every entry of this block and of the blocks in it, with its block."""
        for name, entry in self.entries.items():
            yield self, entry
            for inner in self.blocks(name) if is_message(entry.field) else ():
                yield from inner.walk()


# -- the options of the .proto, cached by field: a schedule of hundreds of stages looks them up a million times


@cache
def is_message(field: FieldDescriptor) -> bool:
    return bool(field.type == FieldDescriptor.TYPE_MESSAGE)


@cache
def identity(field: FieldDescriptor) -> bool:
    """Return whether a change of the field makes snapshots stale."""
    return bool(field.GetOptions().Extensions[stagerun_pb2.identity])


@cache
def quiet(field: FieldDescriptor) -> bool:
    """Return whether identities and the canonical form omit the field at its default."""
    return bool(field.GetOptions().Extensions[stagerun_pb2.quiet])


@cache
def retired(field: FieldDescriptor) -> str:
    """Return what to write instead of a retired field; '' for other fields."""
    return str(field.GetOptions().Extensions[stagerun_pb2.retired])


@cache
def takes_arguments(field: FieldDescriptor) -> bool:
    """Return whether the field is `{ name: value ... }` with any names."""
    return bool(field.GetOptions().Extensions[stagerun_pb2.arguments])


def retired_value(value: EnumValueDescriptor) -> str:
    """Return what to write instead of a retired enum value; '' for other values."""
    return str(value.GetOptions().Extensions[stagerun_pb2.retired_value])


def fields(kind: Descriptor) -> list[FieldDescriptor]:
    """Return the fields of a message that schedules can set, in the order of the .proto."""
    return [field for field in kind.fields if not retired(field)]


def canonical(value: Scalar, field: FieldDescriptor) -> str:
    """Return the one text for a value, however it was written."""
    if field.enum_type is not None:
        return str(value)
    return literal(float(value) + 0.0 if field.type == FieldDescriptor.TYPE_DOUBLE else value)  # -0.0 is 0.0


def literal(value: Scalar | tuple[Scalar, ...]) -> str:
    """Return a value or a list in the text format."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(literal, value))}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    return quoted(value) if isinstance(value, str) else repr(value)


def quoted(text: str) -> str:
    r"""Return a string literal of the text format, with \ooo for unprintable characters."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else "".join(f"\\{b:03o}" for b in c.encode()) for c in escaped) + '"'


def seen_by(settings: Block, schedule: Block) -> Block:
    """Return the Schedule as the stage of these settings sees it, with the stage's network and images if it has any. Unreadable fields are
    doubtful."""
    seen = _replaced(schedule, settings, ("model", "data"))
    data, shared = settings.block("data"), schedule.block("data")
    if data is not None and shared is not None:
        both = _replaced(shared, data, ("train", "val"))
        return seen.changed("data", lambda _: both)
    return seen


def _replaced(shared: Block, other: Block, names: Iterable[str]) -> Block:
    """Return a message with the fields `names` of another one, as far as it has them."""
    changed = {name: other.entries[name] for name in names if name in other.entries}
    unknown = {name for name in names if name in other.doubtful or other.broken} - changed.keys()
    if not changed and not unknown:
        return shared
    entries = {name: entry for name, entry in shared.entries.items() if name not in unknown} | changed
    return replace(shared, entries=entries, doubtful=(shared.doubtful - changed.keys()) | unknown)


# -- read with defaults


class Doubtful(Exception):
    """The field could not be read, which has been reported: skip checks that need it."""


@dataclass(frozen=True, slots=True)
class View:
    """A Block read with its defaults. Methods raise Doubtful for a field that could not be read."""

    block: Block

    def has(self, name: str) -> bool:
        """Return whether the field is written. Doubtful if that is unknown."""
        if name in self.block.entries:
            return True
        if self.block.broken or name in self.block.doubtful:
            raise Doubtful(name)
        return False

    def scalar(self, name: str) -> Scalar | None:
        """Return the value, else the default of the .proto, else None."""
        if self.has(name):
            value = self.block.entries[name].values[0].value
            assert not isinstance(value, Block)
            return value
        return default(self.block.kind.fields_by_name[name])

    def asks(self, name: str) -> bool:
        """Return whether the field has an effect: a written message, or a value other than false, 0 and empty."""
        field = self.block.kind.fields_by_name[name]
        if field.message_type or field.is_repeated:
            return self.has(name) and bool(self.block.entries[name].values)
        return bool(self.scalar(name))

    def known(self, *path: str) -> Any:
        """Return the value of a field inside messages; None if it isn't written or could not be read."""
        *around, name = path
        with suppress(Doubtful):
            return reduce(View.inside, around, self).scalar(name)
        return None

    def number(self, name: str) -> float | None:
        value = self.scalar(name)
        return float(value) if value is not None and not isinstance(value, str) else None

    def whole(self, name: str) -> int | None:
        value = self.scalar(name)
        return value if isinstance(value, int) else None

    def text(self, name: str) -> str | None:
        value = self.scalar(name)
        return value if isinstance(value, str) else None

    def flag(self, name: str) -> bool:
        return self.scalar(name) is True

    def numbers(self, name: str) -> tuple[float, ...]:
        """Return the values of a repeated field of numbers."""
        values = self.block.entries[name].values if self.has(name) else ()
        return tuple(v.value for v in values if isinstance(v.value, int | float))

    def texts(self, name: str) -> tuple[str, ...]:
        """Return the values of a repeated field of texts or enum values."""
        values = self.block.entries[name].values if self.has(name) else ()
        return tuple(v.value for v in values if isinstance(v.value, str))

    def view(self, name: str) -> "View | None":
        block = self.block.block(name) if self.has(name) else None
        return View(block) if block else None

    def inside(self, name: str) -> "View":
        """Return a message whose fields all have defaults, written or not."""
        return self.view(name) or View(Block(self.block.kind.fields_by_name[name].message_type, self.block.place))

    def views(self, name: str) -> "Iterator[View]":
        self.has(name)
        return (View(b) for b in self.block.blocks(name))

    def written(self, name: str) -> str:
        """Return a duration as written: `max_epoch: 5`, or `max_iter: 780`."""
        text = self.block.entries[name].values[0].text
        return text if ":" in text else f"{name}: {text}"

    def origin(self, name: str) -> str:
        """Return a duration as written, and where: "`max_epoch: 5` in a.prototxt:3"."""
        span = self.block.entries[name].place
        return f"`{self.written(name)}` in {span.path}:{span.line}"

    def place(self, name: str) -> Span:
        """Return the span of the value; if the field isn't written, the span of its block."""
        entry = self.block.entries.get(name)
        return entry.place if entry else self.block.place
