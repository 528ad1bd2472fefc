"""The tables of several runs beside each other. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stagerun.tools.report.compare import MOST_NAMES, Spread, differences, ensemble_groups, groups, spread
from stagerun.tools.report.history import Life, Run, Span
from stagerun.tools.report.table import Cells, Column, Table, Value, table_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """`speed_up` and `efficiency` are against the row with the fewest workers; at 1.0 each worker does as much as there."""

    schedule: str
    device: str
    workers: int
    threads: tuple[int, ...]
    batch: tuple[int, ...]
    runs: tuple[str, ...]
    images_per_second: float
    speed_up: float
    efficiency: float


@dataclass(frozen=True, slots=True)
class _Work:
    """What one process life did of one stage."""

    run: str
    life: Life
    stage: str
    span: Span


def speeds(runs: Sequence[Run]) -> tuple[list[Speed], list[str]]:
    """A row for each number of workers, and notes.

    Stages differ in speed (image size, device batch), so only those that were trained with every number of workers
    count, each with the same weight in all rows. An iteration that was done again counts once.
    """
    seen: dict[tuple[str, str], dict[int, list[_Work]]] = {}
    for run in runs:
        lives = {life.number: life for life in run.history.lives if life.workers}
        for stage in run.history.stages:
            for number, span in (stage.trained.lives if stage.trained else {}).items():
                if life := lives.get(number):
                    by_workers = seen.setdefault((run.history.schedule, life.device), {})
                    by_workers.setdefault(life.workers, []).append(_Work(run.label, life, stage.name, span))
    found, notes = [], []
    for (schedule, device), by_workers in sorted(seen.items()):
        stages = [list(dict.fromkeys(work.stage for work in works)) for works in by_workers.values()]
        common = [name for name in stages[0] if all(name in other for other in stages)]
        left_out = sorted({name for other in stages for name in other} - set(common))
        if left_out and common:
            notes.append(
                f"speed of {schedule} is over {', '.join(common)}: not every number of workers trained "
                f"{', '.join(left_out)}"
            )
        if not common:
            notes.append(
                f"{schedule}: no stage was trained with every number of workers, so their speeds can't be compared"
            )
            continue
        found += _rows(schedule, device, by_workers, common)
    return found, notes


def _rows(schedule: str, device: str, by_workers: Mapping[int, Sequence[_Work]], stages: Sequence[str]) -> list[Speed]:
    spans = {
        workers: {name: [work.span for work in works if work.stage == name] for name in stages}
        for workers, works in sorted(by_workers.items())
    }
    weights = {name: max(sum(s.images for s in of[name]) for of in spans.values()) for name in stages}
    rows: list[Speed] = []
    for workers, of in spans.items():
        seconds = sum(
            weights[name] * sum(s.seconds for s in of[name]) / max(1, sum(s.images for s in of[name]))
            for name in stages
        )
        speed = sum(weights.values()) / seconds if seconds else 0.0
        base = rows[0] if rows else None
        speed_up = speed / base.images_per_second if base and base.images_per_second else 1.0
        rows.append(
            Speed(
                schedule=schedule,
                device=device,
                workers=workers,
                threads=tuple(sorted({work.life.threads for work in by_workers[workers]})),
                batch=tuple(sorted(set().union(*(span.batches for name in stages for span in of[name])))),
                runs=tuple(dict.fromkeys(work.run for work in by_workers[workers])),
                images_per_second=speed,
                speed_up=speed_up,
                efficiency=speed_up * base.workers / workers if base else 1.0,
            )
        )
    return rows


def seeds_table(runs: Sequence[Run]) -> Table:
    """Mean and spread of each stage over runs that are alike but for the seed."""
    found = groups(runs)
    several = max(Counter(g.stage for g in found).values(), default=0) > 1  # recipes of one stage
    columns = [Column("stage", "stage", "text"), Column("runs", "runs" if several else "", "text")]
    columns += [Column("n", "n", "count"), Column("seeds", "seeds", "text")]
    for key, title in (("top1", "top-1"), ("ema_top1", "EMA top-1")):
        columns += [Column(f"{key}_mean", f"{title} mean", "percent"), Column(f"{key}_sd", "sd", "spread")]
        columns += [Column(f"{key}_min", "min", "percent"), Column(f"{key}_max", "max", "percent")]
    columns += [Column("test_loss_mean", "validation loss mean", "loss"), Column("test_loss_sd", "sd", "loss")]
    columns += [Column("gain_mean", "gain mean", "points"), Column("gain_sd", "sd", "spread")]
    columns += [Column("train_seconds_mean", "time mean", "time")]
    rows: list[tuple[Value, ...]] = []
    for g in found:
        spreads: list[Value] = []
        for s in (g.top1, g.ema_top1):
            spreads += [s.mean, s.sd, s.low, s.high] if s else [None] * 4
        gain = (g.gain.mean, g.gain.sd) if g.gain else (None, None)
        who = (", ".join(g.runs), len(g.runs), ", ".join(g.seeds))
        loss = (g.test_loss.mean, g.test_loss.sd) if g.test_loss else (None, None)
        rows.append((g.stage, *who, *spreads, *loss, *gain, g.seconds.mean))
    notes = [
        "sd: the sample's standard deviation (n - 1), in percentage points; only runs that have finished the stage"
    ]
    if any(len(set(g.seeds)) < len(g.seeds) for g in found):
        notes.append("where a seed stands twice, mean and sd are not over seeds alone")
    return Table("Over seeds", tuple(columns), tuple(rows), tuple(notes))


def ranking_table(runs: Sequence[Run]) -> Table:
    """Stages and ensembles by top-1, the best first: those of runs that are alike but for the seed as one row; of a stage in
    training its last evaluation."""
    found: list[tuple[Value, ...]] = []

    def add(what: str, labels: Sequence[str], *numbers: Spread | None) -> None:
        top1, loss, ema = numbers
        of = ", ".join(labels) if len(labels) <= MOST_NAMES else f"{len(labels)} runs"
        if top1 is not None:
            means = [(s.mean, s.sd) if s else (None, None) for s in (top1, loss)]
            found.append((what, of, top1.n, *means[0], *means[1], ema.mean if ema else None))

    for g in groups(runs):
        add(g.stage, g.runs, g.top1, g.test_loss, g.ema_top1)
    for run in runs:
        most = max((test.images for stage in run.history.stages for _, test in stage.tests), default=0)
        for stage in run.history.stages:
            if stage.finished is None and stage.tests:
                last = [test for _, test in stage.tests if test.iter == stage.tests[-1][1].iter]
                own, averaged = ([t for t in last if t.ema is ema] for ema in (False, True))
                kinds = [t.top1 for t in own], [t.loss for t in own], [t.top1 for t in averaged]
                fewer = f", {last[0].images} images" if last[0].images < most else ""
                what = f"{stage.name} at {last[0].iter} of {stage.max_iter}{fewer}"
                add(what, [run.label], *map(spread, kinds))
    for group in ensemble_groups(runs):
        tested, labels = [e for _, e in group], [run.label for run, _ in group]
        losses = [e.loss for e in tested if e.loss is not None]
        add(f"ensemble {tested[0].name}", labels, spread([e.top1 for e in tested]), spread(losses), None)
    columns = (
        Column("rank", "#", "count"),
        Column("what", "stage or ensemble", "text"),
        Column("run", "run", "text"),
        Column("n", "n", "count", dull=1),
        Column("top1_mean", "top-1", "percent"),
        Column("top1_sd", "sd", "spread"),
        Column("test_loss_mean", "validation loss", "loss"),
        Column("test_loss_sd", "sd", "loss"),
        Column("ema_top1_mean", "EMA top-1", "percent"),
    )
    ranked = sorted(found, key=lambda row: -float(row[3] or 0.0))
    several = any(row[2] != 1 for row in ranked)
    note = ("mean and sd (the sample's, n - 1; of top-1 in percentage points) over runs that differ by the seed alone",)
    return Table("Ranking", columns, tuple((n, *row) for n, row in enumerate(ranked, 1)), note if several else ())


_WORKERS: Cells = (
    (Column("schedule", "schedule", "text"), lambda s: s.schedule),
    (Column("device", "device", "text"), lambda s: s.device),
    (Column("workers", "workers", "count"), lambda s: s.workers),
    (Column("threads", "threads", "text"), lambda s: ", ".join(map(str, s.threads))),
    (Column("batch_size", "batch", "text"), lambda s: ", ".join(map(str, s.batch))),
    (Column("runs", "runs", "text"), lambda s: ", ".join(s.runs)),
    (Column("images_per_second", "images/s", "speed"), lambda s: s.images_per_second),
    (Column("speed_up", "speed-up", "factor"), lambda s: s.speed_up),
    (Column("efficiency", "efficiency", "share"), lambda s: s.efficiency),
)


def workers_table(runs: Sequence[Run]) -> Table:
    """Speed and efficiency by number of workers."""
    found, notes = speeds(runs)
    why = "images/s: of training, the first iterations of a life among them; speed-up against the fewest workers"
    return table_of("By number of workers", _WORKERS, ((speed,) for speed in found), why, *notes)


def differences_table(runs: Sequence[Run]) -> Table:
    """One row per thing that differed, a column for each run."""
    columns = [Column("kind", "of", "text"), Column("field", "field", "text")]
    columns += [Column("stages", "stages", "text"), *(Column(run.label, run.label, "text") for run in runs)]
    rows = tuple((d.kind, d.field, d.stages, *d.values) for d in differences(runs))
    without = {run.label: [s.name for s in run.history.stages if s.name not in run.identities] for run in runs}
    missing = [f"{label} ({', '.join(gone)})" for label, gone in without.items() if gone]
    notes = [] if rows else ["nothing differed, of what the logs and snapshots say"]
    if missing:
        notes.append(f"?: there is no snapshot that would show the recipe: {'; '.join(missing)}")
    return Table("Differences", tuple(columns), rows, tuple(notes))
