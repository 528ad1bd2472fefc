"""A run's history by epochs, and its tables: of each run, or over all. Pure."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stagerun.events import Tested
from stagerun.report.history import History, Span, StageHistory
from stagerun.report.runs import Run
from stagerun.report.tables import RUN, Column, Table, Value
from stagerun.report.thin import epoch_number


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """`number` is 1-based, along the path of ancestors; an update that straddles two epochs counts to the later one.
    `branch` is the first stage of its branch. The accuracies are of the last evaluation, None where there was none.
    `partial`: the stage was not trained to its end, and this is where it stopped.
    """

    number: int
    branch: str
    stages: tuple[str, ...]
    partial: bool
    lr: float
    loss: float
    top1: float | None
    test_loss: float | None
    ema_top1: float | None
    images_per_second: float | None
    seconds: float


def epochs(history: History) -> list[Epoch]:
    """Branch after branch. Where one stage alone follows from another, an epoch may hold parts of both."""
    pieces: dict[tuple[str, int], list[tuple[StageHistory, Span]]] = {}
    branches = _branches(history)
    for stage in history.stages:
        for number, span in (stage.trained.epochs if stage.trained else {}).items():
            pieces.setdefault((branches[stage.name], number), []).append((stage, span))
    return [_epoch(number, branch, held) for (branch, number), held in pieces.items()]


def _branches(history: History) -> dict[str, str]:
    """Stage -> the first stage of its branch: a stage alone in starting from another, at its end, goes on with its branch."""
    begun = [s for s in history.stages if s.trained]
    parents = [parent.name for s in begun if (parent := history.follows(s)) is not None]
    found: dict[str, str] = {}
    for stage in begun:
        parent = history.follows(stage)
        alone = parent is not None and parents.count(parent.name) == 1
        found[stage.name] = found.get(parent.name, stage.name) if parent is not None and alone else stage.name
    return found


def _epoch(number: int, branch: str, held: list[tuple[StageHistory, Span]]) -> Epoch:
    spans = [span for _, span in held]
    seconds = sum(span.seconds for span in spans)
    tests: dict[bool, Tested] = {}
    for stage, _ in held:
        tests |= {test.ema: test for epoch, test in stage.tests if epoch_number(epoch) == number}
    own, averaged = tests.get(False), tests.get(True)
    last = held[-1][0]
    stopped = last.finished is None and last.iter < last.max_iter
    return Epoch(
        number=number,
        branch=branch,
        partial=stopped and last.trained is not None and number == max(last.trained.epochs),
        stages=tuple(stage.name for stage, _ in held),
        lr=spans[-1].lr,
        loss=sum(span.loss for span in spans) / sum(span.updates for span in spans),
        top1=own.top1 if own else None,
        test_loss=own.loss if own else None,
        ema_top1=averaged.top1 if averaged else None,
        images_per_second=sum(span.images for span in spans) / seconds if seconds else None,
        seconds=seconds,
    )


_EPOCH_COLUMNS = (
    Column("epoch", "epoch", "count"),
    Column("stage", "stage", "text"),
    Column("lr", "LR", "rate"),
    Column("train_loss", "train loss", "loss"),
    Column("valid_accuracy", "valid accuracy", "percent"),
    Column("valid_loss", "valid loss", "loss"),
    Column("ema_valid_accuracy", "EMA valid accuracy", "percent"),
    Column("images_per_second", "images/s", "speed"),
    Column("seconds", "time", "time"),
)
_EPOCH_NOTE = (
    "epochs count along the path of ancestors; train loss: mean over the epoch's iterations, each before its update; LR: "
    "of its last iteration; valid accuracy, valid loss: top-1 and loss of the last evaluation in it; time: of training"
)


def _numbers(epoch: Epoch) -> tuple[float | None, ...]:
    return epoch.lr, epoch.loss, epoch.top1, epoch.test_loss, epoch.ema_top1, epoch.images_per_second, epoch.seconds


def epochs_table(runs: Sequence[Run]) -> Table:
    """One row per run and epoch."""
    rows = tuple((run.label, e.number, ", ".join(e.stages), *_numbers(e)) for run in runs for e in epochs(run.history))
    return Table("Epochs", (RUN, *_EPOCH_COLUMNS), rows, (_EPOCH_NOTE,))


OPERATIONS: dict[str, Callable[[Sequence[float]], float]] = {"mean": statistics.fmean, "max": max}


def epochs_over_runs(runs: Sequence[Run], operation: str) -> Table:
    """One row per epoch: of each number the mean, or the largest, over the runs that have it. `operation`: a key of
    OPERATIONS. The epoch in which an unfinished run has stopped is left out."""
    together: dict[tuple[str, int], list[Epoch]] = {}
    for run in runs:
        for epoch in epochs(run.history):
            if not epoch.partial:
                together.setdefault((epoch.branch, epoch.number), []).append(epoch)
    combine = OPERATIONS[operation]
    rows: list[tuple[Value, ...]] = []
    for same in together.values():
        numbers = [[c for c in column if isinstance(c, float)] for column in zip(*map(_numbers, same), strict=True)]
        stages = ", ".join(dict.fromkeys(name for epoch in same for name in epoch.stages))
        rows.append((same[0].number, stages, len(same), *(combine(n) if n else None for n in numbers)))
    columns = (*_EPOCH_COLUMNS[:2], Column("runs", "runs", "count"), *_EPOCH_COLUMNS[2:])
    what = "the mean" if operation == "mean" else "the largest value"
    note = (
        f"each number is {what} over the runs, without the epoch in which an unfinished one has stopped; {_EPOCH_NOTE}"
    )
    return Table("Epochs", columns, tuple(rows), (note,))
