"""`stagerun report` and `stagerun.report`: tables of output folders, printed, as values, or in the forms that other tools read."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

import click

from stagerun.base import events
from stagerun.base.errors import UsageError, nearest
from stagerun.base.table import Table, Value, as_csv, as_markdown, as_text
from stagerun.command.ending import show, tell
from stagerun.command.options import argument, command, option
from stagerun.look import tables
from stagerun.look.chart import write_plot
from stagerun.look.history import Moment, Stage
from stagerun.look.picture import make_picture
from stagerun.look.runs import Run, read_runs, stored_schedule

TABLES = {
    "run": tables.runs_table,
    "stage": tables.stages_table,
    "epoch": tables.epochs_table,
    "iteration": tables.iterations_table,
    "life": tables.lives_table,
    "seed": tables.seeds_table,
}


@dataclass(frozen=True, slots=True)
class ReportOptions:
    outs: tuple[str, ...] = argument("OUT...")
    form: str = option(
        "--format",
        "csv: one table, at full precision. caffe: one run as Caffe's log, for parse_log and plot scripts; `Iteration N` counts through all "
        "stages. dawnbench: evaluations of one run.",
        type=click.Choice(("text", "markdown", "csv", "caffe", "dawnbench")),
        default="text",
    )
    by: str | None = option(
        "--by",
        "One table alone: a row for each run, stage, epoch, displayed iteration and evaluation, process life; stages and ensembles over "
        "seeds.  [default: all that say something; stage in csv]",
        type=click.Choice(list(TABLES)),
    )
    effect: str | None = option(
        "--effect SETTING",
        "What a setting does to top-1: lr_policy, max_iter, weight_decay, augmentation, from, or any other field. Stages of a run that are "
        "alike in all else are matched; the 95 % interval is over runs of different seeds.",
    )
    across: str | None = option("--across SETTING", "With --effect: for each value of another setting.")
    plot: str | None = option("--plot FILE.svg", "Draw the learning rate, top-1 and loss of these runs.")


@command()
def report_command(options: ReportOptions) -> None:
    """Tables of one or more output folders of `run`: stages, resumes, seeds.

    Only reads, also during a run. OUT is ./out/NAME, or what `run --out` named. Runs that are alike but for the seed are put together: mean
    and standard deviation (n - 1). `stagerun diff OUT OUT` shows where two runs differ.

    --by epoch is the table of MXNet's parse_log.py, with the train loss in place of the train accuracy, which isn't measured here.
    """
    export = {"caffe": caffe, "dawnbench": dawnbench}.get(options.form)
    if export is not None and (options.by or options.effect or len(options.outs) > 1):
        raise UsageError(f"--format {options.form} is one run, whole", "name one output folder, and no table")
    if options.effect is not None and options.by is not None:
        raise UsageError("--by and --effect are two tables", "leave one of them out")
    if options.across is not None and options.effect is None:
        raise UsageError("--across is for --effect", "add --effect SETTING")
    runs = read_runs(options.outs, lambda text: tell(f"note: {text}"))
    if options.plot is not None:
        if (schedule := stored_schedule(run.out for run in runs)) is None:
            raise UsageError("no snapshot says yet what is trained", "wait for the first one")
        write_plot(options.plot, make_picture(schedule), runs)
    single = options.by or ("stage" if options.form == "csv" else None)
    if export is not None:
        return click.echo("".join(export(runs[0])), nl=False)
    if options.effect is not None:
        chosen = [tables.effect_table(runs, options.effect, options.across)]
    else:
        chosen = [TABLES[single](runs)] if single else all_tables(runs)
    if options.form == "csv":
        return click.echo(as_csv(chosen[0]), nl=False)
    written = as_markdown if options.form == "markdown" else as_text
    notes = "\n".join(f"note: {note}" for run in runs for note in run.notes())
    show("\n\n".join([*map(written, chosen), *([notes] if notes else [])]))


def all_tables(runs: Sequence[Run]) -> list[Table]:
    """Return the tables that say something about these runs."""
    several = len(runs) > 1 or any(run.ensembles for run in runs)
    resumed = any(len(run.history.lives) > 1 for run in runs)
    names = ["run", *(["seed"] if several else []), "stage", *(["life"] if resumed else [])]
    return [TABLES[name](runs) for name in names]


# -- for other tools


def caffe(run: Run) -> Iterator[str]:
    """Yield Caffe's lines, with glog's prefix, for parse_log and the plot scripts. As in Caffe N counts the updates done before the line:
    `Iteration 0` has the loss of the first weights, a test at N follows N updates. The rate comes before the loss, since parse_log.py gives
    each row the last rate that it has read."""
    lines: list[tuple[int, float, Iterator[tuple[str, str]]]] = []
    before = 0  # iterations of earlier stages
    moments = [(moment, before) for moment in run.history.moments]
    for stage in run.history.stages:
        if stage.left_out:
            continue
        moments += [(moment, before) for moment in stage.moments]
        for line, time, iter, lr, loss in stage.rows("line", "time", "iter", "lr", "loss"):
            if stage.displays(iter - 1):
                lines.append((line, time, _caffe_update(before + iter - 1, lr, loss)))
        before += stage.length
    lines += [(moment.line, moment.time, _caffe_moment(moment, done, run)) for moment, done in moments]
    for _, time, texts in sorted(lines, key=lambda line: line[0]):
        prefix = f"I{datetime.fromtimestamp(time):%m%d %H:%M:%S.%f}     1"
        yield from (f"{prefix} {source}] {text}\n" for source, text in texts)


def _caffe_update(done: int, lr: float, loss: float) -> Iterator[tuple[str, str]]:
    """Yield the place in Caffe's source, which some scripts look for, and the text."""
    yield "sgd_solver.cpp:106", f"Iteration {done}, lr = {lr:g}"
    yield "solver.cpp:228", f"Iteration {done}, loss = {loss:g}"
    yield "solver.cpp:244", f"    Train net output #0: loss = {loss:g} (* 1 = {loss:g} loss)"


def _caffe_moment(moment: Moment, before: int, run: Run) -> Iterator[tuple[str, str]]:
    match moment.event:
        case events.RunStarted(schedule=schedule):
            yield "solver.cpp:279", f"Solving {schedule}"
        case events.Tested(top1=top1, top5=top5, loss=loss, ema=False):
            yield "solver.cpp:337", f"Iteration {before + moment.iter}, Testing net (#0)"
            # parse_log.sh takes #0 for the accuracy and #1 for the loss.
            yield "solver.cpp:404", f"    Test net output #0: accuracy = {top1:g}"
            yield "solver.cpp:404", f"    Test net output #1: loss = {loss:g} (* 1 = {loss:g} loss)"
            yield "solver.cpp:404", f"    Test net output #2: accuracy_top5 = {top5:g}"
        case events.SnapshotWritten(name=name):
            yield "solver.cpp:454", f"Snapshotting to binary proto file {run.out.absolute()}/snapshots/{name}"
        case events.Stopped():
            yield "solver.cpp:301", "Optimization stopped early."
        case events.RunFinished():
            yield "caffe.cpp:254", "Optimization Done."


def dawnbench(run: Run) -> Iterator[str]:
    """Yield epoch, hours of training and accuracy of each evaluation on all images, with cifar10-fast's clock: training along the path of
    ancestors, without evaluations and snapshots. Each end of a tree has a table, as have averaged weights."""
    shown = {}
    for leaf in run.leaves():
        path = run.path(leaf)
        lasts = [leaf.length, *(child.origin.iter for child in path)]
        for ema in (False, True):
            steps = reversed([*zip(path, lasts, strict=False)])
            rows = "".join(row for stage, last in steps for row in _dawnbench_rows(run, stage, last, ema))
            shown[leaf.name + (", averaged weights" if ema else "")] = rows
    for name, rows in shown.items():
        heading = f"# {name}\n" if sum(map(bool, shown.values())) > 1 else ""
        yield f"{heading}epoch\thours\ttop1Accuracy\ttop5Accuracy\n{rows}" if rows else ""


def _dawnbench_rows(run: Run, stage: Stage, last: int, ema: bool) -> Iterator[str]:
    images = max((test.images for test in stage.tests), default=0)
    before = run.seconds(stage) - stage.seconds
    for test in stage.tests:
        if test.ema == ema and test.images == images and test.iter <= last:
            hours = (before + stage.seconds_until(test.iter)) / 3600
            yield f"{stage.epoch(test.iter):.6g}\t{hours:.8f}\t{100 * test.top1:.2f}\t{100 * test.top5:.2f}\n"


# -- as a value


class Report(list[dict[str, Value]]):
    """The rows of a table of `stagerun report`, with the keys of its CSV: `pandas.DataFrame(report)` takes it as it is. Shares are 0 to 1,
    times are seconds. As text, and in a notebook, it is the table. `notes`: what was left out."""

    def __init__(self, table: Table, notes: tuple[str, ...]) -> None:
        super().__init__({column.key: row.get(column.key) for column in table.columns} for row in table.rows)
        self.notes = notes
        self._table = table

    def __str__(self) -> str:
        return as_text(self._table)

    def _repr_markdown_(self) -> str:
        return as_markdown(self._table)


Folder = str | os.PathLike[str]


def report(outs: Folder | list[Folder] | tuple[Folder, ...], by: str = "stage") -> Report:
    """Return what was trained in one or more output folders, also during training: a row per `run`, `stage`, `epoch`, process `life`,
    displayed `iteration` or `seed`. UsageError for folders without a run."""
    if by not in TABLES:
        raise UsageError(f"report by {by!r}: unknown table", nearest(by, TABLES) or f"one of {', '.join(TABLES)}")
    notes: list[str] = []
    folders = list(outs) if isinstance(outs, list | tuple) else [outs]
    runs = read_runs([os.fspath(out) for out in folders], notes.append)
    return Report(TABLES[by](runs), tuple(notes))
