"""`stagerun plan --why`: where a setting of a schedule came from, and what it means."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from stagerun.base.errors import Problem, Problems, UsageError, listing, nearest
from stagerun.base.recipe import CODE, Ensemble, Origin, Schedule, Solver, Stage
from stagerun.base.text import columns
from stagerun.language import tree
from stagerun.language.layers import LMDB, NET, pairs
from stagerun.language.tree import SCHEDULE, SOLVER, SOURCE, is_message, quoted
from stagerun.language.values import NONE, at_default, leaves, own_images, shown, text
from stagerun.manual.fields import help_text
from stagerun.plan.raised import MAX_ITER, what_end_differs
from stagerun.tools.plan.history import Said, history, of_ensemble, of_stage_entry
from stagerun.train.progress import RECIPE

STAGE_ENTRY: Descriptor = SCHEDULE.fields_by_name["stage"].message_type
ENSEMBLE: Descriptor = SCHEDULE.fields_by_name["ensemble"].message_type
# Fields of a stage's block in the schedule, none of which Solver has.
_ENTRY = frozenset(STAGE_ENTRY.fields_by_name) - frozenset(SOLVER.fields_by_name)


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

    `name` is STAGE.FIELD, STAGE for all its fields, FIELD for that field of every stage, or a field of the schedule; ENSEMBLE and
    ENSEMBLE.FIELD likewise. `overrides` are those that the schedule was read with.
    """
    first, *words = name.split(".")
    group = [s for s in schedule.stages if s.group == first]
    if group and not words:
        raise UsageError(f"`{first}` makes {len(group)} stages", f"name one of {listing([s.name for s in group])}")
    stage = next((s for s in schedule.stages if s.name == first), None)
    if stage is not None and not words:
        return _stage_table(schedule, stage)
    ensemble = next((e for e in schedule.ensembles if e.name == first), None)
    if ensemble is not None:
        return ensemble_text(schedule, overrides, ensemble, _follow(ENSEMBLE, words))
    if (stage is not None or group) and words[0] in _ENTRY:
        (field,) = _follow(STAGE_ENTRY, words)
        return entry_text(schedule, stage, field) if stage is not None else of_entries(schedule, group, field)
    if stage is not None:
        return _one(schedule, Asked(stage, _follow(SOLVER, words)), overrides)
    if group:
        return _of_several(schedule, group, _follow(SOLVER, words))
    return _shared(schedule, first, words, overrides)


def _shared(schedule: Schedule, first: str, words: Sequence[str], overrides: Sequence[str]) -> str:
    """A field of every stage, of every ensemble, or of the schedule itself."""
    if first == "stage" and words and words[0] in _ENTRY:
        return of_entries(schedule, schedule.stages, *_follow(STAGE_ENTRY, words))
    if first in _ENTRY and first not in SCHEDULE.fields_by_name:
        return of_entries(schedule, schedule.stages, *_follow(STAGE_ENTRY, [first, *words]))
    if first == "ensemble" and words and schedule.ensembles:
        return of_ensembles(schedule, overrides, *_follow(ENSEMBLE, words))
    if first in ("solver", "stage") and words:
        return _of_several(schedule, schedule.stages, _follow(SOLVER, words))
    if first in SOLVER.fields_by_name and first not in SCHEDULE.fields_by_name:
        return _of_several(schedule, schedule.stages, _follow(SOLVER, [first, *words]))
    if first not in SCHEDULE.fields_by_name:
        _unknown(schedule, first)
    if first in ("stage", "solver"):
        names = listing([s.name for s in schedule.stages])
        raise UsageError(f"`{first}` is not a setting by itself", f"name a stage, {names}, or one of its fields")
    if first == "ensemble":
        if not schedule.ensembles:
            raise UsageError("the schedule has no ensemble", "`stagerun help Ensemble` says what one is")
        names = listing([e.name for e in schedule.ensembles])
        raise UsageError("`ensemble` is not a setting by itself", f"name one, {names}, or one of their fields")
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
        yield from leaves(stage.solver, "solver")
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
            message = f"set {where}" if number == 0 else f"replaced: set {where}"
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


def entry_text(schedule: Schedule, stage: Stage, field: FieldDescriptor) -> str:
    """A field of a stage's block: its value, its place, and its manual entry."""
    said = of_stage_entry(schedule, stage.name, field.name)
    blocks = [
        f"{stage.name}.{field.name}   {_entry(stage, field.name, said)}",
        *_entry_place(said, _entry_default(stage, field.name)),
    ]
    if field.name == "enabled" and not stage.enabled and (said is None or said.text != "false"):
        blocks.append(f"not enabled, since {stage.parent}, which it starts from, is not")
    return "\n\n".join([*blocks, _manual(field)])


def of_entries(schedule: Schedule, stages: Sequence[Stage], field: FieldDescriptor) -> str:
    """The field in each of the stages, then its manual entry."""
    rows = [("stage", field.name, "written in")]
    for stage in stages:
        said = of_stage_entry(schedule, stage.name, field.name)
        rows.append((stage.name, _entry(stage, field.name, said), _short(said)))
    return "\n\n".join(["\n".join(columns(rows)), _manual(field)])


def _entry(stage: Stage, name: str, said: Said | None) -> str:
    if name == "from":
        return quoted(stage.starts_from) + ("" if stage.parent else " (fresh weights)")
    if name == "enabled":
        return text(stage.enabled)
    if name == "solver" and said is None:
        return quoted(f"{stage.group or stage.name}.prototxt")
    return said.text if said is not None else NONE


def _entry_default(stage: Stage, name: str) -> str:
    if name == "from":
        return "a default: the stage above" if stage.parent else "a default: there is no stage above"
    return {"solver": "a default: its name in the schedule", "sweep": "not set"}.get(name, "the default")


# -- ensembles


def ensemble_text(
    schedule: Schedule, overrides: Sequence[str], ensemble: Ensemble, fields: tuple[FieldDescriptor, ...]
) -> str:
    """One field as above, or without any of them a table of all."""
    if fields:
        (field,) = fields
        said = of_ensemble(schedule, overrides, ensemble.name, field.name)
        head = f"{ensemble.name}.{field.name}   {text(getattr(ensemble, field.name))}"
        return "\n\n".join([head, *_entry_place(said, "the default"), _manual(field)])
    rows = [("field", "value", "written in")]
    for name in ENSEMBLE.fields_by_name:
        said = of_ensemble(schedule, overrides, ensemble.name, name)
        rows.append((name, text(getattr(ensemble, name)), _short(said)))
    return "\n".join([f"{ensemble.name}: an ensemble", "", *columns(rows)])


def of_ensembles(schedule: Schedule, overrides: Sequence[str], field: FieldDescriptor) -> str:
    rows = [("ensemble", field.name, "written in")]
    for ensemble in schedule.ensembles:
        said = of_ensemble(schedule, overrides, ensemble.name, field.name)
        rows.append((ensemble.name, text(getattr(ensemble, field.name)), _short(said)))
    return "\n\n".join(["\n".join(columns(rows)), _manual(field)])


# -- both


def _entry_place(said: Said | None, default: str) -> list[str]:
    if said is None:
        return [default]
    where = "on the command line" if said.layer == "--set" else "in the schedule"
    return [Problem(f"set {where}", said.span, said.source).render()]


def _short(said: Said | None) -> str:
    if said is None:
        return "default"
    return "--set" if said.layer == "--set" else f"{said.span.path}:{said.span.line}"


def _manual(field: FieldDescriptor) -> str:
    return help_text(f"{field.containing_type.name}.{field.name}")
