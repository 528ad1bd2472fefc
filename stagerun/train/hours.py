"""Estimated hours of a schedule: from a given speed, the last run, or a rehearsal."""

import math
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from stagerun import store
from stagerun.base.errors import StagerunError
from stagerun.base.events import EnsembleTested, StageFinished
from stagerun.base.pace import pace
from stagerun.base.recipe import Schedule
from stagerun.base.text import count, size
from stagerun.logs.log_file import LOG, Life, read_last_life
from stagerun.plan import Plan
from stagerun.plan.ensembles import ensembles_left
from stagerun.plan.hours import (
    Hours,
    Measured,
    Spent,
    at_images_per_second,
    hours_of_run,
    left_at,
    measured,
    not_measured,
)
from stagerun.plan.rehearsal import Figures, doubts, speeds_of
from stagerun.system.lmdb_file import data_file
from stagerun.train.results import planned_ensembles, read_figures, results

_EVERY_S = 10.0


class TimeLeft:
    """Remaining seconds of a run, by stage and ensemble. The log is read again after `_EVERY_S` seconds."""

    def __init__(self, plan: Plan, out: Path) -> None:
        self._plan, self._out, self._read = plan, out, -math.inf
        self._hours: Hours | None = None
        self._together: Mapping[str, Spent | None] = {}

    def __call__(self, stage: str, iter: int, todo: int, pace: float) -> dict[str, float]:
        """Return `left_at`."""
        if time.monotonic() - self._read > _EVERY_S:
            self._read = time.monotonic()
            with suppress(StagerunError):  # a log that can't be read
                self._hours = find_hours(self._plan, self._out, None)
                if self._hours is not None:  # the plan may be older than the newest evaluations
                    tested = read_last_life(self._out / LOG).of(EnsembleTested)
                    done = {f"ensemble {one.name}" for one in tested}
                    together = left_together(self._plan, self._hours, self._out)
                    self._together = {name: left for name, left in together.items() if name not in done}
        return left_at(self._plan, self._hours, self._together, stage, iter, todo, pace)


def left_together(plan: Plan, hours: Hours, out: Path) -> dict[str, Spent | None]:
    """Return the time left of each ensemble."""
    return ensembles_left(plan.schedule, planned_ensembles(plan, out), hours.speeds)


def as_running(plan: Plan, hours: Hours, out: Path) -> tuple[Plan, Hours]:
    """Return what a run that is alive has left, as it says itself: from its last logged iteration on, at its pace."""
    life = read_last_life(out / LOG)
    if store.holder(out) is None or life.stage is None or not life.window or life.stage.stage not in hours.speeds:
        return plan, hours
    now, stretch = life.window[-1], pace(life.window).seconds_per_iteration
    speeds = {**hours.speeds, now.stage: replace(hours.speeds[now.stage], iteration=stretch, start=0.0)}
    stages = tuple(replace(s, iter=max(s.iter, now.iter)) if s.name == now.stage else s for s in plan.stages)
    hours = replace(hours, speeds=speeds, opening=0.0, source="in the run that is alive")
    return replace(plan, stages=stages), hours


def find_hours(plan: Plan, out: Path, images_per_second: float | None) -> Hours | None:
    """Return the estimate, None without a speed. StorageError, PermissionDenied for a log that can't be read."""
    schedule, figures, life = plan.schedule, read_figures(out), read_last_life(out / LOG)
    run = measured(life.seen)
    speeds = _speeds(plan, out, life) if run is not None and (figures is None or _is_newer(life, figures)) else {}
    if images_per_second is not None:
        hours = _at(schedule, images_per_second, figures, run)
    elif run is not None and speeds:
        hours = hours_of_run(schedule, run, speeds)
    elif figures is not None:
        hours = _rehearsed(plan, figures)
    else:
        return None
    if schedule.data.scratch is None or hours.opening:
        return hours
    with suppress(OSError, StagerunError):  # images that are not here: another note says so
        images = size(sum(data_file(schedule.lmdb(source)).stat().st_size for source in schedule.sources))
        note = f"{images} of images are copied to {schedule.data.scratch} of each node first, which was not timed"
        return replace(hours, notes=(*hours.notes, note))
    return hours


def _at(schedule: Schedule, rate: float, figures: Figures | None, run: Measured | None) -> Hours:
    """Estimate at that speed, with measured times of snapshots and, of a run, of starts: a rehearsal's starts include a first
    iteration."""
    costs = Measured()
    if run is not None and run.blocked is not None:
        costs = run
    elif figures is not None:
        costs = Measured(blocked=figures.blocked_seconds, written=figures.snapshot_seconds)
    return at_images_per_second(schedule, rate, costs)


def _speeds(plan: Plan, out: Path, life: Life) -> dict[str, float]:
    """Return images per second of each trained stage, and of the current one."""
    ended = [(result.stage, result.images_per_second) for result in (*results(plan, out), *life.of(StageFinished))]
    if life.window and (now := life.window[-1].stage) not in {stage for stage, rate in ended if rate > 0}:
        ended.append((now, pace(life.window).images_per_second))
    names = {stage.name for stage in plan.schedule.stages}
    return {stage: rate for stage, rate in ended if rate > 0 and stage in names}


def _is_newer(life: Life, figures: Figures) -> bool:
    """Return whether the run continued after the rehearsal."""
    with suppress(ValueError, OverflowError):
        return life.last is not None and life.last[0] >= time.mktime(time.strptime(figures.date, "%Y-%m-%d %H:%M"))
    return False


def _rehearsed(plan: Plan, figures: Figures) -> Hours:
    synthetic = ", synthetic images" if figures.synthetic else ""
    machine = f"{figures.date} on {figures.host} ({figures.device}{synthetic})"
    return Hours(
        source=f"with {count(figures.workers, 'worker')}, as rehearsed on {machine}",
        speeds=speeds_of(plan.schedule, figures, figures.workers),
        left_out=not_measured(plan.schedule, Measured(test_image=0.0, blocked=0.0, start=0.0)),
        notes=tuple(f"a rough estimate: {doubt}" for doubt in doubts(plan, figures)),
        unknown=f"was left out of the rehearsal of {figures.date}, or has changed since, or stagerun has: rehearse again",
    )
