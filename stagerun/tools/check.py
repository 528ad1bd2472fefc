"""`stagerun check`: what is wrong, or looks wrong, in a schedule's files."""

import os
from collections.abc import Iterable, Iterator

from stagerun.base.errors import Level, Problems, RecipeError, StagerunError, UsageError
from stagerun.base.recipe import ABSENT, CODE, Schedule, Source, Stage
from stagerun.base.text import count
from stagerun.base.weights import Preprocessing
from stagerun.command.ending import show, tell
from stagerun.command.options import command, flag
from stagerun.command.shared import Folder, Overrides
from stagerun.data.weights import find
from stagerun.language import digest, load, look_at_classes, look_at_folders
from stagerun.language.networks import from_outside
from stagerun.plan.described import network_change
from stagerun.system import signals
from stagerun.tools.lint import lint
from stagerun.tools.lint.rates import Published

_SILENCED = "a comment silences what is meant, `# lint: ignore ID`, in its line or the one above: `stagerun help lint`"


@command()
def check(
    folder: Folder,
    overrides: Overrides = (),
    fetch: bool = flag("--fetch", "First download the published weights that it starts from, to where `run` looks."),
    strict: bool = flag("--strict", "Warnings fail as mistakes do, with exit code 64."),
) -> None:
    """Finds every mistake in a schedule's files at once, in a fraction of a second, and what is legal and looks wrong:
    `stagerun help lint` lists these findings. Reads the headers of weights that it starts from, looks at the network where it has such
    weights or freezes some, and at how published weights want images. Trains nothing."""
    schedule = load(folder, overrides)
    if fetch:
        from stagerun.models.vision import fetched  # loads torch and http

        for line in fetched(schedule):
            show(line)
    enabled = [stage for stage in schedule.stages if stage.enabled]
    changes = filter(None, (network_change(schedule, stage) for stage in schedule.stages))
    tell("\n".join(f"note: {line}" for line in (*missing_data(schedule), *missing_weights(enabled), *changes)))
    warnings = tell_findings(schedule, strict, _published)
    _check_networks(schedule, enabled)
    if refused := (*look_at_folders(schedule), *look_at_classes(schedule)):
        raise RecipeError(refused)
    show(
        f"{schedule.name}: {count(len(schedule.stages), 'stage')}, "
        f"{count(sum(s.solver.max_iter for s in schedule.stages), 'iteration')}, no mistakes, "
        f"{count(warnings, 'warning') if warnings else 'no warnings'}, "
        f"digest {digest(schedule)[:12]}"
    )
    packages = {key.removeprefix(CODE) for s in schedule.stages for key, text in s.identity.items() if text == ABSENT}
    lines = (f"note: `{name}` is not installed on this machine; `run` will need it" for name in sorted(packages))
    tell("\n".join(lines))


def _check_networks(schedule: Schedule, enabled: list[Stage]) -> None:
    """Check that weights and patterns of `freeze` fit the networks. Loads torch, which takes a second, only for such stages; runs no
    code of the user's. RecipeError."""
    started = [s for s in enabled if s.solver.start is not None and not list(missing_weights([s]))]
    if started or any(stage.solver.freeze for stage in enabled):
        from stagerun.models import without_memory
        from stagerun.train.starting_weights import require_fitting

        outside = {stage.name for stage in schedule.stages if from_outside(stage.model)}
        inside = [stage for stage in schedule.stages if stage.name not in outside]
        started = [stage for stage in started if outside.isdisjoint((stage.name, stage.parent))]
        require_fitting(schedule, started, inside, without_memory)


def missing_data(schedule: Schedule) -> Iterator[str]:
    """Return a sentence for each LMDB that isn't on this machine, which may be a login node."""
    for _, field, source in named_sources(schedule):
        if not os.path.exists(source.path):
            yield f"{field}: there is no LMDB at {source.path} on this machine; `run` will need it"


def missing_weights(stages: Iterable[Stage]) -> Iterator[str]:
    """Return a sentence for each file of weights of these stages that isn't on this machine."""
    for stage in stages:
        try:
            if stage.solver.start is not None:
                find(stage.solver.start)
        except StagerunError as error:
            hint = f"; {error.hint}" if error.hint else ""
            field = stage.solver.start_field.removeprefix("solver.")
            yield f"{stage.name}.{field}: {error.message}: `run` will refuse this{hint}"


def named_sources(schedule: Schedule) -> Iterator[tuple[Stage, str, Source]]:
    """Return each set of images of the enabled stages once, with the stage and its field: `data.val`, or `two.data.val` of that stage."""
    seen: set[tuple[str, int]] = set()
    for stage in (stage for stage in schedule.stages if stage.enabled):
        sets = [("train", "data.train", stage.data.train)]
        sets += [("val", f"data.val.{val.name}" if n else "data.val", val) for n, val in enumerate(stage.data.val)]
        for kind, field, source in sets:
            if (source.path, source.images) not in seen:
                seen.add((source.path, source.images))
                shared = getattr(stage.data, kind) == getattr(schedule.data, kind)
                yield stage, field if shared else f"{stage.name}.{field}", source


def _published(name: str) -> Preprocessing | None:
    from stagerun.models.vision import (
        published_preprocessing,
    )  # loads torch, for schedules that start from published weights

    return published_preprocessing(name)


def tell_findings(schedule: Schedule, strict: bool = False, published: Published = lambda name: None) -> int:
    """Show all that lint finds; return the number of warnings. With `strict`, UsageError for any warning."""
    findings = lint(schedule, published)
    warnings = [problem for problem in findings if problem.level is Level.WARNING]
    notes = [problem.render() for problem in findings if problem.level is Level.NOTE]
    text = "\n\n".join(filter(None, ["\n".join(notes), *(problem.render() for problem in warnings)]))
    if not warnings:
        tell(text)
        return 0
    if strict:
        tell(text + "\n")
        raise UsageError(count(len(warnings), "warning"), _SILENCED)
    tell(f"{text}\n\nhint: {_SILENCED}\n")
    return len(warnings)


def weights_tables(schedule: Schedule) -> list[str]:
    """Return where the weights come from, for each stage that takes some from elsewhere, changes the network, or freezes some. RecipeError
    with all that is wrong with them."""
    with signals.held():
        from stagerun.models import without_memory
        from stagerun.train.starting_weights import has_other_weights, look_into, table_of

    problems, tables = Problems(schedule.files), list[str]()
    for stage in schedule.stages:
        chosen = has_other_weights(schedule, stage) or stage.solver.freeze
        if chosen and (made := look_into(schedule, stage, problems)) is not None:
            tables.append(table_of(made, stage, without_memory(stage.model)))
    if problems:
        raise RecipeError(problems.all())
    return tables or ["weights: each stage continues with the weights of the stage before, or starts from the seed"]
