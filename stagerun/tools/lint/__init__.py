"""Findings: what is legal in a schedule's files and looks wrong, or is good to know. A comment silences each.

A mistake can't be trained and fails while the files are read (`language.rules`). A warning names what costs something and is rarely
meant; a note, what the files don't show. `check`, `plan`, `view` and editors show the same findings. A new rule is a row of a file's
`RULES`, or a row and a function, and its case in tests/golden/lint.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from stagerun.base.errors import Level, Problem, Problems, Span, listing, nearest
from stagerun.base.recipe import Schedule
from stagerun.base.text import columns
from stagerun.language.lexer import tokens
from stagerun.language.rules.rule import Found, Rule, run
from stagerun.tools.lint import rates, settings

__all__ = ["RULES", "lint", "rules_text"]

_ID = "lint-comment"
_HINT = "write `# lint: ignore lr-jump`, say, in the line of the finding or above it, or at the head of the file"
_COMMENT = re.compile(r"#+\s*lint\s*:(?:\s*ignore\b([^:]*))?")
_HELP = """lint: what is legal in a schedule and looks wrong, or is good to know (`stagerun check DIR`)

{rows}

A comment silences one where it is meant: in its line, in the line above, or at the head of a file for all of that file.

  # lint: ignore lr-jump, zero-parent: what the published run did"""


def lint(schedule: Schedule, published: rates.Published = lambda name: None) -> tuple[Problem, ...]:
    """Return the findings that no comment silences, and comments that silence nothing, by place. Warnings carry their source line. `published`:
    looks published weights up, which takes torch."""
    texts = [(path, text.removeprefix("\N{BYTE ORDER MARK}")) for path, text in schedule.files]
    problems = Problems(texts)
    run(_RULES, problems, [rates.StageFacts(schedule, stage, published) for stage in schedule.stages])
    ids = [one for path, text in texts if not path.endswith(".py") for one in silenced(path, text)]
    run([RULES[_ID]], problems, ids, problems.all(), RULES)
    kept = [one for one in problems.all() if not any(id.covers(one) for id in ids)]
    return tuple(sorted(kept, key=lambda one: (one.span, one.id)))


def rules_text() -> str:
    """Return the page of `stagerun help lint`."""
    rows = [(f"  {rule.id}", rule.level.value, rule.purpose) for rule in RULES.values()]
    return _HELP.format(rows="\n".join(columns(rows)))


@dataclass(frozen=True, slots=True)
class Silenced:
    """An id in a comment, '' if the comment names none. It covers `lines` of the file; None: the whole file."""

    id: str
    span: Span
    lines: tuple[int, int] | None

    def covers(self, finding: Problem) -> bool:
        near = self.lines is None or finding.span.line in self.lines
        return near and finding.span.path == self.span.path and finding.id == self.id != _ID


def silenced(path: str, text: str) -> Iterator[Silenced]:
    """Yield the ids in a text's comments. A comment covers its line and the next line that holds more than a comment; before the first field,
    the whole file. A `#` inside a string starts no comment."""
    if not _COMMENT.search(text):
        return
    lines, ends = text.split("\n"), {}
    for token in tokens(text)[:-1]:
        ends[token.line] = token.column - 1 + len(token.text)
    bare = {number for number, line in enumerate(lines, 1) if line.lstrip().startswith("#") and number not in ends}
    for number, line in enumerate(lines, 1):
        if (comment := _COMMENT.search(line, ends.get(number, 0))) is None:
            continue
        below = next(n for n in count(number + 1) if n not in bare)
        covered = (number, below) if number >= min(ends, default=number + 1) else None
        ids = [(word[0], *word.span()) for word in re.compile(r"[^\s,]+").finditer(line, *comment.span(1))]
        for id, start, end in ids or [("", comment.start(), len(line))]:
            yield Silenced(id, Span(path, number, start + 1, end - start), covered)


def _idle(ids: Sequence[Silenced], findings: Sequence[Problem], rules: Mapping[str, Rule]) -> Found:
    for one in ids:
        if not one.id:
            yield one.span, "a comment for lint that names nothing to ignore", _HINT
        elif one.id == _ID or one.id not in rules:
            allowed = sorted(rules.keys() - {_ID})
            hint = nearest(one.id, allowed) or f"the ids are {listing(allowed)}"
            yield one.span, f"`{one.id}` isn't an id that can be silenced", hint
        elif not rules[one.id].looks and not any(map(one.covers, findings)):
            where = "in this file" if one.lines is None else "here"
            yield one.span, f"`{one.id}` is silenced, and {where} is nothing to silence", _HINT


_RULES = (*rates.RULES, *settings.RULES)
_SELF = Rule(_ID, _idle, Level.WARNING, "a comment for lint that does nothing; can't be silenced")
RULES = {rule.id: rule for rule in (*_RULES, _SELF)}
