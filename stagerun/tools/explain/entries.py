"""`stagerun explain` of what stands in a schedule's `stage` and `ensemble` blocks: a stage's start, its file, an ensemble's rule."""

from collections.abc import Sequence

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from stagerun.base.errors import Problem
from stagerun.base.recipe import Ensemble, Schedule, Stage
from stagerun.base.text import columns
from stagerun.language.tree import SCHEDULE, quoted
from stagerun.language.values import NONE, text
from stagerun.manual.fields import help_text
from stagerun.tools.explain.history import Said, of_ensemble, of_stage_entry

STAGE_ENTRY: Descriptor = SCHEDULE.fields_by_name["stage"].message_type
ENSEMBLE: Descriptor = SCHEDULE.fields_by_name["ensemble"].message_type


def entry_text(schedule: Schedule, stage: Stage, field: FieldDescriptor) -> str:
    """A field of a stage's block: its value, its place, and its manual entry."""
    said = of_stage_entry(schedule, stage.name, field.name)
    blocks = [
        f"{stage.name}.{field.name}   {_entry(stage, field.name, said)}",
        *_place(said, _default(stage, field.name)),
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
        start = (stage.parent or "") + (f"@{stage.parent_iter}" if stage.parent_iter is not None else "")
        return quoted(start) + ("" if stage.parent else " (fresh weights)")
    if name == "enabled":
        return text(stage.enabled)
    if name == "solver" and said is None:
        return quoted(f"{stage.group or stage.name}.prototxt")
    return said.text if said is not None else NONE


def _default(stage: Stage, name: str) -> str:
    if name == "from":
        return "a default: the stage above" if stage.parent else "a default: there is no stage above"
    return {"solver": "a default: its name in the schedule", "sweep": "not set"}.get(name, "the default")


def overview(schedule: Schedule) -> str:
    """The stages and the ensembles, and what can be asked about them."""
    rows = [("stage", "from", "stands in")]
    for stage in schedule.stages:
        off = "" if stage.enabled else ", not enabled"
        rows.append((stage.name, _entry(stage, "from", None) + off, f"{stage.span.path}:{stage.span.line}"))
    blocks = ["\n".join(columns(rows))]
    if schedule.ensembles:
        members = [(ensemble.name, ", ".join(ensemble.members)) for ensemble in schedule.ensembles]
        blocks.append("\n".join(columns([("ensemble", "members"), *members])))
    first = schedule.stages[0].name
    asked = [
        (f"{first}.base_lr", "where a field of a stage comes from, and what it means"),
        (first, "all fields of a stage"),
        ("base_lr", "that field of every stage"),
        ("data.train.images", "a field of the schedule"),
    ]
    if schedule.ensembles:
        asked.append((f"{schedule.ensembles[0].name}.rule", "a field of an ensemble"))
    lines = [f"  {line}" for line in columns(asked, 2)]
    return "\n\n".join([*blocks, "\n".join(["Name one of them, as in", *lines])])


# -- ensembles


def ensemble_text(
    schedule: Schedule, overrides: Sequence[str], ensemble: Ensemble, fields: tuple[FieldDescriptor, ...]
) -> str:
    """One field as above, or without any of them a table of all."""
    if fields:
        (field,) = fields
        said = of_ensemble(schedule, overrides, ensemble.name, field.name)
        head = f"{ensemble.name}.{field.name}   {text(getattr(ensemble, field.name))}"
        return "\n\n".join([head, *_place(said, "the default"), _manual(field)])
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


def _place(said: Said | None, default: str) -> list[str]:
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
