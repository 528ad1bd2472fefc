"""A run's log in the forms that other tools read: Caffe's own log, DAWNBench's table, and a row for each displayed iteration.

Iterations that a kill, a rollback or `--redo` undid are left out.
"""

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import NamedTuple

from stagerun.base import events
from stagerun.tools.report.history import Run, StageHistory
from stagerun.tools.report.replay import events_in
from stagerun.tools.report.table import RUN, Cells, Column, Table, table_of


class Line(NamedTuple):
    """`stage` is '' for an event of the whole run. `display`: of the stage, 0 for none; `trained`: seconds of its iterations up to here."""

    time: float
    event: events.Event
    stage: str = ""
    iter: int = 0
    display: int = 0
    trained: float = 0.0


def lines(run: Run) -> list[Line]:
    """The displayed iterations, the evaluations and what happened besides, of what counts, in the order of the log."""
    found: list[Line] = []
    display: dict[str, int] = {}
    trained: dict[str, float] = {}
    for time, event in events_in(run.out):
        match event:
            case events.Iterated(stage=stage, iter=iter):
                trained[stage] = trained.get(stage, 0.0) + event.seconds
                every = display.get(stage, 1)
                if every and (iter % every == 0 or (iter - 1) % every == 0):
                    found.append(Line(time, event, stage, iter, every))
            case events.StageStarted(stage=stage, iter=iter):
                found = [line for line in found if line.stage != stage or line.iter <= iter]
                display[stage], trained[stage] = event.display, event.train_seconds
                found.append(Line(time, event, stage, iter))
            case events.Tested(stage=stage, iter=iter):
                # After a kill the last one may be made again.
                found = [line for line in found if not _same_test(line, event)]
                found.append(Line(time, event, stage, iter, trained=trained.get(stage, 0.0)))
            case events.SnapshotWritten(stage=stage, iter=iter):
                found.append(Line(time, event, stage, iter))
            case events.RunStarted() | events.Stopped() | events.RunFinished(trained=True):
                found.append(Line(time, event))
    return found


def _same_test(line: Line, test: events.Tested) -> bool:
    return isinstance(line.event, events.Tested) and (line.stage, line.iter, line.event.ema) == (
        test.stage,
        test.iter,
        test.ema,
    )


def _epoch(stage: StageHistory, iter: int) -> float:
    return round(stage.epoch(iter), 6)


def _short(epoch: float) -> str:
    return f"{epoch:.6f}".rstrip("0").rstrip(".")


# -- a row for each displayed iteration and each evaluation


def _what(line: Line) -> str:
    return (
        "train"
        if isinstance(line.event, events.Iterated)
        else "ema_test"
        if getattr(line.event, "ema", False)
        else "test"
    )


_ITERATIONS: Cells = (
    (RUN, lambda run, stage, line: run.label),
    (Column("stage", "stage", "text"), lambda run, stage, line: stage.name),
    (Column("iter", "iteration", "count"), lambda run, stage, line: line.iter),
    (Column("epoch", "epoch", "epochs"), lambda run, stage, line: _epoch(stage, line.iter)),
    (Column("what", "what", "text"), lambda run, stage, line: _what(line)),
    (Column("lr", "LR", "rate"), lambda run, stage, line: getattr(line.event, "lr", None)),
    (Column("loss", "loss", "loss"), lambda run, stage, line: line.event.loss),
    (
        Column("images_per_s", "images/s", "speed"),
        lambda run, stage, line: line.event.images / line.event.seconds if line.event.seconds else None,
    ),
    (Column("top1", "top-1", "percent"), lambda run, stage, line: getattr(line.event, "top1", None)),
    (Column("top5", "top-5", "percent"), lambda run, stage, line: getattr(line.event, "top5", None)),
    (Column("sent_bytes", "sent", "bytes"), lambda run, stage, line: getattr(line.event, "sent_bytes", 0) or None),
)


def iterations_table(runs: Sequence[Run]) -> Table:
    """A row for each displayed iteration and each evaluation, in the order of the stages."""

    def items() -> Iterator[tuple[Run, StageHistory, Line]]:
        for run in runs:
            found = lines(run)
            for stage in run.history.stages:
                for line in (one for one in found if one.stage == stage.name):
                    # Caffe shows the first iteration of a stretch, this table the last.
                    shown = isinstance(line.event, events.Iterated) and line.iter % line.display == 0
                    if shown or isinstance(line.event, events.Tested):
                        yield run, stage, line

    note = "loss: of an iteration's batch, before its update; sent: by rank 0 for the gradients"
    return table_of("Displayed iterations and evaluations", _ITERATIONS, items(), note)


# -- Caffe's log


def caffe(run: Run) -> str:
    """Caffe's own lines, with glog's prefix, for parse_log and the plot scripts. `Iteration N` counts through all stages in the order in which
    they run. As in Caffe N counts the updates done before the line: the loss of `Iteration 0` is that of the first weights, and a
    test at N follows N updates. The rate comes before the loss: parse_log.py gives each row the last rate that it has read."""
    above, total = {"": 0}, 0
    for stage in run.history.stages:
        if not stage.left_out:
            above[stage.name] = total
            total += stage.finished.iterations if stage.finished else stage.max_iter
    written = []
    for line in lines(run):
        if line.stage in above:
            moment = f"{datetime.fromtimestamp(line.time):%m%d %H:%M:%S.%f}"
            said = _caffe(line, above[line.stage] + line.iter, run)
            written += [f"I{moment}     1 {place}] {text}\n" for place, text in said]
    return "".join(written)


def _caffe(line: Line, done: int, run: Run) -> Iterator[tuple[str, str]]:
    """Where in Caffe's source each text comes from, which some scripts look for, and the text."""
    match line.event:
        case events.RunStarted(schedule=schedule):
            yield "solver.cpp:279", f"Solving {schedule}"
        case events.StageStarted() as e:
            done_before = f"{e.iter} of {e.max_iter} iterations done"
            yield "stagerun:1", f"stage {e.stage}: {done_before}, batch {e.batch_size}, from {e.start}"
        case events.Iterated(lr=lr, loss=loss) if (line.iter - 1) % line.display == 0:
            yield "sgd_solver.cpp:106", f"Iteration {done - 1}, lr = {lr:g}"
            yield "solver.cpp:228", f"Iteration {done - 1}, loss = {loss:g}"
            yield "solver.cpp:244", f"    Train net output #0: loss = {loss:g} (* 1 = {loss:g} loss)"
        case events.Tested(top1=top1, top5=top5, loss=loss, ema=False):
            yield "solver.cpp:337", f"Iteration {done}, Testing net (#0)"
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


# -- DAWNBench's table


def dawnbench(run: Run) -> str:
    """Epoch, hours of training and accuracy of each evaluation on all images.

    The clock is cifar10-fast's: the time of the training iterations, with reading and augmenting their images, along the path of
    ancestors and over all process lives, without evaluations and snapshots. In a tree each stage at whose end no other starts has a
    table, as have averaged weights, each under its name.
    """
    found = lines(run)
    tables = []
    for leaf in run.leaves():
        path = run.path(leaf)
        lasts = [leaf.max_iter, *(child.parent_iter for child in path)]  # iterations that lie on the path
        steps = [*zip(path, lasts, strict=False)][::-1]
        for ema in (False, True):
            if rows := [row for stage, last in steps for row in _rows(run, stage, last, found, ema)]:
                tables.append((leaf.name + (", averaged weights" if ema else ""), rows))
    written = []
    for name, rows in tables:
        text = "epoch\thours\ttop1Accuracy\ttop5Accuracy\n"
        text += "".join(f"{_short(e)}\t{s / 3600:.8f}\t{100 * one:.2f}\t{100 * five:.2f}\n" for e, s, one, five in rows)
        written.append(f"# {name}\n{text}" if len(tables) > 1 else text)
    return "\n".join(written)


def _rows(
    run: Run, stage: StageHistory, last: int, found: Sequence[Line], ema: bool
) -> Iterator[tuple[float, float, float, float]]:
    """(epoch, seconds, top-1, top-5) of each evaluation up to `last`, on as many images as the largest had."""
    tests = [(line, line.event) for line in found if line.stage == stage.name and isinstance(line.event, events.Tested)]
    images = max((tested.images for _, tested in tests), default=0)
    before, result = run.seconds(stage) - stage.seconds, stage.finished
    for line, tested in tests:
        at_end = result is not None and tested.iter == result.iterations
        if tested.ema == ema and tested.images == images and tested.iter <= last and not at_end:
            yield _epoch(stage, tested.iter), before + line.trained, tested.top1, tested.top5
    if result is not None and result.iterations <= last:
        top1, top5 = (result.ema_top1, result.ema_top5) if ema else (result.top1, result.top5)
        if top1 is not None and top5 is not None:
            yield _epoch(stage, result.iterations), before + result.train_seconds, top1, top5
