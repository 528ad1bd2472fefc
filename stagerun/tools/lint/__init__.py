"""What is legal in a schedule's files and yet looks wrong, or is good to know: findings, each of a rule that a comment silences. Pure.

A mistake can't be trained, and fails while the files are read (`language`). A warning names what one would not want to pay for without
having meant it, a note what the learning rate does that the files don't show; `check`, `plan`, `view` and editors show the same ones. A rule
is a function Schedule -> what it finds, and a row in RULES; `finding` deals with comments.
"""

from stagerun.base.errors import Level, Problem, Problems
from stagerun.base.recipe import Schedule
from stagerun.tools.lint.finding import Finding, comments_of, unsilenced
from stagerun.tools.lint.rules import RULES, rules_text

__all__ = ["RULES", "Finding", "lint", "problems", "rules_text"]


def lint(schedule: Schedule) -> list[Finding]:
    """All findings that no comment silences, by place; of comments that silence nothing, too."""
    found: dict[tuple[object, ...], Finding] = {}
    for id, rule in RULES.items():
        for message, span, hint in rule.find(schedule):
            # What several stages inherit is found once for each of them, at one place.
            found.setdefault((id, span), Finding(id, message, span, hint))
    comments = [c for path, text in schedule.files if not path.endswith(".py") for c in comments_of(path, text)]
    return sorted(unsilenced(list(found.values()), comments, RULES), key=lambda f: (f.span, f.id))


def problems(schedule: Schedule, findings: list[Finding]) -> tuple[Problem, ...]:
    """The findings as they are shown: warnings with the lines that they stand in, notes without."""
    lines = Problems((path, text.removeprefix("\N{BYTE ORDER MARK}")) for path, text in schedule.files)
    levels = [(one, RULES[one.id].level) for one in findings]
    return tuple(
        Problem(
            f"{one.message} [{one.id}]",
            one.span,
            lines.line(one.span) if level is Level.WARNING else "",
            one.hint,
            level,
        )
        for one, level in levels
    )
