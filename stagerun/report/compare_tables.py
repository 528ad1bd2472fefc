"""The tables of several runs beside each other. Pure."""

from collections import Counter
from collections.abc import Sequence

from stagerun.report import compare, scaling
from stagerun.report.runs import Run
from stagerun.report.tables import Column, Table, Value


def seeds_table(runs: Sequence[Run]) -> Table:
    """Mean and spread of each stage over runs that are alike but for the seed."""
    found = compare.groups(runs)
    several = max(Counter(g.stage for g in found).values(), default=0) > 1  # recipes of one stage
    columns = [Column("stage", "stage", "text"), Column("runs", "runs" if several else "", "text")]
    columns += [Column("n", "n", "count"), Column("seeds", "seeds", "text")]
    for key, title in (("top1", "top-1"), ("ema_top1", "EMA top-1")):
        columns += [Column(f"{key}_mean", f"{title} mean", "percent"), Column(f"{key}_sd", "sd", "spread")]
        columns += [Column(f"{key}_min", "min", "percent"), Column(f"{key}_max", "max", "percent")]
    columns += [Column("gain_mean", "gain mean", "points"), Column("gain_sd", "sd", "spread")]
    columns += [Column("train_seconds_mean", "time mean", "time")]
    rows: list[tuple[Value, ...]] = []
    for g in found:
        spreads = [value for s in (g.top1, g.ema_top1) for value in _four(s)]
        gain = (g.gain.mean, g.gain.sd) if g.gain else (None, None)
        who = (", ".join(g.runs), len(g.runs), ", ".join(g.seeds))
        rows.append((g.stage, *who, *spreads, *gain, g.seconds.mean))
    notes = [
        "sd: the sample's standard deviation (n - 1), in percentage points; only runs that have finished the stage"
    ]
    if any(len(set(g.seeds)) < len(g.seeds) for g in found):
        notes.append("where a seed stands twice, mean and sd are not over seeds alone")
    return Table("Over seeds", tuple(columns), tuple(rows), tuple(notes))


def _four(spread: compare.Spread | None) -> tuple[Value, ...]:
    return (spread.mean, spread.sd, spread.low, spread.high) if spread else (None, None, None, None)


def workers_table(runs: Sequence[Run]) -> Table:
    """Speed and efficiency by number of workers."""
    columns = (
        Column("schedule", "schedule", "text"),
        Column("device", "device", "text"),
        Column("workers", "workers", "count"),
        Column("threads", "threads", "text"),
        Column("batch_size", "batch", "text"),
        Column("runs", "runs", "text"),
        Column("images_per_second", "images/s", "speed"),
        Column("speed_up", "speed-up", "factor"),
        Column("efficiency", "efficiency", "share"),
    )
    found, notes = scaling.speeds(runs)
    rows = tuple(
        (
            s.schedule, s.device, s.workers, ", ".join(map(str, s.threads)), ", ".join(map(str, s.batch)),
            ", ".join(s.runs), s.images_per_second, s.speed_up, s.efficiency,
        )
        for s in found
    )  # fmt: skip
    why = "images/s: of training, the first iterations of a life among them; speed-up against the fewest workers"
    return Table("By number of workers", columns, rows, (why, *notes))


def differences_table(runs: Sequence[Run]) -> Table:
    """One row per thing that differed, a column for each run."""
    columns = [Column("kind", "of", "text"), Column("field", "field", "text")]
    columns += [Column("stages", "stages", "text"), *(Column(run.label, run.label, "text") for run in runs)]
    rows = tuple((d.kind, d.field, d.stages, *d.values) for d in compare.differences(runs))
    missing = [f"{run.label} ({', '.join(gone)})" for run in runs if (gone := _without_snapshot(run))]
    notes = [] if rows else ["nothing differed, of what the logs and snapshots say"]
    if missing:
        notes.append(f"?: there is no snapshot that would tell the recipe: {'; '.join(missing)}")
    return Table("Differences", tuple(columns), rows, tuple(notes))


def _without_snapshot(run: Run) -> list[str]:
    return [s.name for s in run.history.stages if s.name not in run.identities]
