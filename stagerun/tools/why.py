"""`stagerun plan --why`: where a setting of a schedule comes from, what it replaced, and what it means."""

import posixpath
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from stagerun.base.errors import Problem, Problems, Span, UsageError, listing, nearest
from stagerun.base.recipe import CODE, Schedule, Stage
from stagerun.base.text import columns
from stagerun.language import override, stages, tree
from stagerun.language.layers import LMDB, NET, SET, pairs, partner
from stagerun.language.parse import parse
from stagerun.language.tree import SCHEDULE, SOLVER, SOURCE, Block, Entry, is_message
from stagerun.language.values import NONE, at_default, leaves, own_images, shown, text
from stagerun.manual.fields import help_text
from stagerun.train.progress import RECIPE

_KINDS = SCHEDULE.file.message_types_by_name.values()
_LIVE = {field.name for kind in _KINDS for field in tree.fields(kind)}
_RETIRED = {field.name for kind in _KINDS for field in kind.fields} - _LIVE


class Setting(NamedTuple):
    """A setting by its key, `solver.base_lr`: its value for people, the line that sets it ('' for a default), and its canonical text."""

    key: str
    value: str
    line: str
    text: str


def settings_of(stage: Stage, values: Mapping[str, str]) -> Iterator[Setting]:
    """Describe values of a stage, canonical texts by key. A stage that was read from a snapshot has no lines: a value that differs from
    the default is in the snapshot's recipe."""
    for key, value in values.items():
        if key.rpartition(".")[2] not in _RETIRED:
            read, written = shown(key, value, stage)
            line = _line(stage, key) if stage.origins or at_default(key, value) else RECIPE
            yield Setting(key, f"{read} ({written})" if written else read, line, value)


def _line(stage: Stage, key: str) -> str:
    """Return the line that sets a field, or the message around it that is set as a whole; '' for a default."""
    while key not in stage.origins and "." in key:
        key = key.rpartition(".")[0]
    origin = stage.origins.get(key)
    return _shown(origin.span) if origin is not None and origin.span else ""


def _shown(span: Span) -> str:
    return span.path if span.path == SET else f"{span.path}:{span.line}"


def _settings_of_stage(schedule: Schedule, stage: Stage) -> list[Setting]:
    """Return every setting of a stage, in the order of the recipe."""
    values = dict(leaves(stage.solver, "solver"))
    if (images := own_images(stage.data, schedule.data)) is not None:
        values |= leaves(images, "solver.data")
    origin = stage.origins.get("solver.base_lr_batch")
    values["solver.base_lr_batch"] = origin.text if origin else NONE
    values |= {key: value for key, value in stage.identity.items() if key.startswith(CODE)}
    return list(settings_of(stage, values))


def plain_values(schedule: Schedule) -> Iterator[tuple[str, str]]:
    """Yield the settings of a schedule that are not in a message."""
    for name in ("name", "seed", "determinism", "keep_snapshots"):
        yield name, text(getattr(schedule, name))


def _shared(schedule: Schedule) -> tuple[Stage, list[Setting]]:
    """Return the settings that all stages share, and a stage that has them."""
    stages = schedule.stages
    usual = (s for s in stages if s.model == schedule.model and own_images(s.data, schedule.data) is None)
    stage = next(usual, stages[0])
    values = [*plain_values(schedule), *leaves(schedule.model, "model"), *leaves(schedule.data, "data")]
    return stage, list(settings_of(stage, dict(values)))


# -- names


def explained(schedule: Schedule, name: str, overrides: Sequence[str] = ()) -> str:
    """Return the value of `name`, the line that sets it, what it replaced, and the manual's entry. UsageError.

    `name` is STAGE.FIELD, STAGE for all its fields, FIELD for that field of every stage, or a field of the schedule. `overrides` are the
    `--set` that the schedule was read with.
    """
    first, *words = name.split(".")
    chosen = [stage for stage in schedule.stages if first in (stage.name, stage.group)]
    if not chosen and first in SOLVER.fields_by_name and first not in SCHEDULE.fields_by_name:
        chosen, words = list(schedule.stages), [first, *words]
    elif not chosen and first == "solver" and words:
        chosen = list(schedule.stages)
    exact = next((stage for stage in chosen if stage.name == first), None)
    if exact and not words:
        return _whole_stage(schedule, exact, overrides)
    if chosen and not words:
        raise UsageError(f"`{first}` makes {len(chosen)} stages", f"name one of {listing([s.name for s in chosen])}")
    if chosen:
        fields = _follow(SOLVER, words)
        table = _one(schedule, exact, fields, overrides) if exact else _several(schedule, chosen, fields, overrides)
    elif first in SCHEDULE.fields_by_name and first not in ("stage", "solver", "ensemble"):
        fields = _follow(SCHEDULE, [first, *words])
        table = _one(schedule, None, fields, overrides)
    else:
        names = dict.fromkeys(name for s in schedule.stages for name in (s.name, s.group) if name is not None)
        hint = nearest(first, {*names, *SCHEDULE.fields_by_name, *SOLVER.fields_by_name} - {first})
        message = f"`{first}` is neither a stage nor a setting"
        raise UsageError(message, hint or f"the stages are {listing(list(names))}")
    return f"{table}\n\n{help_text(full_name(fields[-1]))}"


def full_name(field: FieldDescriptor) -> str:
    """Return `Solver.base_lr`, as in the manual."""
    return f"{field.containing_type.name}.{field.name}"


def _follow(kind: Descriptor, words: Sequence[str]) -> tuple[FieldDescriptor, ...]:
    """Return the fields that lead to the last of the words. UsageError."""
    fields: list[FieldDescriptor] = []
    for word in words:
        if fields:
            last, inner = fields[-1], fields[-1].message_type
            if inner is None or (last.is_repeated and inner is not SOURCE):
                whole = "is explained whole" if inner else "is not a message"
                raise UsageError(f"`{last.name}` {whole}: it has no field `{word}`", f"leave out `.{word}`")
            kind = inner
        field = kind.fields_by_name.get(word)
        if field is None or word == "clear" or tree.retired(field):
            hint = tree.retired(field) if field is not None else nearest(word, kind.fields_by_name)
            raise UsageError(f"{kind.name} has no setting `{word}`", hint or f"`stagerun help {kind.name}` lists them")
        fields.append(field)
    if first := pairs(kind).get(fields[-1].name):
        fields[-1] = kind.fields_by_name[first]  # `max_epoch` is resolved into `max_iter`
    return tuple(fields)


# -- the lines that set or clear a field

Layer = tuple[
    Block, tuple[str, ...]
]  # a block, and the path in Schedule that it merges into: `solver` for the settings of a stage


def _layers(schedule: Schedule, stage: Stage | None, overrides: Sequence[str]) -> list[Layer]:
    """Return the layers of a stage, or of the schedule, in the order of `language.layers`. Reads the files again: reading them keeps only the
    values that count."""
    problems, (path, first) = Problems(), schedule.files[0]
    root = parse(path, first, SCHEDULE, problems)
    nodes = {node.name: node for node in stages.nodes(root, problems)}
    changes = override.read(overrides, stages.names_of(list(nodes.values())), problems)
    changes.sort(key=lambda change: len(change.path))
    shared: list[Layer] = [(root, ()), *((change.leaf, change.path) for change in changes if change.stage is None)]
    if stage is None:
        return shared
    layers: list[Layer] = []
    for block, inside in shared:
        layers += [(block, inside)] if inside else [(solver, ("solver",)) for solver in block.blocks("solver")]
    node = nodes[stage.name]
    solver = node.solver
    if solver is None and node.file is not None:
        file = posixpath.join(posixpath.dirname(path), node.file)
        solver = parse(file, dict(schedule.files).get(file, ""), SOLVER, problems)
    layers += [(block, ("solver",)) for block in (solver, node.sweep) if block is not None]
    for name in filter(None, (node.group, node.name)):
        layers += [(change.leaf, ("solver", *change.path)) for change in changes if change.stage == name]
    return layers


def _lines(layers: Iterable[Layer], key: str) -> Iterator[tuple[Span, str]]:
    """Yield the lines about a field, lowest layer first, with the path that the line clears, or ''."""
    words = key.split(".")
    for block, path in layers:
        inside = words[len(path) :]
        if tuple(words[: len(path)]) != path or not inside:
            continue
        cleared = block.entries["clear"].values if path == ("solver",) and "clear" in block.entries else ()
        for name, span in ((str(value.value), value.span) for value in cleared):
            field = ".".join(inside)
            if f"{field}.".startswith(f"{name}.") or name == partner(SOLVER.fields_by_name[inside[0]]):
                yield span, name
        if entry := _entry(block, inside):
            yield entry.place, ""


def _entry(block: Block, words: Sequence[str]) -> Entry | None:
    """Return the field, or its partner in another unit, in a message; None if it isn't written."""
    entry = block.entries.get(words[0]) or block.entries.get(partner(block.kind.fields_by_name[words[0]]))
    inner = entry.values[0].value if entry is not None and entry.values else None
    return _entry(inner, words[1:]) if isinstance(inner, Block) and words[1:] else entry


# -- as text


def _one(schedule: Schedule, stage: Stage | None, fields: Sequence[FieldDescriptor], overrides: Sequence[str]) -> str:
    """Show a field of a stage, or of the schedule: the value that counts, then what it replaced, the highest layer first."""
    name = ".".join(field.name for field in fields)
    if stage is None:
        title, key, (holder, settings) = name, name, _shared(schedule)
    else:
        title, key, holder = f"{stage.name}.{name}", f"solver.{name}", stage
        settings = _settings_of_stage(schedule, stage)
    inside = [(s.key.removeprefix(f"{key}."), s.value) for s in settings if f"{s.key}.".startswith(f"{key}.")]
    if inside and inside[0][0] != key:
        blocks = ["\n".join([title, *(f"  {row}" for row in columns(inside, 2))])]
    else:
        blocks = [f"{title}   {inside[0][1] if inside else NONE}"]
    lines = list(_lines(_layers(schedule, stage, overrides), key))
    files = Problems(schedule.files)
    files.file(SET, "\n".join(overrides))
    if not lines or lines[-1][1]:
        blocks.append(_default(holder, key, fields[-1]))
    replaced = "inherited field by field: set" if is_message(fields[-1]) else "replaced"
    for number, (span, cleared) in enumerate(reversed(lines)):
        how = f"`{cleared}` cleared" if cleared else replaced if number else "set"
        blocks.append(Problem(how, span, files.line(span)).render())
    return "\n\n".join(blocks)


def _default(holder: Stage, key: str, field: FieldDescriptor) -> str:
    """Say where the value of a field comes from that no layer sets, or that the highest one clears."""
    # A message of a net of Caffe's has no line, but its fields have.
    of_net = (one for name, one in holder.origins.items() if name.startswith(f"{key}.") and one.layer == NET)
    origin = holder.origins.get(key) or next(of_net, None)
    if origin is None or origin.text in (NONE, "[]"):
        return "not set"
    if origin.layer == LMDB:
        return "not written: read from the LMDB"
    if origin.layer == NET:
        return f"{origin.span}: set by Caffe's net"
    return "the default" if tree.default(field) is not None else "a default that follows from other fields"


def _several(
    schedule: Schedule, chosen: Sequence[Stage], fields: Sequence[FieldDescriptor], sets: Sequence[str]
) -> str:
    """Show a field in each of several stages."""
    key = ".".join(["solver", *(field.name for field in fields)])
    rows = [(stage.name, *row) for stage in chosen for row in _rows(schedule, stage, sets, key)]
    return "\n".join(columns([("stage", "field", "value", "from"), *rows]))


def _whole_stage(schedule: Schedule, stage: Stage, overrides: Sequence[str]) -> str:
    """Show every field: first what is set or cleared somewhere, then the defaults."""
    start = f"the average of ensemble {stage.average}" if stage.average else stage.parent or "the seed"
    if stage.average is None and stage.parent_iter is not None:
        start += f" at iteration {stage.parent_iter}"
    start += f"@{stage.parent_at}" if stage.parent_at is not None else ""
    off = "" if stage.enabled else ", not enabled"
    rows = sorted(_rows(schedule, stage, overrides), key=lambda row: row[2] == _DEFAULT)
    head = f"{stage.name}: starts from {start}{off} ({_shown(stage.span)})"
    return "\n".join([head, "", *columns([("field", "value", "from"), *rows])])


_DEFAULT = "default"


def _rows(schedule: Schedule, stage: Stage, overrides: Sequence[str], key: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield name, value, and the line that sets or clears it, of the settings of a stage, or those inside the message `key`."""
    layers = _layers(schedule, stage, overrides)
    for setting in _settings_of_stage(schedule, stage):
        if not key or f"{setting.key}.".startswith(f"{key}."):
            cleared = [f"cleared: {_shown(span)}" for span, path in _lines(layers, setting.key) if path]
            yield setting.key.removeprefix("solver."), setting.value, setting.line or [_DEFAULT, *cleared][-1]
