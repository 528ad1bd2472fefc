"""The evaluation of a stage's last snapshot, as a file beside it. No torch: `plan` reads them too."""

import json
from dataclasses import asdict
from pathlib import Path

from stagerun import store
from stagerun.events import StageFinished
from stagerun.logged import result_of
from stagerun.plan import Plan, PlannedStage, State
from stagerun.recipe import Schedule, Stage
from stagerun.snapshots import SnapshotRef


def path_of(out: Path, snapshot: str) -> Path:
    return out / "results" / f"{snapshot}.json"


def read_result(out: Path, ref: SnapshotRef) -> StageFinished | None:
    """The result of a snapshot; None if there is none, or it can't be read or is no result (then it is made again)."""
    try:
        return result_of(path_of(out, ref.name).read_bytes())
    except (OSError, ValueError):
        return None


def write_result(disk: store.Disk, out: Path, finished: StageFinished) -> None:
    """Rank 0 only. StorageError or PermissionDenied if it can't be written."""
    store.write_atomic(disk, path_of(out, finished.snapshot), json.dumps(asdict(finished)).encode())


def results(plan: Plan, out: Path) -> list[StageFinished]:
    """Those of the finished stages, in running order."""
    return [r for s in plan.stages if s.end is not None and (r := read_result(out, s.end)) is not None]


def unfinished(plan: Plan, out: Path) -> list[PlannedStage]:
    """Stages that are trained, but whose evaluation is missing, or was made with other images or another transform."""

    def missing(planned: PlannedStage) -> bool:
        result = read_result(out, planned.end) if planned.end is not None else None
        return result is None or result.tested_on != tested_on(plan.schedule, planned.stage)

    return [s for s in plan.stages if s.state is State.DONE and missing(s)]


def tested_on(schedule: Schedule, stage: Stage) -> str:
    """What the evaluation of a stage depends on besides its weights, as text; '' without data.val."""
    val = schedule.data.val
    return "" if val is None else f"{val.path} {val.images} {stage.solver.test_transform}"
