"""Stages, files and inherited values: where what stands at a place is defined. Pure, but for `exists`."""

import posixpath
from collections.abc import Callable
from dataclasses import dataclass

from stagerun.base.errors import Span
from stagerun.language.resolve import SCHEDULE_FILE
from stagerun.tools.lsp.complete import FILES, STAGES, full_name
from stagerun.tools.lsp.folder import Folder
from stagerun.tools.lsp.hover import asked, stage_at
from stagerun.tools.lsp.place import Place, Text, text_in
from stagerun.tools.plan.history import history


@dataclass(frozen=True, slots=True)
class Edit:
    """`text` takes the place of what stands there from offset `first` to `last`."""

    first: int
    last: int
    text: str


def definition_of(folder: Folder, path: str, text: Text, place: Place, exists: Callable[[str], bool]) -> Span | None:
    """The block of a stage that is named, the start of a file, or the value that a field in a stage replaces."""
    if place.field is None or place.token is None:
        return None
    name, value = full_name(place.field), text_in(place.token)
    if place.is_name:
        return _inherited(folder, path, text, place)
    if name in STAGES:
        stage = value.partition("@")[0]
        found = next((node.place for node in folder.nodes() if stage in (node.name, node.group)), None)
        return (
            Span(posixpath.join(folder.path, SCHEDULE_FILE), found.line, found.column, found.width) if found else None
        )
    if name == "StageEntry.name":
        value = next((node.file or "" for node in folder.nodes() if value in (node.name, node.group)), "")
    elif name not in FILES:
        return None
    target = posixpath.join(folder.path, value)
    return Span(target, 1, 1) if value and exists(target) else None


def _inherited(folder: Folder, path: str, text: Text, place: Place) -> Span | None:
    schedule, name = folder.schedule, asked(folder, path, text, place)
    if schedule is None or not name:
        return None
    said_in, _, key = name.partition(".")
    stage = next((one for one in schedule.stages if said_in in (one.name, one.group)), None)
    if stage is None or stage_at(folder, path, text, place) != said_in or f"solver.{key}" not in stage.origins:
        return None
    spans = [one.span for one in history(schedule, (), stage.name, f"solver.{key}")]
    here = place.token.line if place.token is not None else 0
    own = next((n for n, span in enumerate(spans) if (span.path, span.line) == (path, here)), len(spans))
    return spans[own - 1] if own else None


def changed_text(text: str, edits: list[Edit]) -> str:
    for edit in sorted(edits, key=lambda one: one.first, reverse=True):
        text = text[: edit.first] + edit.text + text[edit.last :]
    return text
