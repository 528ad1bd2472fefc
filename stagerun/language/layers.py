"""Inheritance: what a stage's settings are, from the layers that set them. Pure.

Layers are, from the lowest: `Schedule.solver`, `--set solver.FIELD=...`, the stage's own file or `solver_param`, its entry in `sweep`,
`--set STAGE.FIELD=...`. They merge as protobuf messages do: a message merges field by field into the inherited one, and any other
field, a repeated one too, replaces it. `clear` takes inherited fields away first. If two fields say the same thing in different units,
the one in the higher layer replaces the other.
"""

from collections.abc import Sequence
from dataclasses import replace

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from stagerun.base import units
from stagerun.base.errors import Problems, Span, nearest
from stagerun.language.lexer import INT64_MAX
from stagerun.language.proto.stagerun_pb2 import epochs_of
from stagerun.language.tree import SOLVER, Block, Entry, Value, fields, is_message
from stagerun.language.view import Doubtful, View


def durations(kind: Descriptor) -> tuple[tuple[str, str], ...]:
    """(in iterations, in epochs) of a message."""
    return tuple((field.GetOptions().Extensions[epochs_of], field.name) for field in kind.fields if is_twin(field))


def is_twin(field: FieldDescriptor) -> bool:
    """Whether the field is another one in epochs."""
    return bool(field.GetOptions().HasExtension(epochs_of))


DURATIONS = durations(SOLVER)
PAIRS = (*DURATIONS, ("model", "net"))
# The messages of Solver in which durations stand.
INSIDE = tuple(field.name for field in SOLVER.fields if is_message(field) and durations(field.message_type))
EPOCH = "epoch"
SET = "--set"  # the path of a place in an argument
LMDB = "LMDB"  # that of a value which was read from the LMDB itself
NET = "net"  # the layer of what a net of Caffe's says
PARTNER = dict(PAIRS) | {b: a for a, b in PAIRS}


def pairs(kind: Descriptor) -> tuple[tuple[str, str], ...]:
    """(field, the same in another unit) of a message."""
    return PAIRS if kind is SOLVER else durations(kind)


def partner(field: FieldDescriptor) -> str:
    """The field of the same message that says the same thing in another unit, or ''."""
    found = pairs(field.containing_type)
    return (dict(found) | {b: a for a, b in found}).get(field.name, "")


def merge(layers: Sequence[Block]) -> Block:
    """Return the settings that the layers, lowest first, come to. `check_layers` finds mistakes in `clear` and in pairs."""
    merged = Block(SOLVER, layers[-1].place)
    for layer in layers:
        merged = _merged(merged, layer)
    return merged


def _merged(base: Block, layer: Block) -> Block:
    for path in cleared(layer):
        base = _without(base, path.split("."))
    entries, doubtful = dict(base.entries), set(base.doubtful)
    for name in dict.fromkeys((*layer.entries, *sorted(layer.doubtful))):
        if name == "clear":
            continue
        field = layer.kind.fields_by_name.get(name)
        other = partner(field) if field is not None else ""
        entries.pop(other, None)
        below, entry = entries.pop(name, None), layer.entries.get(name)
        doubtful -= {name, other}
        if entry is not None:
            entries[name] = _merged_entry(below, entry)
        if name in layer.doubtful or other in layer.entries:
            doubtful |= {name, *([other] if other else [])}
    return Block(layer.kind, layer.place, entries, frozenset(doubtful), base.broken or layer.broken)


def _merged_entry(below: Entry | None, entry: Entry) -> Entry:
    if below is None or entry.field.is_repeated or not is_message(entry.field):
        return entry
    value, inherited = entry.values[0], below.values[0].value
    if not isinstance(value.value, Block) or not isinstance(inherited, Block):
        return entry
    return replace(entry, values=(replace(value, value=_merged(inherited, value.value)),))


def _without(block: Block, path: Sequence[str]) -> Block:
    """The block without the field that `path` leads to."""
    name, *rest = path
    entry, inner = block.entries.get(name), block.block(name)
    if rest and inner is not None and entry is not None and not entry.field.is_repeated:
        value = replace(entry.values[0], value=_without(inner, rest))
        return replace(block, entries={**block.entries, name: replace(entry, values=(value,))})
    if rest:
        return block
    return replace(
        block, entries={n: e for n, e in block.entries.items() if n != name}, doubtful=block.doubtful - {name}
    )


def cleared(layer: Block) -> tuple[str, ...]:
    """The paths that a layer takes away: `momentum`, `transform_param.random_aspect_ratio_param`."""
    entry = layer.entries.get("clear")
    return tuple(str(v.value) for v in entry.values) if entry else ()


def check_layers(layers: Sequence[Block], problems: Problems) -> None:
    """Both of a pair in one layer, and `clear` of something that is not a field, stands in the same layer, or is not inherited."""
    for number, layer in enumerate(layers):
        for first, second in PAIRS:
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
    kind, field = SOLVER, None
    for word in path.split("."):
        if kind is None or (field is not None and field.is_repeated):
            problems.add(value.span, f"`clear` names `{path}`, and `{field.name if field else ''}` has no such field")
            return
        field = kind.fields_by_name.get(word)
        if field is None or path == "clear":
            problems.add(
                value.span,
                f"`clear` names `{path}`, which is not a field of {kind.name}",
                nearest(word, [other.name for other in fields(kind)]),
            )
            return
        kind = field.message_type
    assert field is not None
    name = path.split(".")[0]
    if path in layer.entries and not is_message(field):
        line = layer.entries[path].name.line
        problems.add(
            value.span, f"`{path}` is cleared and set in one place", f"it is set in line {line}; take one of them out"
        )
    elif not below:
        problems.add(
            value.span, "`clear` takes away what is inherited, and here nothing is", "write it in a stage's file"
        )
    elif path == name and not any(b.broken or name in b.doubtful for b in below):
        inherited = merge(below).entries
        other = PARTNER.get(name, "")
        if name not in inherited and other in inherited:
            problems.add(value.span, f"`{name}` is not inherited, but `{other}` is", f'write `clear: "{other}"`')


def edit(base: Block | None, path: Sequence[str], leaf: Block) -> Block:
    """`base` with the entries of `leaf` put into the message that `path` leads to, which is made if it is not there."""
    if not path:
        assert base is not None
        others = {other for entry in leaf.entries.values() if (other := partner(entry.field))}
        doubtful = (base.doubtful - set(leaf.entries) - others) | leaf.doubtful
        kept = {n: e for n, e in base.entries.items() if n not in leaf.doubtful | others}
        changed = {n: _merged_entry(base.entries.get(n), e) for n, e in leaf.entries.items()}
        return replace(base, entries=kept | changed, doubtful=doubtful)
    assert base is not None
    field = base.kind.fields_by_name[path[0]]
    inner = base.block(path[0])
    name = base.entries[path[0]].name if inner else leaf.place
    edited = edit(inner or Block(field.message_type, leaf.place), path[1:], leaf)
    rest = base.entries[path[0]].values[1:] if inner else ()  # of a list the first is changed
    entry = Entry(field, name, (Value(edited, "", name), *rest))
    return replace(base, entries={**base.entries, path[0]: entry}, doubtful=base.doubtful - {path[0]})


def in_iterations(block: Block, images: int | None, problems: Problems) -> Block:
    """The settings with every duration in iterations, still at the place where it was written. `images` (of an epoch) is None where it
    isn't known; what depends on it is doubtful then."""
    try:
        batch = View(block).whole("batch_size")
    except Doubtful:
        batch = None
    return _insides_in_iterations(_durations_converted(block, images, batch, problems), images, batch, problems)


def _durations_converted(block: Block, images: int | None, batch: int | None, problems: Problems) -> Block:
    """The message with those of its durations that are in epochs in iterations, or doubtful."""
    entries, doubtful = dict(block.entries), set(block.doubtful)
    for iterations, epochs in durations(block.kind):
        entry = entries.pop(epochs, None)
        if entry is not None and (found := _convert(entry, iterations, images, batch, problems)):
            entries[iterations] = found
        elif entry is not None or epochs in doubtful:
            doubtful.add(iterations)
    return replace(block, entries=entries, doubtful=frozenset(doubtful))


def _insides_in_iterations(block: Block, images: int | None, batch: int | None, problems: Problems) -> Block:
    """A Solver's settings with every knot at an iteration, no whole one in general, and every duration inside a message in iterations,
    still at the place where it was written. `images` of an epoch and `batch` are None where they aren't known; what depends on them
    is doubtful then.
    """
    block = _knots_converted(block, images, batch, problems)
    for name in INSIDE:
        inner = block.block(name)
        if inner is not None:
            for first, second in durations(inner.kind):
                if first in inner.entries and second in inner.entries:
                    _same_thing(inner.entries[first], inner.entries[second], problems)
            found = _durations_converted(inner, images, batch, problems)
            value = replace(block.entries[name].values[0], value=found)
            block = replace(block, entries={**block.entries, name: replace(block.entries[name], values=(value,))})
    return block


def _knots_converted(block: Block, images: int | None, batch: int | None, problems: Problems) -> Block:
    """The message with its field `knot` converted, or doubtful."""
    entry = block.entries.get("knot")
    if entry is None:
        return block
    values = []
    for value in entry.values:
        assert isinstance(value.value, Block)
        found = _knot(value.value, images, batch, problems)
        values += [replace(value, value=found)] if found else []
    if len(values) == len(entry.values):
        return replace(block, entries={**block.entries, "knot": replace(entry, values=tuple(values))})
    kept = {name: e for name, e in block.entries.items() if name != "knot"}
    return replace(block, entries=kept, doubtful=block.doubtful | {"knot"})


def _knot(block: Block, images: int | None, batch: int | None, problems: Problems) -> Block | None:
    """The knot with `iter` in place of `epoch`. None where it has both, neither, no factor, or is not known."""
    iter, epoch = block.entries.get("iter"), block.entries.get(EPOCH)
    if block.broken or block.doubtful:
        return None  # which has been reported
    if "factor" not in block.entries:
        problems.add(block.place, "Knot lacks `factor`", "write `factor: 1` for base_lr itself, say")
        return None
    if iter is not None and epoch is not None:
        _same_thing(iter, epoch, problems)
        return None
    if epoch is None:
        if iter is None:
            problems.add(block.place, "Knot lacks `iter` or `epoch`", "write `epoch: 5` or `iter: 1000`, say")
        return block if iter is not None else None
    if images is None or batch is None:
        return None
    value = epoch.values[0]
    assert isinstance(value.value, int | float)
    place = units.exact(value.value, images, batch)
    if place > INT64_MAX:
        problems.add(value.span, "`epoch` is more iterations than 64 bits can count")
        return None
    count = place.numerator if place.denominator == 1 else float(place)
    converted = Entry(
        block.kind.fields_by_name["iter"], epoch.name, (Value(count, f"{EPOCH}: {value.text}", value.span),)
    )
    return replace(block, entries={"iter": converted} | {n: e for n, e in block.entries.items() if n != EPOCH})


def _convert(entry: Entry, name: str, images: int | None, batch: int | None, problems: Problems) -> Entry | None:
    if images is None or batch is None:
        return None
    values = []
    for value in entry.values:
        assert isinstance(value.value, int | float)
        # 0 epochs mean what 0 iterations mean (none), and not the one iteration that a short duration is rounded up to.
        count = units.iterations(value.value, images, batch) if value.value else 0
        if count > INT64_MAX:
            problems.add(value.span, f"`{entry.field.name}` is more iterations than 64 bits can count")
            return None
        values.append(Value(count, f"{entry.field.name}: {value.text}", value.span))
    return Entry(entry.field.containing_type.fields_by_name[name], entry.name, tuple(values))


def divisors(number: int, near: int) -> str:
    """The divisors of `number` next to `near`, as a hint; nothing where the search would be long."""
    if number > 10_000_000:
        return ""
    found = [d for d in range(1, min(number, 100_000) + 1) if number % d == 0]
    below = [d for d in found if d < near][-1:]
    above = [d for d in found if d > near][:1]
    return f"{' or '.join(str(d) for d in below + above)} would" if below or above else ""


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
