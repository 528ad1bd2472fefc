"""`stagerun report`: looks at output folders, and writes what it found as asked."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from stagerun.base import text
from stagerun.base.errors import UsageError
from stagerun.command.ending import tell
from stagerun.command.options import argument, command, flag, option
from stagerun.drawing.svg import require_svg
from stagerun.system.files import require_writable, writing
from stagerun.tools.report import tables
from stagerun.tools.report.compare import (
    differences_table,
    groups,
    lead,
    seeds_table,
    title,
)
from stagerun.tools.report.effects import effect_table
from stagerun.tools.report.history import Run, notes
from stagerun.tools.report.look import look_at_all
from stagerun.tools.report.other_tools import caffe, dawnbench, iterations_table
from stagerun.tools.report.table import Table, document, separated

ENDINGS = {".md": "markdown", ".csv": "csv", ".tsv": "tsv"}
INSTEAD = {".html": "`stagerun view OUT --save FILE.html` writes a page", ".svg": "`--plot FILE.svg` draws"}
DELIMITERS = {"csv": ",", "tsv": "\t"}
OTHER_TOOLS = {"caffe": caffe, "dawnbench": dawnbench}

TABLES: dict[str, Callable[[Sequence[Run]], Table]] = {
    "run": tables.runs_table,
    "stage": tables.stages_table,
    "epoch": tables.epochs_table,
    "iteration": iterations_table,
    "life": tables.lives_table,
    "ensemble": tables.ensembles_table,
    "seed": seeds_table,
}


@dataclass(frozen=True, slots=True)
class ReportOptions:
    outs: tuple[str, ...] = argument("OUT...")
    form: str | None = option(
        "--format",
        "csv and tsv hold one table, at full precision. caffe: one run as Caffe's own log, for parse_log and plot scripts; `Iteration N` "
        "counts through all stages. dawnbench: its table of evaluations.  [default: by the ending of --output, else markdown]",
        type=click.Choice(("markdown", "csv", "tsv", *OTHER_TOOLS)),
    )
    output: str | None = option("--output FILE", "Write there instead of to the terminal.")
    by: str | None = option(
        "--by",
        "One table alone: a row per run, stage, epoch, displayed iteration and evaluation, or process life; ensembles beside their members; mean and spread over "
        "seeds.  [default: all that say something; stage in csv and tsv]",
        type=click.Choice(list(TABLES)),
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
    plot: str | None = option("--plot FILE.svg", "Also draw rate, top-1 and loss over the stages.")
    diff: bool = flag("--diff", "Name what differed between the runs, per stage; in csv and tsv, that alone.")


@command()
def report(options: ReportOptions) -> None:
    """Tables of one or more output folders of `run`: stages, resumes, seeds.

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
    if options.plot is not None:
        require_svg(options.plot)
        require_writable(options.plot)
    runs = look_at_all(options.outs, lambda text: tell(f"note: {text}"))
    _check(options, form, len(runs))
    made = OTHER_TOOLS[form](runs[0]) if form in OTHER_TOOLS else _written(runs, options, form)
    if options.plot is not None:
        from stagerun.tools.view.looking import drawn

        with writing(options.plot, "choose another file with --plot"):
            Path(options.plot).write_bytes(drawn(options.outs))
        tell(f"written to {options.plot}")
    if options.output is None:
        return made
    with writing(options.output, "choose another file with --output"):
        Path(options.output).write_text(made, encoding="utf-8")
    return f"written to {options.output}\n"


def _form_of(output: str | None) -> str:
    if output is None:
        return "markdown"
    ending = Path(output).suffix.lower()
    form = ENDINGS.get(ending)
    if form is None:
        hint = INSTEAD.get(ending) or f"add --format, or end it in {', '.join(ENDINGS)}"
        raise UsageError(f"--output {output}: its ending names no format", hint)
    return form


def _check(options: ReportOptions, form: str, runs: int) -> None:
    if options.diff and options.by is not None and form in DELIMITERS:
        raise UsageError(f"--diff and --by are two tables, and {form} holds one", "leave one of them out")
    if options.effect is None and (options.across or options.against) is not None:
        raise UsageError("--across and --against are for --effect", "add --effect SETTING")
    asked = [f"--{name}" for name in ("by", "effect", "diff", "plot") if getattr(options, name)]
    if form in OTHER_TOOLS and (asked or runs > 1):
        raise UsageError(
            f"--format {form} is one run, whole", "name one output folder, and no other option but --output"
        )
    others = [one for one in asked if one != "--effect"]
    if options.effect is not None and others:
        raise UsageError(f"{text.listed([*others, '--effect'])} don't go together", "leave one of them out")
    if options.diff and runs == 1:
        raise UsageError("--diff needs two runs or more", "name another output folder")


def _written(runs: Sequence[Run], options: ReportOptions, form: str) -> str:
    effect = options.effect and effect_table(runs, options.effect, options.across, options.against)
    if form in DELIMITERS:
        table = effect or (differences_table(runs) if options.diff else TABLES[options.by or "stage"](runs))
        return separated(table, DELIMITERS[form])
    room = None if options.output else text.terminal()
    if effect:  # without what is said of each stage: hundreds of them may have been compared
        return document(title(runs), [], [effect], notes(runs), room)
    summary, details = ([TABLES[options.by](runs)], []) if options.by else all_tables(runs)
    if options.diff:
        details.append(differences_table(runs))
    return document(title(runs), lead(runs), [*summary, *details], notes(runs), room)


def all_tables(runs: Sequence[Run]) -> tuple[list[Table], list[Table]]:
    """The tables that say something about these runs: results, then details."""
    summary, details = [tables.runs_table(runs)], [tables.stages_table(runs)]
    if any(stage.finished and stage.finished.beside for run in runs for stage in run.history.stages):
        summary.append(tables.sets_table(runs))
    if any(run.history.ensembles for run in runs):
        summary.append(tables.ensembles_table(runs))
    if any(len(group.runs) > 1 for group in groups(runs)):
        summary.append(seeds_table(runs))
    if any(len(run.history.lives) > 1 for run in runs):
        details.append(tables.lives_table(runs))
    return summary, details
