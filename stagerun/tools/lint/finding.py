"""What a rule finds; the comments of a solver file, and which findings they silence. Pure."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from stagerun.base.errors import Level, Span, listing, nearest
from stagerun.base.recipe import Schedule, Stage
from stagerun.language.lexer import Kind, tokens


@dataclass(frozen=True, slots=True)
class Finding:
    id: str
    message: str
    span: Span
    hint: str = ""


Found = tuple[str, Span, str]  # what a rule says, of what place, and a hint


@dataclass(frozen=True, slots=True)
class Rule:
    """`purpose`: what a file that the rule finds nothing in is spared, one line. `looks`: it depends on images that may be elsewhere."""

    find: Callable[[Schedule], Iterable[Found]]
    purpose: str
    level: Level = Level.WARNING
    looks: bool = False


def each(find: Callable[[Schedule, Stage], Iterable[Found]]) -> Callable[[Schedule], Iterable[Found]]:
    """Makes a rule for schedules of one for a stage."""
    return lambda schedule: (found for stage in schedule.stages for found in find(schedule, stage))


def place_of(stage: Stage, *fields: str) -> Span:
    """Where the first of these fields of Solver that is written stands; where none is, the stage's own line."""
    return stage.written(*(f"solver.{field}" for field in fields)) or stage.span


# -- comments


@dataclass(frozen=True, slots=True)
class Comment:
    """`text` from its `#` to the line's end; `column` is that of the `#`. `alone`: nothing else stands in the line. `head`: no
    field stands before it in the file."""

    path: str
    line: int
    column: int
    text: str
    alone: bool
    head: bool


def comments_of(path: str, text: str) -> Iterator[Comment]:
    """All comments of a text, in its order. A `#` inside a string does not count."""
    text = text.removeprefix("\N{BYTE ORDER MARK}")
    ends: dict[int, int] = {}  # of the last token in a line
    first = len(text)
    for token in tokens(text):
        if token.kind is not Kind.END:
            ends[token.line] = token.column - 1 + len(token.text)
            first = min(first, token.line)
    for number, line in enumerate(text.split("\n"), 1):
        end = ends.get(number, 0)
        at = line.find("#", end)
        if at >= 0:
            yield Comment(path, number, at + 1, line[at:].rstrip(), number not in ends, number < first)


# -- `# lint: ignore lr-jump`
#
# Such a comment speaks of findings in its own line and in the next below, other lines of comments left out; before the first
# field of a file it speaks of the whole file. Behind a colon it may say why.

ID = "lint-comment"
HINT = "write `# lint: ignore lr-jump`, say, in the line of the finding or above it, or at the head of the file"

_MEANT = re.compile(r"#+\s*lint\s*:")
_IGNORE = re.compile(r"#+\s*lint\s*:\s*ignore\b([^:]*)")
_WORD = re.compile(r"[^\s,]+")


@dataclass(frozen=True, slots=True)
class _Word:
    """An id in a comment. It speaks of the findings in `lines` of the file, or, where that is None, in all of it."""

    id: str
    span: Span
    lines: tuple[int, ...] | None

    def speaks_of(self, finding: Finding) -> bool:
        here = finding.span.path == self.span.path and (self.lines is None or finding.span.line in self.lines)
        return here and finding.id == self.id


def unsilenced(
    findings: Sequence[Finding], comments: Sequence[Comment], known: Mapping[str, Rule]
) -> Iterator[Finding]:
    """The findings of which no comment speaks, and one for each comment, or id in it, that does nothing."""
    words, wrong = _words(comments)
    silenced: set[int] = set()
    for word in words:
        spoken = [n for n, finding in enumerate(findings) if word.speaks_of(finding)]
        silenced.update(spoken)
        if word.id not in known or word.id == ID:
            ids = sorted(set(known) - {ID})
            hint = nearest(word.id, ids) or f"the ids are {listing(ids)}"
            wrong.append(Finding(ID, f"`{word.id}` isn't an id that can be silenced", word.span, hint))
        elif not spoken and not known[word.id].looks:
            where = "in this file" if word.lines is None else "here"
            wrong.append(Finding(ID, f"`{word.id}` is silenced, and {where} is nothing to silence", word.span, HINT))
    yield from (finding for n, finding in enumerate(findings) if n not in silenced)
    yield from wrong


def _words(comments: Sequence[Comment]) -> tuple[list[_Word], list[Finding]]:
    """The ids in comments that are meant to silence, and what can't be read of such comments."""
    alone = {(c.path, c.line) for c in comments if c.alone}
    words: list[_Word] = []
    wrong: list[Finding] = []
    for comment in comments:
        if not _MEANT.match(comment.text):
            continue
        match = _IGNORE.match(comment.text)
        found = list(_WORD.finditer(match.group(1))) if match else []
        if match is None or not found:
            span = Span(comment.path, comment.line, comment.column, len(comment.text))
            wrong.append(Finding(ID, "a comment for lint that names nothing to ignore", span, HINT))
            continue
        lines = None if comment.head else _lines(comment, alone)
        for word in found:
            column = comment.column + match.start(1) + word.start()
            words.append(_Word(word.group(), Span(comment.path, comment.line, column, len(word.group())), lines))
    return words, wrong


def _lines(comment: Comment, alone: Collection[tuple[str, int]]) -> tuple[int, ...]:
    """The comment's own line, and the next that is not a comment alone."""
    below = comment.line + 1
    while (comment.path, below) in alone:
        below += 1
    return comment.line, below
