"""Inheritance: the merge of a stage's settings from their layers. Pure.

Layers are, from the lowest: `Schedule.solver`, `--set solver.FIELD=...`, the stage's file or `solver_param`, its entry in `sweep`,
`--set STAGE.FIELD=...`. They merge as protobuf messages do: a message merges field by field into the inherited one, and any other
field, even a repeated one, replaces it. `clear` first removes inherited fields. If two fields set the same thing in different units, the
one in the higher layer replaces the other.
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
from stagerun.language.tree import SOLVER, Block, Entry, Value, View, fields, is_message


@cache
def is_twin(field: FieldDescriptor) -> bool:
    """Return whether the field is another field's twin in epochs."""
    return bool(field.GetOptions().HasExtension(epochs_of))


EPOCH = "epoch"
_KNOT = SOLVER.fields_by_name["knot"].message_type
SET = "--set"  # the path of a span in an argument
LMDB = "LMDB"  # the path of a value read from an LMDB
NET = "net"  # the layer of settings from a Caffe net


@cache
def pairs(kind: Descriptor) -> Mapping[str, str]:
    """Return the fields of a message that resolve to another field, with that field: the twins in epochs, and `net`."""
    twins = {field.name: field.GetOptions().Extensions[epochs_of] for field in kind.fields if is_twin(field)}
    return {**twins, "net": "model"} if kind is SOLVER else twins


@cache
def partner(field: FieldDescriptor) -> str:
    """Return the field of the same message that sets the same thing in another unit, or ''."""
    twins = pairs(field.containing_type)
    return twins.get(field.name) or next((name for name in twins if twins[name] == field.name), "")


def merge(layers: Sequence[Block]) -> Block:
    """Merge the layers, lowest first; the result's `clear` has the paths that removed nothing. `check_layers` reports mistakes in `clear` and
    in pairs."""
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
    """Return the entry of a message with another block in place of its first."""
    first, *others = entry.values
    return replace(entry, values=(replace(first, value=block), *others))


def _without(block: Block, path: Sequence[str]) -> Block:
    """Return the block without the field at `path`."""
    name, *rest = path
    entries, inner = dict(block.entries), block.block(name)
    if not rest:
        entries.pop(name, None)
        return replace(block, entries=entries, doubtful=block.doubtful - {name})
    if inner is not None and not entries[name].field.is_repeated:
        entries[name] = _holding(entries[name], _without(inner, rest))
    return replace(block, entries=entries)


def check_layers(layers: Sequence[Block], problems: Problems) -> None:
    """Report both fields of a pair in one layer, and `clear` of a path that is not a field, is set in the same layer, or is not inherited."""
    for number, layer in enumerate(layers):
        for second, first in pairs(SOLVER).items():
            if first in layer.entries and second in layer.entries:
                _same_thing(layer.entries[first], layer.entries[second], problems)
        entry = layer.entries.get("clear")
        for value in entry.values if entry else ():
            _check_clear(str(value.value), value, layer, layers[:number], problems)


def _same_thing(first: Entry, second: Entry, problems: Problems) -> None:
    earlier, later = sorted((first, second), key=lambda entry: entry.name)
    message = f"`{later.field.name}` and `{earlier.field.name}` set the same thing"
    problems.add(later.name, message, f"keep one of them; the other is in line {earlier.name.line}")


def _check_clear(path: str, value: Value, layer: Block, below: Sequence[Block], problems: Problems) -> None:
    kind, field, entry = SOLVER, None, None
    holder: Block | None = layer
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
        entry = holder.entries.get(word) if holder else None
        holder = holder.block(word) if holder else None
    assert field is not None
    other = partner(field)
    if entry and not is_message(entry.field):
        hint = f"it is set in line {entry.name.line}; take one of them out"
        problems.add(value.span, f"`{path}` is cleared and set in one file", hint)
    elif not below:
        message = "`clear` removes inherited fields, and here nothing is inherited"
        problems.add(value.span, message, "write it in a stage's file")
    elif other and not any(b.broken or path in b.doubtful for b in below):
        inherited = merge(below).entries
        if path not in inherited and other in inherited:
            problems.add(value.span, f"`{path}` is not inherited, but `{other}` is", f'write `clear: "{other}"`')


def edit(base: Block, path: Sequence[str], leaf: Block) -> Block:
    """Return `base` with the entries of `leaf` merged into the message at `path`, made if missing; in a list into the first."""
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
    """Return the settings with every duration in iterations, at its position as written. `images`: of an epoch; if None, durations in epochs
    are doubtful."""
    batch = View(block).known("batch_size")

    def count(measure: Callable[[float, int, int], Any], epochs: Value, name: str) -> Any:
        if images is None or batch is None:
            return None
        assert isinstance(epochs.value, int | float)
        # 0 epochs are 0 iterations, and not the one iteration that a short duration is rounded up to.
        iterations = measure(epochs.value, images, batch) if epochs.value else 0
        if iterations > INT64_MAX:
            problems.add(epochs.span, f"`{name}` is more iterations than 64 bits can count")
            return None
        return int(iterations) if iterations.denominator == 1 else float(iterations)

    def below(block: Block) -> Block:
        iterations = pairs(block.kind)
        doubtful = block.doubtful | {iterations[name] for name in iterations if name in block.doubtful}
        if block.kind is _KNOT and not block.broken and not doubtful:
            doubtful |= _missing_in_knot(block, problems)
        measure = units.exact if block.kind is _KNOT else units.iterations  # a knot may be between two iterations
        entries = {}
        for name, entry in block.entries.items():
            if name in iterations:
                field = block.kind.fields_by_name[iterations[name]]
                if field.name in block.entries and block.kind is not SOLVER:  # which `check_layers` checks
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
        problems.add(block.place, "Knot lacks `factor`", "for example, write `factor: 1` for base_lr itself")
    elif missing:
        problems.add(block.place, "Knot lacks `iter` or `epoch`", "for example, write `epoch: 5` or `iter: 1000`")
    return missing


def divisors(number: int, near: int) -> str:
    """Return the divisors of `number` next to `near`, as a hint; '' if the search would be long."""
    if number > 10_000_000:
        return ""
    fitting = [d for d in range(1, min(number, 100_000) + 1) if number % d == 0]
    both = [d for d in fitting if d < near][-1:] + [d for d in fitting if d > near][:1]
    return f"{' or '.join(map(str, both))} would" if both else ""


def layer_of(span: Span | None, schedule: str) -> str:
    """Return the layer of a span: `default`, `schedule`, `stage`, `--set` or `LMDB`."""
    if span is None:
        return "default"
    if span.path in (SET, LMDB):
        return span.path
    return "schedule" if span.path == schedule else "stage"


def higher(view: View, first: str, second: str) -> Span:
    """Return the span of the value in the higher layer, of `first` if both share it, for a message about a conflict."""

    def height(span: Span) -> int:
        return 3 if span.path == SET else {"stage": 1, "sweep": 2}.get(view.block.layers.get(span, ""), 0)

    a, b = view.place(first), view.place(second)
    return b if height(b) > height(a) else a
