"""`stagerun check`: what is wrong, or looks wrong, in a schedule's files."""

import os
from collections.abc import Iterable, Iterator, Sequence

from stagerun.base.errors import ExitCode, Level, Problem, RecipeError, StagerunError
from stagerun.base.recipe import ABSENT, CODE, Schedule, Source, Stage, Weights
from stagerun.base.text import count
from stagerun.command.ending import show, tell
from stagerun.command.options import command, flag
from stagerun.command.shared import Folder, Overrides
from stagerun.data.weights import find
from stagerun.language import digest, load, look_at_classes, look_at_folders
from stagerun.language.networks import from_outside
from stagerun.plan.described import network_change
from stagerun.tools.lint import lint


@command()
def check(
    folder: Folder,
    overrides: Overrides = (),
    fetch: bool = flag("--fetch", "First download the published weights that it starts from, to where `run` looks."),
    strict: bool = flag("--strict", "Warnings fail as mistakes do, with exit code 64."),
) -> None:
    """Finds every mistake in a schedule's files at once, in a fraction of a second, and what is legal and looks wrong:
    `stagerun help lint` lists these findings. Of weights that it starts from the headers are read, and where it has any, or freezes
    some, the network is looked at. Trains nothing."""
    schedule = load(folder, overrides)
    if fetch:
        from stagerun.tools.weights.fetch import fetch as download  # http, which is not needed else

        download(schedule)
    weights = missing_weights(stage for stage in schedule.stages if stage.enabled)
    changes = (line for stage in schedule.stages if (line := network_change(schedule, stage)))
    tell("\n".join(f"note: {line}" for line in (*missing_data(schedule), *weights, *changes)))
    findings = tell_findings(schedule, strict)
    found = [s for s in schedule.stages if s.enabled and s.solver.start is not None and _sought(s.solver.start) is None]
    if found or any(stage.enabled and stage.solver.freeze for stage in schedule.stages):
        # Torch, which takes a second, only where a network matters; and no code of the user's is run.
        from stagerun.models.skeleton import without_memory
        from stagerun.train.starting_weights import require_fitting

        outside = {stage.name for stage in schedule.stages if from_outside(stage.model)}
        known = [stage for stage in schedule.stages if stage.name not in outside]
        started = [stage for stage in found if outside.isdisjoint((stage.name, stage.parent))]
        require_fitting(schedule, started, known, without_memory)
    if refused := (*look_at_folders(schedule), *look_at_classes(schedule)):
        raise RecipeError(refused)
    show(
        f"{schedule.name}: {count(len(schedule.stages), 'stage')}, "
        f"{count(sum(s.solver.max_iter for s in schedule.stages), 'iteration')}, no mistakes, "
        f"{count(findings, 'warning') if findings else 'no warnings'}, "
        f"digest {digest(schedule)[:12]}"
    )
    tell("\n".join(f"note: {line}" for line in missing_packages(schedule)))


def missing_data(schedule: Schedule) -> Iterator[str]:
    """A sentence for each LMDB that isn't on this machine, which may be a login node."""
    for stage, field, source in named_sources(schedule):
        if not os.path.exists(source.path):
            yield f"{field_in(schedule, stage, field)}: there is no LMDB at {source.path} on this machine; `run` will need it"


def missing_weights(stages: Iterable[Stage]) -> Iterator[str]:
    """A sentence for each file of weights of these stages that isn't on this machine, which may be a login node."""
    for stage in stages:
        weights = stage.solver.start
        if weights is not None and (error := _sought(weights)) is not None:
            hint = f"; {error.hint}" if error.hint else ""
            field = stage.solver.start_field.removeprefix("solver.")
            yield f"{stage.name}.{field}: {error.message}: `run` will refuse this{hint}"


def _sought(weights: Weights) -> StagerunError | None:
    try:
        find(weights)
    except StagerunError as error:
        return error
    return None


def field_in(schedule: Schedule, stage: Stage, field: str) -> str:
    """`data.val`, or where the stage has images of its own `two.data.val`."""
    kind = field.split(".")[1]
    return field if getattr(stage.data, kind) == getattr(schedule.data, kind) else f"{stage.name}.{field}"


def named_sources(schedule: Schedule) -> Iterator[tuple[Stage, str, Source]]:
    """Each set of the enabled stages once: the stage that has it first, its field there, as `data.val`, and itself."""
    seen: set[tuple[str, int]] = set()
    for stage in (stage for stage in schedule.stages if stage.enabled):
        vals = (("data.val" if n == 0 else f"data.val.{val.name}", val) for n, val in enumerate(stage.data.val))
        for field, source in (("data.train", stage.data.train), *vals):
            if (source.path, source.images) not in seen:
                seen.add((source.path, source.images))
                yield stage, field, source


def missing_packages(schedule: Schedule) -> Iterator[str]:
    """A sentence for each package that makes a network or something else, and isn't on this machine."""
    found = {key.removeprefix(CODE) for s in schedule.stages for key, text in s.identity.items() if text == ABSENT}
    for name in sorted(found):
        yield f"`{name}` is not installed on this machine; `run` will need it"


_SILENCED = (
    "what is meant is silenced by a comment, `# lint: ignore ID`, in its line or the one above: `stagerun help lint`"
)


class Suspicious(StagerunError):
    """Findings, with --strict. The exit code is that of a mistake: a script that checks before it runs should stop here, too."""

    exit_code = ExitCode.RECIPE

    def __init__(self, found: Sequence[Problem]) -> None:
        super().__init__(count(len(found), "warning"), _SILENCED)
        self.problems = tuple(found)

    def render(self) -> str:
        return "\n\n".join([*(p.render() for p in self.problems), super().render()])


def tell_findings(schedule: Schedule, strict: bool = False) -> int:
    """Show all that lint finds; return the number of warnings. Suspicious if there are any and they count as mistakes."""
    found = lint(schedule)
    warnings = [problem for problem in found if problem.level is Level.WARNING]
    notes = "\n".join(problem.render() for problem in found if problem.level is Level.NOTE)
    tell(notes + "\n" * bool(notes and warnings))
    if warnings and strict:
        raise Suspicious(warnings)
    if warnings:
        tell("\n\n".join(problem.render() for problem in warnings))
        tell(f"\nhint: {_SILENCED}\n")
    return len(warnings)
