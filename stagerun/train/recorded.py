"""What `run --replay OUT` finds in OUT: of each stage with `method: ASYNC` the snapshot whose record is replayed. No torch: before workers
start, most that can be wrong is wrong here."""

import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from stagerun import store
from stagerun.base.errors import UsageError, listing
from stagerun.base.recipe import Schedule
from stagerun.base.snapshots import SnapshotRef
from stagerun.plan import PlannedStage, State, make_plan
from stagerun.store.layout import snapshots_folder
from stagerun.train.output import DISK

SUFFIX = "-replay"  # of the default output folder


def recorded(replayed: Path, schedule: Schedule, out: Path, without: Collection[str] = ()) -> Mapping[str, SnapshotRef]:
    """By the name of a stage with `ASYNC`, the snapshot in `replayed` that holds its newest record. `out` is the replay's own folder, and
    `without` names snapshots that can't be read.

    UsageError where there is nothing to replay, or of another schedule; StorageError, PermissionDenied, ResumeRefused.
    """
    flag = f"--replay {replayed}"
    if replayed.resolve() == out.resolve():
        text = f"name another one with --out; without --out it is out/NAME{SUFFIX}"
        raise UsageError(f"{flag} is the replay's own output folder", text)
    if not os.path.isdir(snapshots_folder(replayed)):
        text = "name the output folder of a run: ./out/NAME, or what --out named"
        raise UsageError(f"{flag}: there are no snapshots in such a folder", text)
    stages = [stage.name for stage in schedule.stages if stage.enabled and stage.solver.asynchronous]
    if not stages:
        text = "without it, the same command gives the same bits again: leave --replay out"
        raise UsageError(f"{flag}: no stage of {schedule.name} has `method: ASYNC`", text)
    found = store.inventory(DISK, replayed, looking=True)
    plan = make_plan(schedule, replace(found, snapshots=tuple(s for s in found.snapshots if s.name not in without)))
    planned = {one.stage.name: one for one in plan.stages}
    needed, parents = set[str](), list(stages)
    while parents:
        name = parents.pop()
        needed.add(name)
        parents += [p for p in (planned[name].stage.parent,) if p is not None]
    lines = [f"{flag} is of another schedule:"]
    for one in plan.stale:
        if one.stage.name in needed:
            lines += [f"  stage `{one.stage.name}`: {one.why}", *(f"    {change}" for change in one.changes)]
    if len(lines) > 1:
        raise UsageError("\n".join(lines), "give the schedule as it was then, with the same --set")
    refs = {name: ref for name in stages if (ref := newest(planned[name])) is not None}
    if not refs:
        raise UsageError(
            f"{flag}: there is no snapshot of {listing(stages, 'or')} that can be read",
            "the order of pushes is in snapshots alone: a run that ended before its first has none to replay",
        )
    return refs


def newest(planned: PlannedStage) -> SnapshotRef | None:
    """The stage's own snapshot that it has come to."""
    if planned.state is State.DONE:
        return planned.end
    return planned.start if planned.state is State.RESUME else None
