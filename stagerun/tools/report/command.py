"""`stagerun report`: looks at output folders, and writes what it found as asked."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from stagerun.base import text
from stagerun.base.errors import UsageError
from stagerun.command.ending import tell
from stagerun.command.options import argument, command, flag, option
from stagerun.system.files import writing
from stagerun.tools.report import tables
from stagerun.tools.report.compare import (
    differences_table,
    groups,
    lead,
    ranking_table,
    seeds_table,
    title,
    workers_table,
)
from stagerun.tools.report.effects import effect_table, paired_table
from stagerun.tools.report.history import Run, notes
from stagerun.tools.report.look import look_at_all
from stagerun.tools.report.table import Table, document, separated

ENDINGS = {
    ".md": "markdown",
    ".csv": "csv",
    ".tsv": "tsv",
    ".html": "html",
    ".htm": "html",
    ".svg": "svg",
    ".png": "png",
}
PICTURES = ("svg", "png")
DELIMITERS = {"csv": ",", "tsv": "\t"}

TABLES: dict[str, Callable[[Sequence[Run]], Table]] = {
    "run": tables.runs_table,
    "stage": tables.stages_table,
    "epoch": tables.epochs_table,
    "life": tables.lives_table,
    "ensemble": tables.ensembles_table,
    "seed": seeds_table,
    "workers": workers_table,
}


@dataclass(frozen=True, slots=True)
class ReportOptions:
    outs: tuple[str, ...] = argument("OUT...")
    form: str | None = option(
        "--format",
        "csv and tsv hold one table, at full precision; html has curves too, and svg and png are pictures of --effect or --paired "
        "(pip install 'stagerun[plots]').  [default: by the ending of --output, else markdown]",
        type=click.Choice(("markdown", "csv", "tsv", "html", *PICTURES)),
    )
    output: str | None = option("--output FILE", "Write there instead of to the terminal.")
    by: str | None = option(
        "--by",
        "One table alone: a row per run, stage, epoch or process life; ensembles beside their members; mean and spread over "
        "seeds; speed by number of workers.  [default: all that say something; stage in csv and tsv]",
        type=click.Choice(list(TABLES)),
    )
    op: str | None = option(
        "--op",
        "With --by epoch: one row per epoch over all runs, the mean or the largest of each number.",
        type=click.Choice(("mean", "max")),
    )
    effect: str | None = option(
        "--effect SETTING",
        "What a setting does to top-1: lr_policy, max_iter, weight_decay, augmentation, from, or any other field. Stages of a run "
        "that are alike in all else are matched; the 95 % interval is over runs (seeds).",
    )
    across: str | None = option("--across SETTING", "With --effect: for each value of another setting.")
    against: str | None = option(
        "--against VALUE", "With --effect: what the others are compared with.  [default: the first stage's]"
    )
    paired: tuple[str, ...] = option(
        "--paired A:B",
        "Top-1 of a stage or ensemble against another, run by run, with the 95 % interval over runs. Repeatable.",
        multiple=True,
    )
    diff: bool = flag("--diff", "Name what differed between the runs, per stage; in csv and tsv, that alone.")


@command()
def report(options: ReportOptions) -> None:
    """Tables and curves of one or more output folders of `run`: stages, resumes, seeds, workers.

    Only reads, also while the run goes on. OUT is ./out/NAME, or what `run --out` named. Runs that are alike but for the
    seed are put together: mean, standard deviation (n - 1), least and largest top-1 of each stage.

    --by epoch is the table of MXNet's parse_log.py (epoch, train accuracy, valid accuracy, time), with the train loss in
    place of the train accuracy, which is not measured here; valid accuracy stands where an epoch had an evaluation
    (`test_interval`, and the end of each stage).
    """
    click.echo(_report(options), nl=False)


def _report(options: ReportOptions) -> str:
    """What goes to the terminal. UsageError for options that don't go together and folders without a run."""
    form = options.form or _form_of(options.output)
    _check(options, form, len(options.outs))
    runs = look_at_all(options.outs, lambda text: tell(f"note: {text}"))
    _check(options, form, len(runs))
    made = _drawn(runs, options, form) if form in PICTURES else _written(runs, options, form)
    if options.output is None:
        assert isinstance(made, str)
        return made
    with writing(options.output, "choose another file with --output"):
        Path(options.output).write_bytes(made.encode() if isinstance(made, str) else made)
    return f"written to {options.output}\n"


def _form_of(output: str | None) -> str:
    if output is None:
        return "markdown"
    form = ENDINGS.get(Path(output).suffix.lower())
    if form is None:
        raise UsageError(
            f"--output {output}: its ending names no format", f"add --format, or end it in {', '.join(ENDINGS)}"
        )
    return form


def _check(options: ReportOptions, form: str, runs: int) -> None:
    if options.op is not None and options.by != "epoch":
        raise UsageError("--op is for --by epoch", "add --by epoch, or leave --op out")
    if options.diff and options.by is not None and form in DELIMITERS:
        raise UsageError(f"--diff and --by are two tables, and {form} holds one", "leave one of them out")
    if options.effect is None and (options.across or options.against) is not None:
        raise UsageError("--across and --against are for --effect", "add --effect SETTING")
    asked = [name for name in ("by", "effect", "paired", "diff") if getattr(options, name)]
    if len(asked) > 1 and {"effect", "paired"} & {*asked}:
        raise UsageError(
            f"{' and '.join(f'--{name}' for name in asked)} are tables of their own", "leave one of them out"
        )
    if form in PICTURES and not (options.effect or options.paired):
        raise UsageError(f"{form} is a picture of --effect or --paired", "add one of them, or write .html for curves")
    if form in PICTURES and options.output is None:
        raise UsageError(f"--format {form} without --output", "name a file: --output effect.svg")
    for pair in options.paired:
        if pair.count(":") != 1:
            raise UsageError(f"--paired {pair}: two names with a colon between them", "write --paired collapse:cyc3")
    if options.diff and runs == 1:
        raise UsageError("--diff needs two runs or more", "name another output folder")


# -- writing


def _drawn(runs: Sequence[Run], options: ReportOptions, form: str) -> bytes:
    from stagerun.tools.report.intervals import picture

    table = _comparison(runs, options)
    assert table is not None
    return picture(table, title(runs).partition(":")[0], form == "png")


def _written(runs: Sequence[Run], options: ReportOptions, form: str) -> str:
    if (comparison := _comparison(runs, options)) is not None:
        return _alone(comparison, runs, options, form)
    if form in DELIMITERS:
        table = differences_table(runs) if options.diff else _table(runs, options.by or "stage", options.op)
        return separated(table, DELIMITERS[form])
    summary, details = ([_table(runs, options.by, options.op)], []) if options.by else all_tables(runs)
    if options.diff:
        details.append(differences_table(runs))
    if form == "html":
        from stagerun.tools.report.page import page

        return page(title(runs), lead(runs), runs, ranking_table(runs), summary, details, notes(runs))
    return document(
        title(runs), lead(runs), [*summary, *details], notes(runs), None if options.output else text.terminal()
    )


def _comparison(runs: Sequence[Run], options: ReportOptions) -> Table | None:
    if options.effect is not None:
        return effect_table(runs, options.effect, options.across, options.against)
    return (
        paired_table(runs, [(a, b) for a, _, b in (p.partition(":") for p in options.paired)])
        if options.paired
        else None
    )


def _alone(table: Table, runs: Sequence[Run], options: ReportOptions, form: str) -> str:
    """One table without what is said of each stage: hundreds of them may have been compared."""
    if form in DELIMITERS:
        return separated(table, DELIMITERS[form])
    if form == "html":
        from stagerun.tools.report.page import page

        return page(title(runs), [], runs, None, [table], [], notes(runs))
    return document(title(runs), [], [table], notes(runs), None if options.output else text.terminal())


def _table(runs: Sequence[Run], by: str, op: str | None) -> Table:
    return tables.epochs_over_runs(runs, op) if op else TABLES[by](runs)


def all_tables(runs: Sequence[Run]) -> tuple[list[Table], list[Table]]:
    """The tables that say something about these runs: results, then details."""
    summary, details = [tables.runs_table(runs)], [tables.stages_table(runs)]
    if any(stage.finished and stage.finished.beside for run in runs for stage in run.history.stages):
        summary.append(tables.sets_table(runs))
    if any(stage.finished and stage.finished.class_ap for run in runs for stage in run.history.stages):
        details.append(tables.classes_table(runs))
    if any(run.history.ensembles for run in runs):
        summary.append(tables.ensembles_table(runs))
    if any(len(group.runs) > 1 for group in groups(runs)):
        summary.append(seeds_table(runs))
    if len({life.workers for run in runs for life in run.history.lives}) > 1:
        summary.append(workers_table(runs))
    if any(stage.trained and stage.trained.staleness for run in runs for stage in run.history.stages):
        details.append(tables.replicas_table(runs))
    if any(len(run.history.lives) > 1 for run in runs):
        details.append(tables.lives_table(runs))
    return summary, details
