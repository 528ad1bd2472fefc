"""The rule about fields that are written and that no stage reads: `unread-field`. Pure."""

from collections.abc import Iterator

from stagerun.errors import Span
from stagerun.plan.lint.finding import Finding
from stagerun.plan.update import unread_fields
from stagerun.recipe import Schedule, Stage


def unread_field(schedule: Schedule) -> Iterator[Finding]:
    """One for each line that sets such a field, whichever stages inherit it; a line that one of them reads is none. What
    `--set` says stands in no file.
    """
    unread = {stage.name: unread_fields(stage) for stage in schedule.stages}
    read: set[Span] = set()
    for stage in schedule.stages:
        read |= _written(stage, but_for=[u.field for u in unread[stage.name]])
    for stage in schedule.stages:
        for field in unread[stage.name]:
            if field.origin.layer == "--set" or field.span in read:
                continue
            text = f"`{field.name}` is not read in stage `{stage.name}`{_reason(field.why)}"
            yield Finding("unread-field", text, field.span, "take it out, or is another policy or type meant?")


def _written(stage: Stage, but_for: list[str]) -> set[Span]:
    """Where the fields of Solver stand that the stage has, leaving some out."""
    left_out = {f"solver.{field}" for field in but_for}
    return {o.span for key, o in stage.origins.items() if o.span is not None and key not in left_out}


def _reason(why: str) -> str:
    return why if why.startswith(":") else f",{why}"
