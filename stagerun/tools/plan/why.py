"""`stagerun plan --why`: where a setting of a schedule came from, and what it means."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from stagerun.base.errors import Problem, Problems, UsageError, listing, nearest
from stagerun.base.recipe import CODE, Origin, Schedule, Solver, Stage
from stagerun.base.text import columns
from stagerun.language import tree
from stagerun.language.layers import LMDB, NET, pairs
from stagerun.language.tree import SCHEDULE, SOLVER, SOURCE, is_message
from stagerun.language.values import NONE, at_default, leaves, own_images, shown, text
from stagerun.manual.fields import help_text
from stagerun.plan.raised import MAX_ITER, what_end_differs
from stagerun.tools.plan.history import Said, history
from stagerun.train.progress import RECIPE

_KINDS = SCHEDULE.file.message_types_by_name.values()
# Retired fields, which older snapshots have at a default.
_GONE = {field.name for kind in _KINDS for field in kind.fields} - {
    f.name for kind in _KINDS for f in tree.fields(kind)
}
# Fields of a stage's block in the schedule, none of which Solver has.
_ENTRY = frozenset(SCHEDULE.fields_by_name["stage"].message_type.fields_by_name) - frozenset(SOLVER.fields_by_name)


@dataclass(frozen=True, slots=True)
class Asked:
    """`stage` None: of Schedule. `fields` lead from the Solver, or Schedule, to the field; empty for a whole stage."""

    stage: Stage | None
    fields: tuple[FieldDescriptor, ...]

    @property
    def key(self) -> str:
        return ".".join([*(["solver"] if self.stage else []), *(f.name for f in self.fields)])


def explained(schedule: Schedule, name: str, overrides: Sequence[str] = ()) -> str:
    """Return the value of `name`, the line it stands in, what it replaced, and the manual's word on it. UsageError.

    `name` is STAGE.FIELD, STAGE for all its fields, FIELD for that field of every stage, or a field of the schedule. `overrides` are
    those that the schedule was read with.
    """
    first, *words = name.split(".")
    group = [s for s in schedule.stages if s.group == first]
    if group and not words:
        raise UsageError(f"`{first}` makes {len(group)} stages", f"name one of {listing([s.name for s in group])}")
    stage = next((s for s in schedule.stages if s.name == first), None)
    if stage is not None and not words:
        return _stage_table(schedule, stage)
    if stage is not None and words[0] not in _ENTRY:
        return _one(schedule, Asked(stage, _follow(SOLVER, words)), overrides)
    if group and words[0] not in _ENTRY:
        return _of_several(schedule, group, _follow(SOLVER, words))
    return _shared(schedule, first, words, overrides)


def _shared(schedule: Schedule, first: str, words: Sequence[str], overrides: Sequence[str]) -> str:
    """A field of every stage, or of the schedule itself."""
    if first in ("solver", "stage") and words and words[0] not in _ENTRY:
        return _of_several(schedule, schedule.stages, _follow(SOLVER, words))
    if first in SOLVER.fields_by_name and first not in SCHEDULE.fields_by_name:
        return _of_several(schedule, schedule.stages, _follow(SOLVER, [first, *words]))
    entries = {*(s.name for s in schedule.stages), *(s.group for s in schedule.stages), "stage", "solver", *_ENTRY}
    ensembles = {*(one.name for one in schedule.ensembles), "ensemble"}
    if first in entries | ensembles and first != "name":
        kind = "Ensemble" if first in ensembles else "StageEntry"
        text = f"`{'.'.join([first, *words])}` stands in schedule.prototxt alone, where nothing overrides it"
        raise UsageError(text, f"`stagerun help {kind}` says what it means; or name STAGE.FIELD")
    if first not in SCHEDULE.fields_by_name:
        _unknown(schedule, first)
    return _one(schedule, Asked(None, _follow(SCHEDULE, [first, *words])), overrides)


def _unknown(schedule: Schedule, word: str) -> None:
    names = [s.name for s in schedule.stages]
    groups = [s.group for s in schedule.stages if s.group is not None]
    known = [*names, *groups, *(e.name for e in schedule.ensembles), *SCHEDULE.fields_by_name, *SOLVER.fields_by_name]
    hint = nearest(word, [*known, *_ENTRY]) or f"the stages are {listing(names)}"
    raise UsageError(f"`{word}` is neither a stage nor a field", hint)


def _follow(kind: Descriptor, words: Sequence[str]) -> tuple[FieldDescriptor, ...]:
    """The fields that lead to the one that is named. UsageError."""
    found: list[FieldDescriptor] = []
    for number, word in enumerate(words):
        field = kind.fields_by_name.get(word)
        if field is None:
            hint = nearest(word, kind.fields_by_name) or f"`stagerun help {kind.name}` lists them"
            raise UsageError(f"{kind.name} has no field `{word}`", hint)
        if word == "clear":
            raise UsageError("`clear` takes a field away, and is not a setting itself", "name the field")
        found.append(field)
        if number == len(words) - 1:
            break
        if not is_message(field):
            raise UsageError(f"`{word}` is not a message: nothing is inside it", f"leave out `.{words[number + 1]}`")
        if field.is_repeated and field.message_type is not SOURCE:
            raise UsageError(
                f"`{word}` is a list of messages, and is explained whole", f"leave out `.{words[number + 1]}`"
            )
        kind = field.message_type
    if found and (first := {b: a for a, b in pairs(kind)}.get(found[-1].name)):
        found[-1] = kind.fields_by_name[first]  # `max_epoch` is part of what `max_iter` says
    return tuple(found)


# -- one field


def _one(schedule: Schedule, asked: Asked, overrides: Sequence[str]) -> str:
    said = history(schedule, overrides, asked.stage.name if asked.stage else None, asked.key)
    blocks = [_head(schedule, asked), *_course(schedule, asked, said)]
    if asked.stage is not None and asked.key == MAX_ITER:
        blocks.append(_raised(asked.stage.solver))
    field = asked.fields[-1]
    return "\n\n".join([*blocks, help_text(f"{field.containing_type.name}.{field.name}")])


def _raised(solver: Solver) -> str:
    """What a larger number would mean for a stage that is trained."""
    now = solver.max_iter
    if differs := what_end_differs(replace(solver, max_iter=now + 1), now):
        return f"raised once the stage is trained, that is stale: {differs}"
    return f"raised once the stage is trained, it goes on from iteration {now}; what started from its end is stale, unless it says `@{now}`"


def _head(schedule: Schedule, asked: Asked) -> str:
    """The name and the value; of a message, its fields."""
    name = (f"{asked.stage.name}." if asked.stage else "") + asked.key.removeprefix("solver." if asked.stage else "")
    values = dict(_values(schedule, asked.stage))
    if asked.key in values:
        return f"{name}   {_value(schedule, asked.stage, asked.key, values[asked.key])}"
    inside = {key: value for key, value in values.items() if key.startswith(asked.key + ".")}
    if not inside:
        return f"{name}   {NONE}"
    rows = [(key.removeprefix(asked.key + "."), value) for key, value in inside.items()]
    return "\n".join([name, *(f"  {line}" for line in columns(rows, 2))])


def _values(schedule: Schedule, stage: Stage | None) -> Iterator[tuple[str, str]]:
    """Every field and its text, in the order of the recipe."""
    if stage is not None:
        yield from (
            (key, value) for key, value in leaves(stage.solver, "solver") if key.rpartition(".")[2] not in _GONE
        )
        if (images := own_images(stage.data, schedule.data)) is not None:
            yield from leaves(images, "solver.data")
        origin = stage.origins.get("solver.base_lr_batch")
        yield "solver.base_lr_batch", origin.text if origin else NONE
        yield from ((key, value) for key, value in stage.identity.items() if key.startswith(CODE))
        return
    yield from (("name", text(schedule.name)), ("seed", text(schedule.seed)))
    yield from leaves(schedule.model, "model")
    yield from leaves(schedule.data, "data")
    yield from (("determinism", text(schedule.determinism)), ("keep_snapshots", text(schedule.keep_snapshots)))


def _value(schedule: Schedule, stage: Stage | None, key: str, value: str) -> str:
    """In the units of the file and in iterations, where they are others."""
    if stage is None:
        return value
    said, written = shown(key, value, stage)
    return f"{said} ({written})" if written else said


def _course(schedule: Schedule, asked: Asked, said: Sequence[Said]) -> Iterator[str]:
    """What counts, then what it replaced, the highest layer first."""
    name = asked.fields[-1].name
    top = said[-1] if said else None
    counts = top is not None and top.name != "clear" and (bool(top.text) or top.name == name)
    if not counts:
        yield _default(schedule, asked)
    for number, one in enumerate(reversed(said)):
        where = _where(one, asked)
        if one.name == "clear":
            message = f"taken away {where}"
        elif not one.text and one.name != name:
            message = f"`{one.name}` is set {where}, without `{name}`"
        else:
            below = "inherited field by field" if is_message(asked.fields[-1]) else "replaced"
            message = f"set {where}" if number == 0 else f"{below}: set {where}"
        yield Problem(message, one.span, one.source).render()


def _default(schedule: Schedule, asked: Asked) -> str:
    """What counts where no layer says anything, or the highest takes it away."""
    value = dict(_values(schedule, asked.stage)).get(asked.key)
    origins = (asked.stage or schedule).origins
    # A message of a net's has no line of its own, but those of its fields.
    inside = (one for key, one in origins.items() if key.startswith(f"{asked.key}.") and one.layer == NET)
    origin = origins.get(asked.key) or next(inside, None)
    said = origin.text if origin is not None else NONE
    if origin is not None and origin.layer == LMDB:
        return "not written: read from the LMDB"
    if origin is not None and origin.layer == NET and origin.span is not None:
        line = Problems(schedule.files).line(origin.span)
        return Problem("said by the net of Caffe's", origin.span, line).render()
    if value in (None, NONE, "[]") and said in (NONE, "[]"):
        return "not set"
    if value != said:
        return f"a default: {said}"
    return "the default" if tree.default(asked.fields[-1]) is not None else "a default that follows from other fields"


def _where(one: Said, asked: Asked) -> str:
    if one.layer == "--set":
        return "on the command line"
    if one.layer == "schedule":
        return "for all stages" if asked.stage else "in the schedule"
    if one.layer == "sweep" or asked.stage is None:
        return "in its `sweep`"
    inline = one.span.path == asked.stage.span.path
    return f"in {'`solver_param`' if inline else 'the file'} of stage {asked.stage.name}"


# -- tables


def _place(origin: Origin | None) -> str:
    if origin is None or origin.span is None:
        return "default"
    return f"{origin.span.path}:{origin.span.line}" if origin.layer != "--set" else "--set"


def _origin(stage: Stage, key: str) -> Origin | None:
    """The origin of the field, or of the message around it that is a default as a whole."""
    while key not in stage.origins and "." in key:
        key = key.rpartition(".")[0]
    return stage.origins.get(key)


@dataclass(frozen=True, slots=True)
class Setting:
    """A field of a stage. `place`: where it is written, '' for a default."""

    name: str
    value: str
    place: str


def settings_of(schedule: Schedule, stage: Stage) -> Iterator[Setting]:
    """Every field, in the order of the recipe. Of a schedule that was read from a snapshot, which doesn't say where a setting was written,
    those that differ from their defaults stand in the snapshot's recipe."""
    values = dict(_values(schedule, stage))
    images = "solver.transform_param."
    follows = {key.replace(".", ".test_", 1): value for key, value in values.items() if key.startswith(images)}
    follows["solver.random_seed"] = text(schedule.seed)
    follows["solver.test_batch_size"] = text(stage.solver.device_batch_size)
    for key, value in values.items():
        origin = _origin(stage, key)
        place = "" if origin is None or origin.span is None else _place(origin)
        if not stage.origins and not at_default(key, value) and value != follows.get(key):
            place = RECIPE
        yield Setting(key.removeprefix("solver."), _value(schedule, stage, key, value), place)


def _stage_table(schedule: Schedule, stage: Stage) -> str:
    """Every field: those that are written somewhere, and then the defaults."""
    found = list(settings_of(schedule, stage))
    written = [("field", "value", "from"), *((s.name, s.value, s.place) for s in found if s.place)]
    defaults = [("default", "value"), *((s.name, s.value) for s in found if not s.place)]
    return "\n".join([start_text(stage), "", *columns(written), "", *columns(defaults)])


def start_text(stage: Stage) -> str:
    """What it starts from, and where it stands."""
    start = stage.parent or "the seed"
    if stage.average is not None:
        start = f"the average of ensemble {stage.average}"
    elif stage.parent_iter is not None:
        start += f" at iteration {stage.parent_iter}"
    off = "" if stage.enabled else ", not enabled"
    return f"{stage.name}: starts from {start}{off} ({stage.span.path}:{stage.span.line})"


def _of_several(schedule: Schedule, stages: Sequence[Stage], fields: tuple[FieldDescriptor, ...]) -> str:
    """The field in each of the stages, then its manual entry."""
    rows = [("stage", fields[-1].name, "from")]
    for stage in stages:
        asked = Asked(stage, fields)
        values = dict(_values(schedule, stage))
        inside = [
            f"{key.removeprefix(asked.key + '.')}: {v}" for key, v in values.items() if key.startswith(asked.key + ".")
        ]
        value = values.get(asked.key)
        cell = _value(schedule, stage, asked.key, value) if value is not None else " ".join(inside) or NONE
        rows.append((stage.name, cell, _place(_origin(stage, asked.key))))
    field = fields[-1]
    return "\n\n".join(["\n".join(columns(rows)), help_text(f"{field.containing_type.name}.{field.name}")])
