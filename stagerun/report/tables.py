"""The tables of a report, as values: what stands in them, not how it is written. Here those of single runs. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from stagerun.report.history import StageHistory
from stagerun.report.runs import Run, start_in_words

Value = str | int | float | None


@dataclass(frozen=True, slots=True)
class Column:
    """`key` heads it in CSV, `title` where people read it ('': only in CSV). `kind` is `text` or a key of
    `written.WORDS`. People are spared a column that says `dull` or nothing in every row.
    """

    key: str
    title: str
    kind: str
    dull: Value = None


@dataclass(frozen=True, slots=True)
class Table:
    """`notes` are sentences on how its numbers came about."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]
    notes: tuple[str, ...] = ()


RUN = Column("run", "run", "text")


def runs_table(runs: Sequence[Run]) -> Table:
    """One row per run, and per end where the schedule has branches."""
    columns = (
        RUN,
        Column("schedule", "schedule", "text"),
        Column("seed", "seed", "text"),
        Column("workers", "workers", "text"),
        Column("end", "end", "text"),
        Column("epochs", "epochs", "epochs"),
        Column("top1", "top-1", "percent"),
        Column("test_loss", "validation loss", "loss"),
        Column("ema_top1", "EMA top-1", "percent"),
        Column("train_seconds", "training", "time"),
        Column("wall_seconds", "wall", "time"),
        Column("lives", "lives", "count"),
        Column("state", "state", "text"),
    )
    rows: list[tuple[Value, ...]] = []
    for run in runs:
        h = run.history
        workers = ", ".join(dict.fromkeys(str(life.workers) for life in h.lives if life.workers))
        ends: list[StageHistory | None] = [*run.leaves()]
        for end in ends or [None]:
            result = end.finished if end else None
            rows.append(
                (
                    run.label,
                    h.schedule,
                    run.seed(end) if end else "",
                    workers,
                    end.name if end else "",
                    end.trained.epoch if end and end.trained else None,
                    result.top1 if result else None,
                    result.test_loss if result else None,
                    result.ema_top1 if result else None,
                    run.seconds(end) if end else None,
                    h.wall_seconds,
                    len(h.lives),
                    run.state_in_words,
                )
            )
    notes = (
        "training: of the end and the stages before it on its path; "
        "wall: over all process lives, with evaluations and what was done again, without the time between them",
    )
    return Table("Runs", columns, tuple(rows), notes)


def stages_table(runs: Sequence[Run]) -> Table:
    """One row per run and stage."""
    columns = (
        RUN,
        Column("stage", "stage", "text"),
        Column("from", "from", "text"),
        Column("iterations", "iterations", "count"),
        Column("epochs", "epochs", "epochs"),
        Column("first_lr", "LR first", "rate"),
        Column("last_lr", "LR last", "rate"),
        Column("weight_decay", "decay", "rate"),
        Column("augmentation", "", "text"),
        Column("loss", "train loss", "loss"),
        Column("top1", "top-1", "percent"),
        Column("gain", "gain", "points"),
        Column("top5", "top-5", "percent"),
        Column("test_loss", "validation loss", "loss"),
        Column("ema_top1", "EMA top-1", "percent"),
        Column("ema_top5", "", "percent"),
        Column("images_per_second", "images/s", "speed"),
        Column("train_seconds", "time", "time"),
        Column("resumes", "resumes", "count", dull=0),
        Column("skips", "skips", "count", dull=0),
        Column("rollbacks", "rollbacks", "count", dull=0),
        Column("state", "state", "text", dull="done"),
    )
    rows: list[tuple[Value, ...]] = []
    for run in runs:
        for stage in run.history.stages:
            begun = stage.finished is not None or stage.trained is not None
            rows.append(
                (run.label, stage.name, *(_stage_cells(run, stage) if begun else (*_NO_CELLS, run.state(stage))))
            )
    notes = (
        "train loss: mean over the last iterations, 100 at most; gain: top-1 against the stage it started from, in "
        "percentage points; time: of training, without evaluation and without what was done again",
    )
    return Table("Stages", columns, tuple(rows), notes)


_NO_CELLS: tuple[Value, ...] = (None,) * 19


def _stage_cells(run: Run, stage: StageHistory) -> tuple[Value, ...]:
    """All but run and stage. What only a finished stage has is empty for one that is in training."""
    end, now = stage.finished, stage.trained
    return (
        start_in_words(run, stage),
        end.iterations if end else stage.iter,
        end.epochs if end else stage.epochs,
        end.first_lr if end else now.first_lr if now else None,
        end.last_lr if end else now.last_lr if now else None,
        end.weight_decay if end else now.weight_decay if now else None,
        end.augmentation if end else "",
        end.loss if end else now.loss if now else None,
        end.top1 if end else None,
        run.gain(stage),
        end.top5 if end else None,
        end.test_loss if end else None,
        end.ema_top1 if end else None,
        end.ema_top5 if end else None,
        stage.images_per_second,
        stage.seconds,
        len(stage.resumes),
        stage.skips,
        stage.rollbacks,
        run.state(stage),
    )


def lives_table(runs: Sequence[Run]) -> Table:
    """One row per process life."""
    columns = (
        RUN,
        Column("life", "life", "count"),
        Column("begun", "begun (UTC)", "moment"),
        Column("start", "at", "text"),
        Column("workers", "workers", "count"),
        Column("threads", "threads", "count"),
        Column("device", "device", "text"),
        Column("version", "", "text"),
        Column("iterations", "iterations", "count"),
        Column("done_again", "done again", "count"),
        Column("images_per_second", "images/s", "speed"),
        Column("wall_seconds", "time", "time"),
        Column("end", "end", "text"),
    )
    rows: list[tuple[Value, ...]] = []
    for run in runs:
        for life in run.history.lives:
            last = life is run.history.lives[-1]
            rows.append(
                (
                    run.label,
                    life.number,
                    life.begun,
                    life.start,
                    life.workers or None,
                    life.threads or None,
                    life.device,
                    life.version,
                    life.updates,
                    life.again,
                    life.images / life.seconds if life.seconds else None,
                    life.ended - life.begun,
                    life.end or (run.word or "at work, or broken off" if last else "broken off"),
                )
            )
    note = (
        "done again: iterations of it that a later life had to repeat, or that `--redo` began anew, and those by which a branch got "
        "the snapshot that it starts from once more"
    )
    return Table("Process lives", columns, tuple(rows), (note,))
