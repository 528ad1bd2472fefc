"""What `run --replay OUT` finds in OUT: of each stage with `method: ASYNC` the snapshot whose record is replayed. No torch: before workers
start, most that can be wrong is wrong here."""

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from stagerun import store
from stagerun.base.errors import UsageError, listing
from stagerun.base.recipe import Schedule, Stage
from stagerun.base.snapshots import SnapshotRef
from stagerun.language.resolve import SCHEDULE_FILE
from stagerun.plan import PlannedStage, State, make_plan
from stagerun.store.layout import snapshots_folder
from stagerun.train.output import DISK

SUFFIX = "-replay"  # of the default output folder


def asynchronous(schedule: Schedule) -> list[Stage]:
    return [stage for stage in schedule.stages if stage.enabled and stage.solver.asynchronous]


def recorded(replayed: Path, schedule: Schedule, out: Path, without: Collection[str] = ()) -> Mapping[str, SnapshotRef]:
    """By the name of a stage with `ASYNC`, as the schedule has them, the snapshot in `replayed` that holds its newest record. `out` is the
    replay's own folder, and `without` names snapshots that can't be read.

    UsageError where there is nothing to replay, or of another schedule; StorageError, PermissionDenied, ResumeRefused.
    """
    _require_folder(replayed, out)
    stages = asynchronous(schedule)
    if not stages:
        raise UsageError(
            f"--replay {replayed}: no stage of {schedule.name} has `method: ASYNC`",
            "without it, the same command gives the same bits again: leave --replay out",
        )
    found = store.inventory(DISK, replayed, looking=True)
    plan = make_plan(schedule, replace(found, snapshots=tuple(s for s in found.snapshots if s.name not in without)))
    planned = {one.stage.name: one for one in plan.stages}
    needed = {one.stage.name for stage in stages for one in _path(planned, stage.name)}
    _require_same(replayed, [one for one in plan.stale if one.stage.name in needed])
    refs = {stage.name: newest(planned[stage.name]) for stage in stages}
    if not any(refs.values()):
        names = listing([stage.name for stage in stages], "or")
        raise UsageError(
            f"--replay {replayed}: there is no snapshot of {names} that can be read",
            "the order of pushes is in snapshots alone: a run that ended before its first has none to replay",
        )
    return {name: ref for name, ref in refs.items() if ref is not None}


def _require_folder(replayed: Path, out: Path) -> None:
    if replayed.resolve() == out.resolve():
        raise UsageError(
            f"--replay {replayed} is the replay's own output folder",
            f"name another one with --out; without --out it is out/NAME{SUFFIX}",
        )
    if os.path.isdir(snapshots_folder(replayed)):
        return
    what = "it has no snapshots" if os.path.lexists(replayed) else "there is no such folder"
    hint = "name the output folder of a run: ./out/NAME, or what --out named"
    if os.path.exists(replayed / SCHEDULE_FILE):
        what = "that is the folder of a schedule"
    raise UsageError(f"--replay {replayed}: {what}", hint)


def _path(planned: Mapping[str, PlannedStage], name: str | None) -> Iterator[PlannedStage]:
    """A stage and its ancestors."""
    while name is not None:
        yield planned[name]
        name = planned[name].stage.parent


def _require_same(replayed: Path, stale: Collection[PlannedStage]) -> None:
    if stale:
        lines = [f"--replay {replayed} is of another schedule:"]
        for one in stale:
            lines.append(f"  stage `{one.stage.name}`: {one.why}")
            lines += [f"    {change}" for change in one.changes]
        raise UsageError("\n".join(lines), "give the schedule as it was then, with the same --set")


def newest(planned: PlannedStage) -> SnapshotRef | None:
    """The stage's own snapshot that it has come to."""
    if planned.state is State.DONE:
        return planned.end
    return planned.start if planned.state is State.RESUME else None
