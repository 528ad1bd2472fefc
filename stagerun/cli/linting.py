"""`stagerun check --lint`: findings as a user sees them, and the exit code."""

from collections.abc import Sequence

from stagerun.errors import ExitCode, Problem, StagerunError
from stagerun.plan.lint import lint, problems
from stagerun.recipe import Schedule
from stagerun.text import count


class Suspicious(StagerunError):
    """What lint found. The exit code is that of a mistake: a script that checks before it runs should stop here, too."""

    exit_code = ExitCode.RECIPE

    def __init__(self, found: Sequence[Problem]) -> None:
        super().__init__(
            count(len(found), "finding"),
            "what is meant is silenced by a comment, `# lint: ignore ID`, in its line or the one above: `stagerun help lint`",
        )
        self.problems = tuple(found)

    def render(self) -> str:
        return "\n\n".join([*(p.render() for p in self.problems), super().render()])


def require_nothing_found(schedule: Schedule) -> None:
    """Suspicious with all that lint finds."""
    if found := lint(schedule):
        raise Suspicious(problems(schedule, found))
