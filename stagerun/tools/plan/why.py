"""`stagerun plan --why`: where a setting of a schedule came from, and what it means."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from stagerun.base.errors import Problem, Problems, UsageError, listing, nearest
from stagerun.base.recipe import CODE, Origin, Schedule, Solver, Stage
from stagerun.base.text import columns
from stagerun.language import tree
from stagerun.language.layers import LMDB, NET, pairs
from stagerun.language.tree import SCHEDULE, SOLVER, SOURCE, is_message
from stagerun.language.values import NONE, at_default, leaves, own_images, shown, text
from stagerun.manual.fields import help_text
from stagerun.plan.counting import MAX_ITER, what_end_differs
from stagerun.tools.plan.history import Said, history
from stagerun.train.progress import RECIPE

_KINDS = SCHEDULE.file.message_types_by_name.values()
# Retired fields, which older snapshots have at a default.
_GONE = {field.name for kind in _KINDS for field in kind.fields} - {
    f.name for kind in _KINDS for f in tree.fields(kind)
}
# Fields of a stage's block in the schedule, none of which Solver has.
_ENTRY = frozenset(SCHEDULE.fields_by_name["stage"].message_type.fields_by_name) - frozenset(SOLVER.fields_by_name)


class Asked(NamedTuple):
    """`stage` None: of Schedule. `fields` lead from the Solver, or Schedule, to the field; empty for a whole stage."""

    stage: Stage | None
    fields: tuple[FieldDescriptor, ...]

    @property
    def words(self) -> str:
        return ".".join(field.name for field in self.fields)

    @property
    def key(self) -> str:
        return f"solver.{self.words}" if self.stage else self.words


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
    if words and words[0] not in _ENTRY:
        if stage is not None:
            return _one(schedule, Asked(stage, _follow(SOLVER, words)), overrides)
        if group or first in ("solver", "stage"):
            return _of_several(schedule, group or schedule.stages, _follow(SOLVER, words))
    if first in SOLVER.fields_by_name and first not in SCHEDULE.fields_by_name:
        return _of_several(schedule, schedule.stages, _follow(SOLVER, [first, *words]))
    stages = [name for s in schedule.stages for name in (s.name, s.group) if name is not None]
    ensembles = [one.name for one in schedule.ensembles]
    if first in {*stages, *ensembles, *_ENTRY, "stage", "solver", "ensemble"} - {"name"}:
        kind = "Ensemble" if first in (*ensembles, "ensemble") else "StageEntry"
        text = f"`{'.'.join([first, *words])}` stands in schedule.prototxt alone, where nothing overrides it"
        raise UsageError(text, f"`stagerun help {kind}` says what it means; or name STAGE.FIELD")
    if first not in SCHEDULE.fields_by_name:
        known = [*stages, *ensembles, *SCHEDULE.fields_by_name, *SOLVER.fields_by_name, *_ENTRY]
        hint = nearest(first, known) or f"the stages are {listing([s.name for s in schedule.stages])}"
        raise UsageError(f"`{first}` is neither a stage nor a field", hint)
    return _one(schedule, Asked(None, _follow(SCHEDULE, [first, *words])), overrides)


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
        if not is_message(field) or (field.is_repeated and field.message_type is not SOURCE):
            inside = (
                "a list of messages, and is explained whole"
                if is_message(field)
                else "not a message: nothing is inside it"
            )
            raise UsageError(f"`{word}` is {inside}", f"leave out `.{words[number + 1]}`")
        kind = field.message_type
    if found and (first := pairs(kind).get(found[-1].name)):
        found[-1] = kind.fields_by_name[first]  # `max_epoch` is part of what `max_iter` says
    return tuple(found)


# -- one field


def _one(schedule: Schedule, asked: Asked, overrides: Sequence[str]) -> str:
    said = history(schedule, overrides, asked.stage.name if asked.stage else None, asked.key)
    blocks = [_head(schedule, asked), *_course(schedule, asked, said)]
    if asked.stage is not None and asked.key == MAX_ITER:
        blocks.append(_raised(asked.stage.solver))
    return "\n\n".join([*blocks, _manual(asked.fields[-1])])


def _manual(field: FieldDescriptor) -> str:
    return help_text(f"{field.containing_type.name}.{field.name}")


def _raised(solver: Solver) -> str:
    """What a larger number would mean for a stage that is trained."""
    now = solver.max_iter
    if differs := what_end_differs(replace(solver, max_iter=now + 1), now):
        return f"raised once the stage is trained, that is stale: {differs}"
    return f"raised once the stage is trained, it goes on from iteration {now}; what started from its end is stale, unless it says `@{now}`"


def _head(schedule: Schedule, asked: Asked) -> str:
    """The name and the value; of a message, its fields."""
    name = f"{asked.stage.name}.{asked.words}" if asked.stage else asked.words
    value, inside = _held(schedule, asked)
    if value or not inside:
        return f"{name}   {value or NONE}"
    return "\n".join([name, *(f"  {line}" for line in columns(inside, 2))])


def _held(schedule: Schedule, asked: Asked) -> tuple[str, list[tuple[str, str]]]:
    """The value of the field, '' for a message, whose fields follow."""
    values, key = _values(schedule, asked.stage), asked.key
    inside = [(name.removeprefix(f"{key}."), value) for name, value in values.items() if name.startswith(f"{key}.")]
    return _value(asked.stage, key, values[key]) if key in values else "", inside


def _values(schedule: Schedule, stage: Stage | None) -> dict[str, str]:
    """Every field and its text, in the order of the recipe."""
    if stage is None:
        shared = {name: text(getattr(schedule, name)) for name in ("name", "seed", "determinism", "keep_snapshots")}
        return {**shared, **dict(leaves(schedule.model, "model")), **dict(leaves(schedule.data, "data"))}
    found = {key: value for key, value in leaves(stage.solver, "solver") if key.rpartition(".")[2] not in _GONE}
    if (images := own_images(stage.data, schedule.data)) is not None:
        found |= leaves(images, "solver.data")
    origin = stage.origins.get("solver.base_lr_batch")
    found["solver.base_lr_batch"] = origin.text if origin else NONE
    return found | {key: value for key, value in stage.identity.items() if key.startswith(CODE)}


def _value(stage: Stage | None, key: str, value: str) -> str:
    """In the units of the file and in iterations, where they are others."""
    if stage is None:
        return value
    said, written = shown(key, value, stage)
    return f"{said} ({written})" if written else said


def _course(schedule: Schedule, asked: Asked, said: Sequence[Said]) -> Iterator[str]:
    """What counts, then what it replaced, the highest layer first."""
    name = asked.fields[-1].name
    if not said or said[-1].name == "clear" or not (said[-1].text or said[-1].name == name):
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
    value = _values(schedule, asked.stage).get(asked.key)
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


class Setting(NamedTuple):
    """A field of a stage. `place`: where it is written, '' for a default."""

    name: str
    value: str
    place: str


def settings_of(schedule: Schedule, stage: Stage) -> Iterator[Setting]:
    """Every field, in the order of the recipe. Of a schedule that was read from a snapshot, which doesn't say where a setting was written,
    those that differ from their defaults stand in the snapshot's recipe."""
    values = _values(schedule, stage)
    images = "solver.transform_param."
    follows = {key.replace(".", ".test_", 1): value for key, value in values.items() if key.startswith(images)}
    follows["solver.random_seed"] = text(schedule.seed)
    follows["solver.test_batch_size"] = text(stage.solver.device_batch_size)
    for key, value in values.items():
        origin = _origin(stage, key)
        place = "" if origin is None or origin.span is None else _place(origin)
        if not stage.origins and not at_default(key, value) and value != follows.get(key):
            place = RECIPE
        yield Setting(key.removeprefix("solver."), _value(stage, key, value), place)


def _stage_table(schedule: Schedule, stage: Stage) -> str:
    """Every field: those that are written somewhere, and then the defaults."""
    found = [*settings_of(schedule, stage)]
    written = [("field", "value", "from"), *(s for s in found if s.place)]
    defaults = [("default", "value"), *(s[:2] for s in found if not s.place)]
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
        value, inside = _held(schedule, asked)
        cell = value or " ".join(f"{name}: {held}" for name, held in inside) or NONE
        rows.append((stage.name, cell, _place(_origin(stage, asked.key))))
    return "\n\n".join(["\n".join(columns(rows)), _manual(fields[-1])])
