"""Accuracy, loss, speed and time by epoch: of each run, or over all. Pure."""

import statistics
from collections.abc import Callable, Sequence

from stagerun.report.epochs import Epoch, epochs
from stagerun.report.runs import Run
from stagerun.report.tables import RUN, Column, Table, Value

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
