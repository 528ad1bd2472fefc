"""A run's log in the forms that other tools read: Caffe's own log, DAWNBench's table, and a row for each displayed iteration.

Iterations that a kill, a rollback or `--redo` undid are left out.
"""

import math
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import NamedTuple

from stagerun.base import events
from stagerun.tools.report.history import Run, StageHistory
from stagerun.tools.report.read_log import Updates, read_log
from stagerun.tools.report.table import RUN, Column, Table, Value


class Line(NamedTuple):
    """`what`: train, test, ema_test, or what happened besides (start, snapshot, run, stopped, done). `trained`: seconds of the stage's
    iterations up to here. `display`: of the stage, 0 for none."""

    time: float
    what: str
    stage: str = ""
    iter: int = 0
    display: int = 0
    text: str = ""
    lr: float | None = None
    loss: float = math.nan
    speed: float | None = None  # images/s
    sent: int | None = None
    tested: events.Tested | None = None
    trained: float = 0.0


def lines(run: Run) -> list[Line]:
    """The lines of log.jsonl that count, in its order."""
    found: list[Line] = []
    display: dict[str, int] = {}
    trained: dict[str, float] = {}
    for time, event in read_log(run.out).events:
        match event:
            case Updates():
                found += _updates(event, display.get(event.stage, 1))
                trained[event.stage] = trained.get(event.stage, 0.0) + sum(event.seconds)
            case events.StageStarted(stage=stage, iter=iter):
                found = [line for line in found if line.stage != stage or line.iter <= iter]
                display[stage], trained[stage] = event.display, event.train_seconds
                text = f"stage {stage}: {iter} of {event.max_iter} iterations done, batch {event.batch_size}, from {event.start}"
                found.append(Line(time, "start", stage, iter, text=text))
            case events.Tested(stage=stage):
                what, seconds = "ema_test" if event.ema else "test", trained.get(stage, 0.0)
                speed = event.images / event.seconds if event.seconds else None
                test = (stage, event.iter, what)  # after a kill the last one may be made again
                found = [line for line in found if (line.stage, line.iter, line.what) != test]
                found.append(
                    Line(time, what, stage, event.iter, loss=event.loss, speed=speed, tested=event, trained=seconds)
                )
            case events.SnapshotWritten():
                found.append(Line(time, "snapshot", event.stage, event.iter, text=event.name))
            case events.RunStarted(schedule=schedule):
                found.append(Line(time, "run", text=schedule))
            case events.Stopped():
                found.append(Line(time, "stopped"))
            case events.RunFinished(trained=True):
                found.append(Line(time, "done"))
    return found


def _updates(of: Updates, display: int) -> Iterator[Line]:
    columns = zip(of.time, of.iter, of.lr, of.loss, of.images, of.seconds, of.sent, strict=True)
    for time, iter, lr, loss, images, seconds, sent in columns:
        if display and (iter % display == 0 or (iter - 1) % display == 0):
            speed = images / seconds if seconds else None
            yield Line(time, "train", of.stage, iter, display, lr=lr, loss=loss, speed=speed, sent=sent or None)


# -- a row for each displayed iteration and each evaluation

COLUMNS = (
    RUN,
    Column("stage", "stage", "text"),
    Column("iter", "iteration", "count"),
    Column("epoch", "epoch", "epochs"),
    Column("what", "what", "text"),
    Column("lr", "LR", "rate"),
    Column("loss", "loss", "loss"),
    Column("images_per_s", "images/s", "speed"),
    Column("top1", "top-1", "percent"),
    Column("top5", "top-5", "percent"),
    Column("sent_bytes", "sent", "bytes"),
)


def iterations_table(runs: Sequence[Run]) -> Table:
    """`what` is train, test, or ema_test for the averaged weights."""
    rows: list[tuple[Value, ...]] = []
    for run in runs:
        found = lines(run)
        for stage in run.history.stages:
            for line in found:
                first = line.what == "train" and line.iter % line.display  # the first of a stretch, which Caffe shows
                if line.stage == stage.name and not first and line.what in ("train", "test", "ema_test"):
                    top1, top5 = (line.tested.top1, line.tested.top5) if line.tested else (None, None)
                    place = (run.label, stage.name, line.iter, _epoch(stage, line.iter), line.what)
                    rows.append((*place, line.lr, line.loss, line.speed, top1, top5, line.sent))
    note = "loss: of an iteration's batch, before its update; sent: by rank 0 for the gradients"
    return Table("Displayed iterations and evaluations", COLUMNS, tuple(rows), (note,))


def _epoch(stage: StageHistory, iter: int) -> float:
    """Epochs along the stage's path of ancestors."""
    done = stage.trained.iter - stage.begins if stage.trained else 0
    return round(stage.begin + (iter - stage.begins) * stage.epochs / done if done else stage.begin, 6)


# -- Caffe's log


def caffe(run: Run) -> str:
    """Caffe's own lines, with glog's prefix, for parse_log and the plot scripts. `Iteration N` counts through all stages in the order in which
    they run. As in Caffe N counts the updates done before the line: the loss of `Iteration 0` is that of the first weights, and a
    test at N follows N updates. The rate comes before the loss: parse_log.py gives each row the last rate that it has read."""
    above, total = {}, 0
    for stage in run.history.stages:
        if not stage.left_out:
            above[stage.name] = total
            total += stage.finished.iterations if stage.finished else stage.max_iter
    written = []
    for line in lines(run):
        if line.stage and line.stage not in above:
            continue
        moment = f"{datetime.fromtimestamp(line.time):%m%d %H:%M:%S.%f}"
        done = above.get(line.stage, 0) + line.iter
        written += [f"I{moment}     1 {place}] {text}\n" for place, text in _caffe(line, done, run)]
    return "".join(written)


def _caffe(line: Line, done: int, run: Run) -> Iterator[tuple[str, str]]:
    """Where in Caffe's source each text comes from, which some scripts look for, and the text."""
    match line.what:
        case "run":
            yield "solver.cpp:279", f"Solving {line.text}"
        case "start":
            yield "stagerun:1", line.text
        case "train" if (line.iter - 1) % line.display == 0:
            yield "sgd_solver.cpp:106", f"Iteration {done - 1}, lr = {line.lr:g}"
            yield "solver.cpp:228", f"Iteration {done - 1}, loss = {line.loss:g}"
            yield "solver.cpp:244", f"    Train net output #0: loss = {line.loss:g} (* 1 = {line.loss:g} loss)"
        case "test" if line.tested:
            yield "solver.cpp:337", f"Iteration {done}, Testing net (#0)"
            # parse_log.sh takes #0 for the accuracy and #1 for the loss.
            yield "solver.cpp:404", f"    Test net output #0: accuracy = {line.tested.top1:g}"
            yield "solver.cpp:404", f"    Test net output #1: loss = {line.loss:g} (* 1 = {line.loss:g} loss)"
            yield "solver.cpp:404", f"    Test net output #2: accuracy_top5 = {line.tested.top5:g}"
        case "snapshot":
            yield "solver.cpp:454", f"Snapshotting to binary proto file {run.out.absolute()}/snapshots/{line.text}"
        case "stopped":
            yield "solver.cpp:301", "Optimization stopped early."
        case "done":
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
        for ema in (False, True):
            if rows := [row for stage, last in _path(run, leaf) for row in _rows(run, stage, last, found, ema)]:
                tables.append((leaf.name + ", averaged weights" * ema, rows))
    written = []
    for name, rows in tables:
        text = "epoch\thours\ttop1Accuracy\ttop5Accuracy\n"
        text += "".join(f"{_short(e)}\t{s / 3600:.8f}\t{100 * one:.2f}\t{100 * five:.2f}\n" for e, s, one, five in rows)
        written.append(f"# {name}\n{text}" if len(tables) > 1 else text)
    return "\n".join(written)


def _path(run: Run, leaf: StageHistory) -> list[tuple[StageHistory, int]]:
    """The stages from the seed to a leaf, each with the last iteration that lies on the path."""
    path = run.path(leaf)
    lasts = [leaf.max_iter, *(child.parent_iter for child in path)]
    return [*zip(path, lasts, strict=False)][::-1]


def _rows(
    run: Run, stage: StageHistory, last: int, found: Sequence[Line], ema: bool
) -> Iterator[tuple[float, float, float, float]]:
    """(epoch, seconds, top-1, top-5) of each evaluation, on as many images as the largest had."""
    tests = [(line, line.tested) for line in found if line.stage == stage.name and line.tested]
    images = max((tested.images for _, tested in tests), default=0)
    before = run.seconds(stage) - stage.seconds
    result = stage.finished
    for line, tested in tests:
        at_end = result is not None and tested.iter == result.iterations
        if tested.ema == ema and tested.images == images and tested.iter <= last and not at_end:
            yield _epoch(stage, tested.iter), before + line.trained, tested.top1, tested.top5
    if result is not None and result.iterations <= last:
        top1, top5 = (result.ema_top1, result.ema_top5) if ema else (result.top1, result.top5)
        if top1 is not None and top5 is not None:
            yield _epoch(stage, result.iterations), before + result.train_seconds, top1, top5


def _short(epoch: float) -> str:
    return f"{epoch:.6f}".rstrip("0").rstrip(".")
