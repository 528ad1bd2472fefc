"""`stagerun report`: looks at output folders, and writes what it found as asked."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click

from stagerun import store
from stagerun.base import text
from stagerun.base.errors import UsageError
from stagerun.base.events import EnsembleTested
from stagerun.base.snapshots import Inventory, SnapshotRef, passed_over
from stagerun.command.ending import tell
from stagerun.command.options import argument, command, flag, option
from stagerun.language.build import completed
from stagerun.plan.counting import under
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
from stagerun.tools.report.curves import most
from stagerun.tools.report.history import History, Run, StageHistory, notes
from stagerun.tools.report.read_log import LOG, is_schedule, read_log
from stagerun.tools.report.replay import history
from stagerun.tools.report.table import Table, document, separated
from stagerun.train.output import Target, ensemble_on_disk
from stagerun.train.results import read_result
from stagerun.train.status import look

ENDINGS = {".md": "markdown", ".csv": "csv", ".tsv": "tsv", ".html": "html", ".htm": "html"}
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
        "csv and tsv hold one table, at full precision; html has curves too (pip install 'stagerun[plots]').  "
        "[default: by the ending of --output, else markdown]",
        type=click.Choice(("markdown", "csv", "tsv", "html")),
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
    _check(options, form)
    options = replace(options, outs=_with_a_log(options.outs))
    _check(options, form)
    points = most(len(options.outs))
    runs = [_look(Path(out), label, points) for out, label in zip(options.outs, _labels(options.outs), strict=True)]
    text = _written(runs, options, form)
    if options.output is None:
        return text
    with writing(options.output, "choose another file with --output"):
        Path(options.output).write_text(text, encoding="utf-8")
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


def _check(options: ReportOptions, form: str) -> None:
    if options.op is not None and options.by != "epoch":
        raise UsageError("--op is for --by epoch", "add --by epoch, or leave --op out")
    if options.diff and options.by is not None and form in DELIMITERS:
        raise UsageError(f"--diff and --by are two tables, and {form} holds one", "leave one of them out")
    if options.diff and len(options.outs) == 1:
        raise UsageError("--diff needs two runs or more", "name another output folder")
    seen: dict[Path, str] = {}
    for out in options.outs:
        real = Path(out).resolve()
        if real in seen:
            raise UsageError(f"{out} and {seen[real]} are the same folder", "name each run once")
        seen[real] = out


def _with_a_log(outs: tuple[str, ...]) -> tuple[str, ...]:
    """Drops folders in which nothing was run yet, which `out/*` may match; keeps all if there are no others."""
    empty = [
        out for out in outs if os.path.isdir(out) and not is_schedule(Path(out)) and not os.path.exists(Path(out) / LOG)
    ]
    if len(empty) == len(outs):
        return outs
    for out in empty:
        tell(f"note: {out} has no {LOG} and is left out")
    return tuple(out for out in outs if out not in empty)


def _labels(outs: Sequence[str]) -> list[str]:
    """A short name for each run: the folder's, where no other has the same."""
    names = [Path(out).resolve().name for out in outs]
    found = [name if name and names.count(name) == 1 else out for name, out in zip(names, outs, strict=True)]
    # A path may hold anything, bytes that are not text among it.
    return ["".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in label) for label in found]


# -- looking at a folder


def _look(out: Path, label: str, points: int) -> Run:
    """`points` stay of its curves."""
    past = history(read_log(out), points)
    alive, word = _word(out, past)
    found = store.inventory(store.LocalDisk(), out, looking=True)
    for name in found.forbidden:
        tell(f"note: {out}: {passed_over(name)}")
    inventory = under(found, past.names)
    past = replace(past, stages=tuple(_with_result(out, stage, inventory) for stage in past.stages))
    past = replace(past, ensembles=tuple(_ensembles(out, past, inventory)))
    ends = {stage.name: ref for stage in past.stages if (ref := _end(inventory, stage)) is not None}
    members = {id for tested in past.ensembles for id in tested.snapshots}
    made_from = [ref for ref in inventory.snapshots if ref.id in members]
    return Run(
        label=label,
        history=past,
        identities={name: completed(ref.identity) for name, ref in ends.items()},
        environments={name: ref.environment for name, ref in ends.items()},
        stale=_stale(past, inventory, ends),
        alive=alive,
        word=word,
        results={ref.id: result for ref in made_from if (result := read_result(out, ref)) is not None},
    )


_WORDS = {
    "running": "running",
    "starting": "starting, nothing logged yet",
    "killed": "killed, or ended without a word",
    "elsewhere": "no word of an end, from a machine that this one can't see",
}


def _word(out: Path, past: History) -> tuple[bool, str]:
    """Whether the run is alive, and what `status` says of it where its log doesn't. `status` isn't needed where nothing holds
    the folder and the log has an end."""
    if past.lives and past.lives[-1].end and store.holder(out) is None:
        return False, ""
    found = look(Target(out), time.time())
    return found.state in ("running", "starting"), "running, but silent" if found.silent else _WORDS.get(
        found.state, ""
    )


def _refs(inventory: Inventory, stage: StageHistory) -> list[SnapshotRef]:
    """The stage's snapshots, oldest first, without those from before it started over."""
    return [ref for ref in inventory.of(stage.name) if ref.attempt > stage.older]


def _end(inventory: Inventory, stage: StageHistory) -> SnapshotRef | None:
    """The snapshot that the stage ended with; the newest where there is none. A piece of it may have been trained since."""
    refs = _refs(inventory, stage)
    end = stage.finished.snapshot if stage.finished else ""
    return next((ref for ref in refs if ref.name == end), refs[-1] if refs else None)


def _with_result(out: Path, stage: StageHistory, inventory: Inventory) -> StageHistory:
    """Takes the result from its file where the log, on a full disk, has lost the line that the stage was finished."""
    if stage.finished is None:
        for ref in reversed(_refs(inventory, stage)):
            result = read_result(out, ref)
            if result is not None and result.snapshot == ref.name:
                return replace(stage, finished=result, max_iter=stage.max_iter or result.iterations)
    return stage


def _ensembles(out: Path, past: History, inventory: Inventory) -> Iterator[EnsembleTested]:
    """In the order of the schedule, those whose members it trains; of one whose line is lost, its file."""
    logged = {tested.name: tested for tested in past.ensembles}
    finished = {stage.name for stage in past.stages if stage.finished and not stage.left_out}
    for name in past.planned_ensembles:
        tested = logged.get(name) or ensemble_on_disk(out, name, inventory)
        if tested is not None and finished.issuperset(tested.members):
            yield tested


def _stale(past: History, inventory: Inventory, ends: dict[str, SnapshotRef]) -> frozenset[str]:
    """Finished stages that started from another snapshot of their parent than it has there now, and what follows from them."""
    found: set[str] = set()
    for stage in past.stages:
        parent = past.stage(stage.parent) if stage.parent else None
        if parent is None or stage.finished is None:
            continue
        if parent.name in found or _from_another(past, stage, parent, inventory, ends.get(stage.name)):
            found.add(stage.name)
    return frozenset(found)


def _from_another(
    past: History, stage: StageHistory, parent: StageHistory, inventory: Inventory, end: SnapshotRef | None
) -> bool:
    length = parent.finished.iterations if parent.finished else parent.max_iter
    place = stage.parent_iter if past.follows(stage) is None else length
    there = [ref.id for ref in _refs(inventory, parent) if ref.iter == place]
    if end is not None and there:
        return end.parent not in there
    # What it started from is gone, or not made again yet, which says nothing. That the parent has started over since says it.
    return stage.parent_attempt <= parent.older


# -- writing


def _written(runs: Sequence[Run], options: ReportOptions, form: str) -> str:
    if form in DELIMITERS:
        table = differences_table(runs) if options.diff else _table(runs, options.by or "stage", options.op)
        return separated(table, DELIMITERS[form])
    summary, details = ([_table(runs, options.by, options.op)], []) if options.by else _all(runs)
    if options.diff:
        details.append(differences_table(runs))
    if form == "html":
        from stagerun.tools.report.page import page

        return page(title(runs), lead(runs), runs, ranking_table(runs), summary, details, notes(runs))
    return document(
        title(runs), lead(runs), [*summary, *details], notes(runs), None if options.output else text.terminal()
    )


def _table(runs: Sequence[Run], by: str, op: str | None) -> Table:
    return tables.epochs_over_runs(runs, op) if op else TABLES[by](runs)


def _all(runs: Sequence[Run]) -> tuple[list[Table], list[Table]]:
    """The tables that say something about these runs: results, then details."""
    summary, details = [tables.runs_table(runs)], [tables.stages_table(runs)]
    if any(stage.finished and stage.finished.beside for run in runs for stage in run.history.stages):
        summary.append(tables.sets_table(runs))
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
