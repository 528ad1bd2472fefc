"""Inheritance: what a stage's settings are, from the layers that set them. Pure.

Layers are, from the lowest: `Schedule.solver`, `--set solver.FIELD=...`, the stage's own file or `solver_param`, its entry in `sweep`,
`--set STAGE.FIELD=...`. They merge as protobuf messages do: a message merges field by field into the inherited one, and any other
field, a repeated one too, replaces it. `clear` takes inherited fields away first. If two fields say the same thing in different units,
the one in the higher layer replaces the other.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from stagerun.base import units
from stagerun.base.errors import Problems, Span, nearest
from stagerun.base.proto.stagerun_pb2 import epochs_of
from stagerun.language.lexer import INT64_MAX
from stagerun.language.tree import SOLVER, Block, Entry, Value, fields, is_message
from stagerun.language.view import View


@cache
def is_twin(field: FieldDescriptor) -> bool:
    """Whether the field is another one in epochs."""
    return bool(field.GetOptions().HasExtension(epochs_of))


EPOCH = "epoch"
_KNOT = SOLVER.fields_by_name["knot"].message_type
SET = "--set"  # the path of a place in an argument
LMDB = "LMDB"  # that of a value which was read from the LMDB itself
NET = "net"  # the layer of what a net of Caffe's says


@cache
def pairs(kind: Descriptor) -> Mapping[str, str]:
    """The fields of a message that are resolved into another one: those in epochs, and `net`."""
    found = {field.name: field.GetOptions().Extensions[epochs_of] for field in kind.fields if is_twin(field)}
    return {**found, "net": "model"} if kind is SOLVER else found


@cache
def partner(field: FieldDescriptor) -> str:
    """The field of the same message that says the same thing in another unit, or ''."""
    found = pairs(field.containing_type)
    return found.get(field.name) or next((name for name in found if found[name] == field.name), "")


def merge(layers: Sequence[Block]) -> Block:
    """Return the settings that the layers, lowest first, come to; `clear` of them is what took nothing away. `check_layers` finds mistakes in
    `clear` and in pairs."""
    merged = Block(SOLVER, layers[-1].place)
    for layer in layers:
        merged = _merged(merged, layer)
    return merged


def _merged(base: Block, layer: Block) -> Block:
    clear = layer.entries.get("clear")
    for value in clear.values if clear else ():
        before, base = base, _without(base, str(value.value).split("."))
        if clear and base == before:
            idle = base.entries.get("clear", replace(clear, values=()))
            base = replace(base, entries={**base.entries, "clear": replace(idle, values=(*idle.values, value))})
    entries, doubtful = dict(base.entries), set(base.doubtful)
    for name in dict.fromkeys((*layer.entries, *sorted(layer.doubtful))):
        if name == "clear":
            continue
        field = layer.kind.fields_by_name.get(name)
        other = partner(field) if field is not None else ""
        entries.pop(other, None)
        entries.pop(name, None)
        entry = layer.entries.get(name)
        doubtful -= {name, other}
        if entry is not None:
            inner = None if entry.field.is_repeated else layer.block(name)
            inherited = base.block(name) if inner else None
            entries[name] = _holding(entry, _merged(inherited, inner)) if inherited and inner else entry
        if name in layer.doubtful or other in layer.entries:
            doubtful |= {name, *([other] if other else [])}
    return Block(layer.kind, layer.place, entries, frozenset(doubtful), base.broken or layer.broken)


def _holding(entry: Entry, block: Block) -> Entry:
    """The entry of a message with another block in it, the first of a list."""
    first, *others = entry.values
    return replace(entry, values=(replace(first, value=block), *others))


def _without(block: Block, path: Sequence[str]) -> Block:
    """The block without the field that `path` leads to."""
    name, *rest = path
    entries, inner = dict(block.entries), block.block(name)
    if not rest:
        entries.pop(name, None)
        return replace(block, entries=entries, doubtful=block.doubtful - {name})
    if inner is not None and not entries[name].field.is_repeated:
        entries[name] = _holding(entries[name], _without(inner, rest))
    return replace(block, entries=entries)


def check_layers(layers: Sequence[Block], problems: Problems) -> None:
    """Both of a pair in one layer, and `clear` of something that is not a field, stands in the same layer, or is not inherited."""
    for number, layer in enumerate(layers):
        for second, first in pairs(SOLVER).items():
            if first in layer.entries and second in layer.entries:
                _same_thing(layer.entries[first], layer.entries[second], problems)
        entry = layer.entries.get("clear")
        for value in entry.values if entry else ():
            _check_clear(str(value.value), value, layer, layers[:number], problems)


def _same_thing(first: Entry, second: Entry, problems: Problems) -> None:
    earlier, later = sorted((first, second), key=lambda entry: entry.name)
    message = f"`{later.field.name}` and `{earlier.field.name}` say the same thing"
    problems.add(later.name, message, f"keep one of them; the other stands in line {earlier.name.line}")


def _check_clear(path: str, value: Value, layer: Block, below: Sequence[Block], problems: Problems) -> None:
    kind, field, entry = SOLVER, None, None
    own: Block | None = layer
    for word in path.split("."):
        if kind is None or (field is not None and field.is_repeated):
            problems.add(value.span, f"`clear` names `{path}`, and `{field.name if field else ''}` has no such field")
            return
        field = kind.fields_by_name.get(word)
        if field is None or path == "clear":
            message = f"`clear` names `{path}`, which is not a field of {kind.name}"
            inside = [
                f"{f.name}.{word}" for f in fields(kind) if is_message(f) and word in f.message_type.fields_by_name
            ]
            hint = f"write `{inside[0]}`" if inside else nearest(word, [other.name for other in fields(kind)])
            problems.add(value.span, message, hint)
            return
        kind = field.message_type
        entry = own.entries.get(word) if own else None
        own = own.block(word) if own else None
    assert field is not None
    other = partner(field)
    if entry and not is_message(entry.field):
        hint = f"it is set in line {entry.name.line}; take one of them out"
        problems.add(value.span, f"`{path}` is cleared and set in one place", hint)
    elif not below:
        message = "`clear` takes away what is inherited, and here nothing is"
        problems.add(value.span, message, "write it in a stage's file")
    elif other and not any(b.broken or path in b.doubtful for b in below):
        inherited = merge(below).entries
        if path not in inherited and other in inherited:
            problems.add(value.span, f"`{path}` is not inherited, but `{other}` is", f'write `clear: "{other}"`')


def edit(base: Block, path: Sequence[str], leaf: Block) -> Block:
    """`base` with the entries of `leaf` put into the message that `path` leads to, which is made if it is not there; of a list into the first."""
    if not path:
        return replace(_merged(base, leaf), place=base.place)
    name, *rest = path
    field = base.kind.fields_by_name[name]
    inner = base.block(name)
    made = Block(field.message_type, leaf.place)
    entry = base.entries[name] if inner is not None else Entry(field, leaf.place, (Value(made, "", leaf.place),))
    entries = {**base.entries, name: _holding(entry, edit(inner or made, rest, leaf))}
    return replace(base, entries=entries, doubtful=base.doubtful - {name})


# -- durations in epochs


def in_iterations(block: Block, images: int | None, problems: Problems) -> Block:
    """The settings with every duration in iterations, still at the place where it was written. `images` (of an epoch) is None where it isn't known; what depends on it is doubtful then."""
    batch = View(block).known("batch_size")

    def count(measure: Callable[[float, int, int], Any], epochs: Value, name: str) -> Any:
        if images is None or batch is None:
            return None
        assert isinstance(epochs.value, int | float)
        # 0 epochs mean what 0 iterations mean (none), and not the one iteration that a short duration is rounded up to.
        found = measure(epochs.value, images, batch) if epochs.value else 0
        if found > INT64_MAX:
            problems.add(epochs.span, f"`{name}` is more iterations than 64 bits can count")
            return None
        return int(found) if found.denominator == 1 else float(found)

    def below(block: Block) -> Block:
        iterations = pairs(block.kind)
        doubtful = block.doubtful | {iterations[name] for name in iterations if name in block.doubtful}
        if block.kind is _KNOT and not block.broken and not doubtful:
            doubtful |= _missing_in_knot(block, problems)
        measure = units.exact if block.kind is _KNOT else units.iterations  # a knot is at no whole one in general
        entries = {}
        for name, entry in block.entries.items():
            if name in iterations:
                field = block.kind.fields_by_name[iterations[name]]
                if field.name in block.entries and block.kind is not SOLVER:  # that `check_layers` looks at
                    _same_thing(block.entries[field.name], entry, problems)
                counted = ((count(measure, value, name), value) for value in entry.values)
                values = [Value(n, f"{name}: {value.text}", value.span) for n, value in counted if n is not None]
                if len(values) == len(entry.values):
                    entries[field.name] = Entry(field, entry.name, tuple(values))
                else:
                    doubtful |= {field.name}
            else:
                entries[name] = entry
        counted_block = replace(block, entries=entries, doubtful=doubtful)
        for name, entry in entries.items():
            if is_message(entry.field) and pairs(entry.field.message_type):
                counted_block = counted_block.changed(name, below)
        return counted_block

    return below(block)


def _missing_in_knot(block: Block, problems: Problems) -> set[str]:
    missing = {"factor", "iter"} - block.entries.keys()
    if EPOCH in block.entries:
        missing -= {"iter"}
    if "factor" in missing:
        problems.add(block.place, "Knot lacks `factor`", "write `factor: 1` for base_lr itself, say")
    elif missing:
        problems.add(block.place, "Knot lacks `iter` or `epoch`", "write `epoch: 5` or `iter: 1000`, say")
    return missing


def divisors(number: int, near: int) -> str:
    """The divisors of `number` next to `near`, as a hint; nothing where the search would be long."""
    if number > 10_000_000:
        return ""
    found = [d for d in range(1, min(number, 100_000) + 1) if number % d == 0]
    both = [d for d in found if d < near][-1:] + [d for d in found if d > near][:1]
    return f"{' or '.join(map(str, both))} would" if both else ""


def layer_of(span: Span | None, schedule: str) -> str:
    """Which layer a place belongs to: `default`, `schedule`, `stage`, `--set` or `LMDB`."""
    if span is None:
        return "default"
    if span.path in (SET, LMDB):
        return span.path
    return "schedule" if span.path == schedule else "stage"


def higher(view: View, first: str, second: str) -> Span:
    """Where to point when two values don't fit: at the one in the higher layer, at `first` if they share it."""

    def height(place: Span) -> int:
        return 3 if place.path == SET else {"stage": 1, "sweep": 2}.get(view.block.own.get(place, ""), 0)

    a, b = view.place(first), view.place(second)
    return b if height(b) > height(a) else a
