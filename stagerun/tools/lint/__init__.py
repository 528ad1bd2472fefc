"""What is legal in a schedule's files and yet looks wrong: findings, each with an id that a comment silences. Pure.

`check` finds what can't be trained; lint names what one would not want to pay for without having meant it, in `check`, `plan`, `view` and
editors alike. A rule is a function Schedule -> findings and a row in RULES; `finding` deals with comments.
"""

from stagerun.base.errors import Problem, Problems
from stagerun.base.recipe import Schedule
from stagerun.tools.lint.finding import Finding, comments_of, unsilenced
from stagerun.tools.lint.rules import RULES, rules_text

__all__ = ["RULES", "Finding", "lint", "problems", "rules_text"]


def lint(schedule: Schedule) -> list[Finding]:
    """All findings that no comment silences, by place; of comments that silence nothing, too."""
    found: dict[tuple[object, ...], Finding] = {}
    for rule in RULES.values():
        for finding in rule.find(schedule):
            # What several stages inherit is found once for each of them, at one place.
            found.setdefault((finding.id, finding.span), finding)
    comments = [c for path, text in schedule.files if not path.endswith(".py") for c in comments_of(path, text)]
    return sorted(unsilenced(list(found.values()), comments, RULES), key=lambda f: (f.span, f.id))


def problems(schedule: Schedule, findings: list[Finding]) -> tuple[Problem, ...]:
    """The findings as they are shown, with the lines that they stand in."""
    shown = Problems()
    for path, text in schedule.files:
        shown.file(path, text.removeprefix("\N{BYTE ORDER MARK}"))
    for finding in findings:
        shown.add(finding.span, f"{finding.message} [{finding.id}]", finding.hint)
    return shown.all()
