"""`stagerun check`: what is wrong, or looks wrong, in a schedule's files."""

import os
from collections.abc import Iterator, Sequence

from stagerun.base.errors import ExitCode, Problem, StagerunError
from stagerun.base.recipe import Data, Schedule
from stagerun.base.text import count
from stagerun.command.ending import show, tell
from stagerun.command.options import command, flag
from stagerun.command.shared import Folder, Overrides
from stagerun.language import digest, load, look_at_classes
from stagerun.plan.weights_table import network_change


@command()
def check(
    folder: Folder,
    overrides: Overrides = (),
    lint: bool = flag("--lint", "Also what is legal and looks wrong; `stagerun help lint` lists it."),
) -> None:
    """Finds every mistake in a schedule's files at once, in a fraction of a second. Trains nothing."""
    schedule = load(folder, overrides)
    changes = (line for stage in schedule.stages if (line := network_change(schedule, stage)))
    tell("\n".join(f"note: {line}" for line in (*missing_data(schedule.data), *changes)))
    if lint:
        require_nothing_found(schedule)
    show(
        f"{schedule.name}: {count(len(schedule.stages), 'stage')}, "
        f"{count(sum(s.solver.max_iter for s in schedule.stages), 'iteration')}, no mistakes{', no findings' * lint}, "
        f"digest {digest(schedule)[:12]}"
    )
    if (problem := look_at_classes(schedule)) is not None:
        tell(f"note: `run` will refuse this:\n{problem.render()}")


def missing_data(data: Data) -> Iterator[str]:
    """A sentence for each LMDB that isn't on this machine, which may be a login node."""
    for field, source in (("data.train", data.train), ("data.val", data.val)):
        if source is not None and not os.path.exists(source.path):
            yield f"{field}: there is no LMDB at {source.path} on this machine; `run` will need it"


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
    from stagerun.tools.lint import lint, problems

    if found := lint(schedule):
        raise Suspicious(problems(schedule, found))
