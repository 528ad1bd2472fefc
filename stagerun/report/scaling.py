"""Speed by number of workers, over the runs of one schedule on one kind of device. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from stagerun.report.history import Span
from stagerun.report.runs import Run


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


def speeds(runs: Sequence[Run]) -> tuple[list[Speed], list[str]]:
    """A row for each number of workers, and notes.

    Stages differ in speed (image size, device batch), so only those that were trained with every number of workers
    count, each with the same weight in all rows. An iteration that was done again counts once.
    """
    seen: dict[tuple[str, str], dict[int, dict[str, list[Span]]]] = {}
    sources: dict[tuple[str, str, int], dict[str, set[int]]] = {}
    for run in runs:
        lives = {life.number: life for life in run.history.lives if life.workers}
        for stage in run.history.stages:
            for number, span in (stage.trained.lives if stage.trained else {}).items():
                life = lives.get(number)
                if life is None:
                    continue
                key = run.history.schedule, life.device
                seen.setdefault(key, {}).setdefault(life.workers, {}).setdefault(stage.name, []).append(span)
                sources.setdefault((*key, life.workers), {}).setdefault(run.label, set()).add(life.threads)
    found, notes = [], []
    for (schedule, device), by_workers in sorted(seen.items()):
        stages = [list(s) for s in by_workers.values()]
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
        found += _rows(schedule, device, by_workers, common, sources)
    return found, notes


def _rows(
    schedule: str,
    device: str,
    by_workers: dict[int, dict[str, list[Span]]],
    stages: Sequence[str],
    sources: dict[tuple[str, str, int], dict[str, set[int]]],
) -> list[Speed]:
    weights = {name: max(sum(p.images for p in w[name]) for w in by_workers.values()) for name in stages}
    rows: list[Speed] = []
    for workers, spans in sorted(by_workers.items()):
        seconds = sum(
            weights[name] * sum(s.seconds for s in spans[name]) / max(1, sum(s.images for s in spans[name]))
            for name in stages
        )
        speed = sum(weights.values()) / seconds if seconds else 0.0
        base = rows[0] if rows else None
        speed_up = speed / base.images_per_second if base and base.images_per_second else 1.0
        by_run = sources[schedule, device, workers]
        rows.append(
            Speed(
                schedule=schedule,
                device=device,
                workers=workers,
                threads=tuple(sorted(set().union(*by_run.values()))),
                batch=tuple(sorted(set().union(*(span.batches for name in stages for span in spans[name])))),
                runs=tuple(by_run),
                images_per_second=speed,
                speed_up=speed_up,
                efficiency=speed_up * base.workers / workers if base else 1.0,
            )
        )
    return rows
