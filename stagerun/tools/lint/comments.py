"""Comments in solver files that silence findings, as `# lint: ignore lr-jump`. Pure.

Such a comment speaks of findings in its own line and in the next below, other lines of comments left out; before the first field of a file it
speaks of the whole file. Behind a colon it may say why.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from stagerun.base.errors import Problem, Span, listing, nearest
from stagerun.language.lexer import tokens
from stagerun.language.rules.rule import Found, Rule

ID = "lint-comment"
HINT = "write `# lint: ignore lr-jump`, say, in the line of the finding or above it, or at the head of the file"

_MEANT = re.compile(r"#+\s*lint\s*:(?:\s*ignore\b([^:]*))?")
_WORD = re.compile(r"[^\s,]+")


@dataclass(frozen=True, slots=True)
class Word:
    """An id in a comment; '' where it names none. It speaks of the findings in `lines` of the file, or, where that is None, in all of it."""

    id: str
    span: Span
    lines: tuple[int, ...] | None

    def speaks_of(self, finding: Problem) -> bool:
        here = finding.span.path == self.span.path and (self.lines is None or finding.span.line in self.lines)
        return here and finding.id == self.id != ID


def words_in(path: str, text: str) -> Iterator[Word]:
    """The ids in the comments of a text that are meant to silence. A `#` inside a string is no comment."""
    if not _MEANT.search(text):
        return
    ends: dict[int, int] = {}  # of the last token in a line
    lines = text.removeprefix("\N{BYTE ORDER MARK}").split("\n")
    for token in tokens("\n".join(lines))[:-1]:
        ends[token.line] = token.column - 1 + len(token.text)
    comments = {n: at for n, line in enumerate(lines, 1) if (at := line.find("#", ends.get(n, 0))) >= 0}
    for number, at in comments.items():
        line = lines[number - 1].rstrip()
        match = _MEANT.match(line, at)
        if match is None:
            continue
        below = next(n for n in count(number + 1) if n not in comments or n in ends)
        spoken = (number, below) if number >= min(ends, default=number + 1) else None
        words = list(_WORD.finditer(line, *match.span(1)))
        for word in words:
            yield Word(word[0], Span(path, number, word.start() + 1, len(word[0])), spoken)
        if not words:
            yield Word("", Span(path, number, at + 1, len(line) - at), spoken)


def idle(words: Sequence[Word], findings: Sequence[Problem], known: Mapping[str, Rule]) -> Found:
    """What is wrong with comments, or ids in them, that do nothing."""
    for word in words:
        if not word.id:
            yield word.span, "a comment for lint that names nothing to ignore", HINT
        elif word.id not in known or word.id == ID:
            ids = sorted(set(known) - {ID})
            hint = nearest(word.id, ids) or f"the ids are {listing(ids)}"
            yield word.span, f"`{word.id}` isn't an id that can be silenced", hint
        elif not known[word.id].looks and not any(map(word.speaks_of, findings)):
            where = "in this file" if word.lines is None else "here"
            yield word.span, f"`{word.id}` is silenced, and {where} is nothing to silence", HINT
