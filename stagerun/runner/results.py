"""The evaluation of a stage's last snapshot, and those of ensembles, as files beside them. No torch: `plan` reads them too."""

import json
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from stagerun import store
from stagerun.errors import StorageError
from stagerun.events import EnsembleTested, StageFinished
from stagerun.logged import ensemble_of, result_of
from stagerun.plan import Plan, PlannedStage, State
from stagerun.plan.counting import other_set, tested_on
from stagerun.plan.ensembles import EnsembleState, PlannedEnsemble, plan_ensembles
from stagerun.snapshots import SnapshotRef
from stagerun.store.layout import results_folder


def path_of(out: Path, snapshot: str) -> Path:
    return results_folder(out) / f"{snapshot}.json"


MOST = 1_000_000  # bytes of a file; a run writes one thousand


def _read(path: Path) -> bytes:
    # The folder may be a link, which somebody made on purpose; the file may not.
    return store.LocalDisk().read(Path(os.path.realpath(path.parent)) / path.name, MOST)


def read_result(out: Path, ref: SnapshotRef) -> StageFinished | None:
    """The result of a snapshot, under its stage's present name; None if there is none, or it can't be read or is not a result (then it
    is made again)."""
    try:
        found = result_of(_read(path_of(out, ref.name)))
    except (OSError, ValueError):
        return None
    return replace(found, stage=ref.stage) if ref.trained_as else found


def write_result(disk: store.Disk, out: Path, finished: StageFinished) -> None:
    """Rank 0 only. StorageError or PermissionDenied if it can't be written."""
    path = path_of(out, finished.snapshot)
    store.write_atomic(disk, path, json.dumps(asdict(finished)).encode())
    _look_again(path, result_of)


def results(plan: Plan, out: Path) -> list[StageFinished]:
    """Those of the finished stages, in running order."""
    return [r for s in plan.stages if s.end is not None and (r := read_result(out, s.end)) is not None]


def unfinished(plan: Plan, out: Path) -> list[PlannedStage]:
    """Stages that are trained, but whose evaluation is missing, or was made with other images or another transform."""

    def missing(planned: PlannedStage) -> bool:
        result = read_result(out, planned.end) if planned.end is not None else None
        if result is None or result.tested_on != tested_on(plan.schedule, planned.stage):
            return True
        return other_set(plan.schedule, result.tested_set)

    return [s for s in plan.stages if s.state is State.DONE and missing(s)]


def ensemble_path(out: Path, name: str) -> Path:
    return results_folder(out) / "ensembles" / f"{name}.json"


def read_ensemble(out: Path, name: str) -> EnsembleTested | None:
    """What was evaluated under that name, whatever it was made from; None as of `read_result`."""
    try:
        found = ensemble_of(_read(ensemble_path(out, name)))
    except (OSError, ValueError):
        return None
    return found if found.name == name else None


def write_ensemble(disk: store.Disk, out: Path, tested: EnsembleTested) -> None:
    """Rank 0 only. StorageError or PermissionDenied if it can't be written."""
    path = ensemble_path(out, tested.name)
    store.write_atomic(disk, path, json.dumps(asdict(tested)).encode())
    _look_again(path, ensemble_of)


def _look_again(path: Path, parse: Callable[[bytes], object]) -> None:
    """StorageError if a result can't be read back: what has none is evaluated, and so would be again and again."""
    try:
        parse(_read(path))
    except (OSError, ValueError) as error:
        raise StorageError(
            f"{path} was written without an error, but can't be read back: {error}",
            "see the system's log (dmesg), or choose another folder with --out",
        ) from error


def planned_ensembles(plan: Plan, out: Path) -> tuple[PlannedEnsemble, ...]:
    """Each ensemble of the schedule, and what is on disk of it."""
    found = {e.name: read_ensemble(out, e.name) for e in plan.schedule.ensembles}
    return plan_ensembles(plan, {name: result for name, result in found.items() if result is not None})


def ensembles(plan: Plan, out: Path) -> list[EnsembleTested]:
    """The results that count."""
    return [e.result for e in planned_ensembles(plan, out) if e.result is not None]


def nothing_to_do(plan: Plan, out: Path) -> bool:
    return plan.next is None and not unfinished(plan, out) and not ready_ensembles(plan, out)


def ready_ensembles(plan: Plan, out: Path) -> list[PlannedEnsemble]:
    """Those whose members are all trained and evaluated, and that are not."""
    waiting = {s.stage.name for s in unfinished(plan, out)}
    planned = planned_ensembles(plan, out)
    return [e for e in planned if e.state is EnsembleState.READY and not waiting & set(e.ensemble.members)]
