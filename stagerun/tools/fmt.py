"""`stagerun fmt`: solver files in one style, their comments kept.

Lines stay where the author broke them, except that a message or list of several lines has its brackets at the ends of lines. Two spaces
per level, one between fields; comments behind short lines are in one column.
"""

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path

from stagerun.base.errors import Problems, RecipeError, Span, UsageError
from stagerun.base.text import count
from stagerun.command.ending import tell
from stagerun.command.options import argument, command, flag
from stagerun.language import Unreadable, files_in
from stagerun.language.lexer import CLOSING, Kind, Token, tokens
from stagerun.language.parse import parse
from stagerun.language.resolve import SCHEDULE_FILE
from stagerun.language.tree import SCHEDULE, SOLVER
from stagerun.system.files import require_writable, write_whole, writing

COMMENT_COLUMN = 34  # of comments behind short lines, from 0
_BRACES = {"<": "{", ">": "}"}
_NOTHING = Token(Kind.END, "", 0, 0)  # before the first token, and behind the last


@command()
def fmt(
    folders: tuple[str, ...] = argument("DIR..."),
    check: bool = flag("--check", "Write nothing. Name the files that are not in this style, and fail if any is not."),
) -> None:
    """Writes schedule.prototxt and the stages' files in one style. Comments and line breaks stay, and so does the meaning.

    Two spaces per level, one between fields, `"` around texts, no separators. A message of several lines has its braces at the ends of
    lines. If one file has a mistake, no file is changed.
    """
    texts = _texts(folders)
    changed = {path: new for path, old in texts.items() if (new := formatted(old)) != old}
    for path, new in changed.items():
        if not check:
            _write(Path(path), new)
        tell(f"{path}: {'not formatted' if check else 'formatted'}")
    files = f"{len(changed)} of {count(len(texts), 'file')}"
    if check and changed:
        raise UsageError(f"{files} not formatted", "`stagerun fmt DIR` formats them")
    tell(f"{files} changed")


def _texts(folders: tuple[str, ...]) -> dict[str, str]:
    """Read the files by the path as the user wrote it. RecipeError for syntax errors and unknown fields; values are not checked."""
    problems = Problems()
    texts: dict[str, str] = {}
    for folder in map(os.path.normpath, folders):
        for name, text in files_in(folder).items():
            path = os.path.join("" if folder == "." else folder, name)
            if isinstance(text, Unreadable):
                problems.add(Span(path, 1, 1), text.reason)
            else:
                parse(path, text, SCHEDULE if name == SCHEDULE_FILE else SOLVER, problems)
                texts[path] = text.decode(errors="replace") if isinstance(text, bytes) else text
    if problems:
        raise RecipeError(problems.all())
    return texts


def _write(path: Path, text: str) -> None:
    """Replace a file, or what a link points to, at once; the mode stays. PermissionDenied for a read-only file."""
    require_writable(path)
    with writing(path):
        real = path.resolve()
        mode = stat.S_IMODE(real.stat().st_mode)
        write_whole(real, text.encode())
        real.chmod(mode)


# -- the style


@dataclass(slots=True)
class _Row:
    """A line of the result. `depth`: of the brackets of several lines around it. `comment`: behind the tokens, or alone. `blank`: a blank
    line comes before."""

    depth: int
    tokens: list[Token]
    comment: str = ""
    blank: bool = False

    def line(self) -> str:
        text = "  " * self.depth + _spaced(self.tokens)
        behind = "  " if self.tokens and self.comment else ""
        return (text + behind).ljust(COMMENT_COLUMN if behind else 0) + self.comment


def formatted(text: str) -> str:
    """Return a text in which `parse` finds no mistake in one style. The result means the same, and formatting it again changes nothing."""
    text = text.removeprefix("\N{BYTE ORDER MARK}")
    rows = _rows(text)
    lines = [line.rstrip() for row in rows for line in ([""] * row.blank + [row.line()])]
    result = "".join(f"{line}\n" for line in lines)
    assert meaning(result) == meaning(text), "a formatter may not change what a file means"
    return result


def meaning(text: str) -> list[str]:
    """Return the tokens without what can be left out or written in two ways: separators, colons before messages, quotes."""
    return [_shown(token) for token in _needed(tokens(text)[:-1])]


def _shown(token: Token) -> str:
    text = token.text
    if token.kind is Kind.STRING and text[0] == "'" and not any(c in text for c in '"\\'):
        return f'"{text[1:-1]}"'
    return _BRACES.get(text, text) if token.kind is Kind.MARK else text


def _opens(token: Token) -> bool:
    return token.kind is Kind.MARK and token.text in CLOSING


def _closes(token: Token) -> bool:
    return token.kind is Kind.MARK and token.text in CLOSING.values()


def _needed(words: Sequence[Token]) -> Iterator[Token]:
    """Drop separators outside of lists, and colons before messages."""
    around = [""]
    for token, following in pairwise((*words, _NOTHING)):
        if _opens(token):
            around.append(token.text)
        elif _closes(token):
            around.pop()
        elif (token.text in (",", ";") and around[-1] != "[") or (token.text == ":" and following.text in ("{", "<")):
            continue
        yield token


def _rows(text: str) -> list[_Row]:
    words = list(_needed(tokens(text)[:-1]))
    opening, closing = _brackets_of_several_lines(words)
    by_line = {number: list(group) for number, group in groupby(words, key=lambda token: token.line)}
    rows, depth, blank, last = list[_Row](), 0, False, _NOTHING
    for number, line in enumerate(text.split("\n"), 1):
        here = by_line.get(number, [])
        rest = line[here[-1].column - 1 + len(here[-1].text) :] if here else line
        comment = rest[rest.index("#") :].strip() if "#" in rest else ""
        for token in here:
            depth -= token in closing
            unfinished = (
                last.text == ":"
                or (last.kind is token.kind is Kind.STRING)
                or (_opens(token) and last.kind is Kind.WORD)
            )
            together = last.line == number or (unfinished and last.kind is not Kind.STRING)
            together = together and last not in opening | closing and token not in closing
            if rows and not rows[-1].comment and (together or token.text in (":", ",")):
                rows[-1].tokens.append(token)
            else:
                inner = rows and opening.isdisjoint(rows[-1].tokens[-1:]) and token not in closing
                rows.append(_Row(depth + 2 * unfinished, [token], blank=bool(blank and inner)))
            depth += token in opening
            last, blank = token, False
        if here:
            rows[-1].comment = comment
        elif comment:
            rows.append(_Row(depth, [], comment, blank and bool(rows) and opening.isdisjoint(rows[-1].tokens[-1:])))
        blank = not here and not comment
    return rows


def _brackets_of_several_lines(words: Sequence[Token]) -> tuple[set[Token], set[Token]]:
    opening, closing, pending = set[Token](), set[Token](), list[Token]()
    for token in words:
        if _opens(token):
            pending.append(token)
        elif _closes(token) and (first := pending.pop()).line != token.line:
            opening.add(first)
            closing.add(token)
    return opening, closing


def _spaced(words: Sequence[Token]) -> str:
    text = ""
    for token, following in pairwise((*words, _NOTHING)):
        text += _shown(token)
        if token.text != "[" and following.text not in (":", ",", "]", ""):
            text += " "
    return text
