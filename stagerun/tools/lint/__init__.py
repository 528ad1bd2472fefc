"""What is legal in a schedule's files and yet looks wrong, or is good to know: findings, each of a rule that a comment silences.

A mistake can't be trained, and fails while the files are read (`language.rules`). A warning names what one would not want to pay for without
having meant it, a note what the learning rate does that the files don't show; `check`, `plan`, `view` and editors show the same ones. A new
rule is a function and a row of a file's `RULES`; and its case in tests/golden/lint.
"""

from stagerun.base.errors import Level, Problem, Problems
from stagerun.base.recipe import Schedule
from stagerun.base.text import columns
from stagerun.language.rules.rule import Rule, run
from stagerun.tools.lint import images, rates, settings, workers
from stagerun.tools.lint.comments import ID, idle, words_in
from stagerun.tools.lint.looked import looked_at

__all__ = ["RULES", "lint", "rules_text"]

_COMMENTS = Rule(ID, idle, Level.WARNING, "a comment for lint that does nothing; can't be silenced")
_FOUND = (*rates.RULES, *settings.RULES, *images.RULES, *workers.RULES)
RULES = {rule.id: rule for rule in (*_FOUND, _COMMENTS)}


def lint(schedule: Schedule) -> tuple[Problem, ...]:
    """All findings that no comment silences, by place; of comments that silence nothing, too. Warnings have the line that they stand in."""
    problems = Problems((path, text.removeprefix("\N{BYTE ORDER MARK}")) for path, text in schedule.files)
    run(_FOUND, problems, looked_at(schedule))
    found = problems.all()
    words = [word for path, text in schedule.files if not path.endswith(".py") for word in words_in(path, text)]
    run([_COMMENTS], problems, words, found, RULES)
    kept = [one for one in problems.all() if not any(word.speaks_of(one) for word in words)]
    return tuple(sorted(kept, key=lambda one: (one.span, one.id)))


def rules_text() -> str:
    """The ids, what each is for, and how a comment silences one."""
    rows = [(f"  {rule.id}", rule.level.value, rule.purpose) for rule in RULES.values()]
    return "\n".join(
        [
            "lint: what is legal in a schedule and looks wrong, or is good to know (`stagerun check DIR`)",
            "",
            *columns(rows),
            "",
            "A comment silences one where it is meant: in its line, in the line above, or at the head of a file for all of that file.",
            "",
            "  # lint: ignore lr-jump, zero-parent: what the published run did",
        ]
    )
