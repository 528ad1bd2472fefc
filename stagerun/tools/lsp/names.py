"""Stages, files and inherited values: where what stands at a place is defined, and how a stage gets another name. Pure, but for `exists`."""

import posixpath
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from google.protobuf.descriptor import Descriptor

from stagerun.base.errors import Span, UsageError
from stagerun.language import stage_nodes
from stagerun.language.lexer import Kind, Token
from stagerun.language.resolve import SCHEDULE_FILE
from stagerun.language.tree import SCHEDULE
from stagerun.tools.lsp.complete import FILES, STAGES, full_name
from stagerun.tools.lsp.folder import Folder, look
from stagerun.tools.lsp.hover import asked, stage_at
from stagerun.tools.lsp.place import Place, Text, fields_in, place_at, text_in
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


# -- renaming a stage


@dataclass(frozen=True, slots=True)
class _Word:
    """A text in quotes that names a stage, and in `StageEntry.name` `defines` it."""

    path: str
    token: Token
    name: str
    defines: bool


def stage_named(place: Place | None) -> str:
    """The stage whose name stands there; ''."""
    if place is None or place.field is None or place.is_name or place.token is None:
        return ""
    known = full_name(place.field) in ("StageEntry.name", *STAGES)
    return text_in(place.token).partition("@")[0] if known else ""


def renamed(folder: Folder, texts: Mapping[str, Text], old: str, new: str) -> dict[str, list[Edit]]:
    """What to change in which file, by the files' paths. `texts`: those of the folder. UsageError where that can't be done."""
    if folder.schedule is None:
        raise UsageError("the schedule has mistakes: mend them first")
    words = [word for path, text in texts.items() for word in _words(path, text, folder.kind(path))]
    if not any(word.defines and word.name == old for word in words):
        raise UsageError(f"`{old}` is not the name of one `stage` block: its parts come from several names")
    first = posixpath.join(folder.path, SCHEDULE_FILE)
    before = [(node.name, node.group) for node in folder.nodes()]
    names = {old: new}
    for _ in before:  # the name of a stage may be part of those that start from it
        edits = _edits(folder, texts, words, names)
        text = changed_text(texts[first].text, edits.get(first, []))
        after = [(node.name, node.group) for node in stage_nodes(text)]
        if len(after) != len(before):
            break
        pairs = zip(before, after, strict=True)
        made = {a: b for was, now in pairs for a, b in zip(was, now, strict=True) if a and b and a != b}
        if made == names:
            break
        names = made | {old: new}
    changed = {path: changed_text(text.text, edits.get(path, [])) for path, text in texts.items()}
    found = look(folder.path, {**folder.typed, **changed})
    if found.schedule is None:
        raise UsageError(f"that would be a mistake: {found.mistakes[0].message}")
    if [one.identity for one in found.schedule.stages] != [one.identity for one in folder.schedule.stages]:
        raise UsageError("that would change what is trained")
    return edits


def changed_text(text: str, edits: list[Edit]) -> str:
    for edit in sorted(edits, key=lambda one: one.first, reverse=True):
        text = text[: edit.first] + edit.text + text[edit.last :]
    return text


def _words(path: str, text: Text, kind: Descriptor | None) -> Iterator[_Word]:
    for token in text.tokens() if kind is not None else ():
        if token.kind is Kind.STRING:
            place = place_at(text, kind, text.of(token)[0] + 1)
            if name := stage_named(place):
                assert place is not None and place.field is not None
                yield _Word(path, token, name, full_name(place.field) == "StageEntry.name")


def _edits(
    folder: Folder, texts: Mapping[str, Text], words: list[_Word], names: Mapping[str, str]
) -> dict[str, list[Edit]]:
    """A stage whose file is found by its name gets a `solver`."""
    own_file = {n.group or n.name for n in folder.nodes() if n.file == f"{n.group or n.name}.prototxt"}
    written = {path for path, _ in (folder.schedule.files if folder.schedule is not None else ())}
    edits: dict[str, list[Edit]] = {}
    for word in words:
        new = names.get(word.name)
        if new is None:
            continue
        first = texts[word.path].of(word.token)[0] + 1
        edits.setdefault(word.path, []).append(Edit(first, first + len(word.name), new))
        file = f"{word.name}.prototxt"
        implicit = word.defines and word.name in own_file and not _says_solver(texts[word.path], first)
        if implicit and posixpath.join(folder.path, file) in written:
            last = texts[word.path].of(word.token)[1]
            edits[word.path].append(Edit(last, last, f' solver: "{file}"'))
    return edits


def _says_solver(text: Text, offset: int) -> bool:
    """Whether the stage whose name stands there names its file."""
    place = place_at(text, SCHEDULE, offset)
    return place is not None and any(name.text == "solver" for name, _ in fields_in(text.tokens(), place.around[-1]))
