"""Mistakes that can be mended by what their hint says: ``did you mean `x`?``, ``write `x: 1` ``. Pure, but for the reading of the folder.

A hint is for people, so that it doesn't say how far the words go that it stands for. Each edit is tried: only one that mends the mistake is
offered.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from stagerun.base.errors import Problem
from stagerun.language.lexer import Kind
from stagerun.tools.lsp.folder import Folder, look
from stagerun.tools.lsp.names import Edit, changed_text
from stagerun.tools.lsp.place import Text

_HINTS = (
    re.compile(r"^did you mean `([^`]+)`\?$"),
    re.compile(r"^write (?:`:` in place of `=`: )?`([^`]+)`"),
    re.compile(r"^write (-?\d+)$"),
)
_OPEN = ("...", "NAME", "FIELD")  # what a hint leaves open


@dataclass(frozen=True, slots=True)
class Fix:
    title: str
    edit: Edit


def fix(folder: Folder, text: Text, problem: Problem) -> Fix | None:
    """None where the hint can't be followed to the letter."""
    meant = next((found[1] for hint in _HINTS if (found := hint.search(problem.hint))), "")
    if not meant or any(word in meant for word in _OPEN):
        return None
    line = problem.span.path, problem.span.line
    before = _in_line(line, folder)
    for edit in _edits(text, problem, meant):
        after = _in_line(line, look(folder.path, {**folder.typed, problem.span.path: changed_text(text.text, [edit])}))
        if after < before and problem.message not in after:
            return Fix(f"write `{meant}`", edit)
    return None


def _in_line(line: tuple[str, int], folder: Folder) -> set[str]:
    """What is wrong in a line of a file."""
    return {p.message for p in folder.mistakes if (p.span.path, p.span.line) == line}


def _edits(text: Text, problem: Problem, meant: str) -> Iterator[Edit]:
    """The word alone, with its quotes and its `@` where it has them; then with the words beside it in its line."""
    first, last = text.ends(problem.span)
    stood = text.text[first:last]
    if stood[:1] in ('"', "'") and meant[:1] not in ('"', "'"):
        at = stood[1:].removesuffix(stood[0]).partition("@")
        yield Edit(first, last, f"{stood[0]}{meant}{at[1]}{at[2]}{stood[0]}")
    yield Edit(first, last, meant)
    line = [token for token in text.tokens() if token.line == problem.span.line and token.kind is not Kind.END]
    here = next((n for n, token in enumerate(line) if text.of(token)[0] >= first), 0)
    for before, after in ((0, 1), (0, 2), (2, 0)):
        if here - before >= 0 and here + after < len(line):
            yield Edit(text.of(line[here - before])[0], text.of(line[here + after])[1], meant)
