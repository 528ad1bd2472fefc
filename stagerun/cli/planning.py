"""What `plan` looks at on this machine besides the files: data, earlier results, the output folder."""

import os
from collections.abc import Collection
from pathlib import Path

from stagerun.errors import PermissionDenied, StorageError
from stagerun.plan import Plan
from stagerun.plan.estimate import Figures, estimate, snapshots_on_disk
from stagerun.plan.estimate_text import doubts
from stagerun.plan.render import csv_rows
from stagerun.runner.figures import read_figures
from stagerun.runner.results import read_result
from stagerun.text import count, duration, size


def remarks(plan: Plan, out: Path, damaged: Collection[str] = ()) -> list[str]:
    """One sentence each: what is missing here or `damaged`, and what time and disk it will take as far as that was
    measured."""
    data = plan.schedule.data
    found = [f"snapshot {name} is damaged and is passed over" for name in damaged]
    for field, source in (("data.train", data.train), ("data.val", data.val)):
        if source is not None and not os.path.exists(source.path):
            found.append(f"{field}: there is no LMDB at {source.path} on this machine; `run` will need it")
    if data.val is None:
        found.append("no data.val: nothing will be evaluated")
    unsaved = [s.stage.name for s in plan.stages if not s.stage.solver.snapshot]
    if unsaved:
        found.append(
            f"no snapshot inside {', '.join(unsaved)}: a kill there costs the stage from its start (`snapshot`)"
        )
    return found + _time(plan, out) + _disk(plan)


def _time(plan: Plan, out: Path) -> list[str]:
    """From a rehearsal, or else from the stages that are finished."""
    if not plan.iterations_left:
        return []
    figures = read_figures(out)
    if figures is not None:
        return _rehearsed(plan, figures)
    speeds = [
        r.images_per_second for s in plan.stages if s.end is not None and (r := read_result(out, s.end)) is not None
    ]
    if not speeds:
        return []
    images = sum(s.iterations_left * s.stage.solver.batch_size for s in plan.stages)
    speed = min(speeds)
    return [f"about {duration(images / speed)} of training left at {speed:.0f} images/s, the slowest stage so far"]


def _rehearsed(plan: Plan, figures: Figures) -> list[str]:
    times = estimate(plan, figures, figures.workers)
    known = {name: time for name, time in times.items() if time is not None}
    source = (
        f"with {count(figures.workers, 'worker')}, as rehearsed on {figures.date} on {figures.host} "
        f"({figures.device}{', synthetic images' if figures.synthetic else ''})"
    )
    found = []
    if known:
        parts = ", ".join(f"{name} {duration(time.total)}" for name, time in known.items())
        found.append(f"about {duration(sum(t.total for t in known.values()))} left {source}: {parts}")
        found += [f"a rough estimate: {doubt}" for doubt in doubts(plan, figures)]
    unknown = [name for name in times if name not in known]
    if unknown:
        found.append(f"stage {', '.join(unknown)} has changed since the rehearsal of {figures.date}: rehearse again")
    return found


def _disk(plan: Plan) -> list[str]:
    sizes = [ref.bytes for s in plan.stages for ref in (s.start, s.end) if ref is not None]
    if not sizes:
        return []
    count = snapshots_on_disk(plan.schedule)
    return [f"snapshots take {size(max(sizes))} each, at most {size(count * max(sizes))} in all"]


def write_csv(plan: Plan, path: str) -> None:
    """One row per iteration. PermissionDenied or StorageError naming the file."""
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.writelines(csv_rows(plan))
    except PermissionError as error:
        raise PermissionDenied(f"may not write {path}") from error
    except OSError as error:
        raise StorageError(f"can't write {path}: {error.strerror}") from error
