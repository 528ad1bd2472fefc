"""The results of a run: files of stages and ensembles, figures of a rehearsal, and how earlier lives of the run ended. No torch."""

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeVar

from stagerun import store
from stagerun.base.errors import WORTH_ANOTHER_START, ExitCode, ResumeRefused, StorageError
from stagerun.base.events import EnsembleTested, StageFinished
from stagerun.base.recipe import BEST, Schedule
from stagerun.base.snapshots import Inventory, SnapshotRef, same_set
from stagerun.language import canonical
from stagerun.language.build import completed
from stagerun.logs.lines import Before
from stagerun.logs.log_file import LOG
from stagerun.plan import Plan, PlannedStage, State
from stagerun.plan.ensembles import EnsembleState, PlannedEnsemble, plan_ensembles, tested_alike, tested_set
from stagerun.plan.rehearsal import Figures
from stagerun.store.layout import results_folder
from stagerun.system.typed import json_object, read_as

_MOST = 1 << 20  # bytes of a result; a run writes one thousand
_MOST_FIGURES = 1 << 24  # bytes of what a rehearsal measured
_T = TypeVar("_T")


def path_of(out: Path, snapshot: str) -> Path:
    return results_folder(out) / f"{snapshot}.json"


def _read(path: Path, most: int = _MOST) -> bytes:
    # The folder may be a link, which someone made on purpose; the file may not.
    return store.LocalDisk().read(Path(os.path.realpath(path.parent)) / path.name, most)


def _stored(kind: type[_T], path: Path, most: int = _MOST) -> _T | None:
    """Return the value in a file; None if it is missing or can't be read, or another version wrote it."""
    try:
        return read_as(kind, json_object(_read(path, most)))
    except (OSError, ValueError):
        return None


def read_result(out: Path, ref: SnapshotRef) -> StageFinished | None:
    """Return the result of a snapshot, under its stage's present name; None if it is missing or unreadable (the stage is then evaluated
    again)."""
    result = _stored(StageFinished, path_of(out, ref.name))
    return replace(result, stage=ref.stage) if result is not None and ref.trained_as else result


def write_result(disk: store.Disk, out: Path, result: StageFinished | EnsembleTested) -> None:
    """Write a result, on rank 0. StorageError or PermissionDenied; StorageError also if it can't be read back: without a result the stage
    would be evaluated again and again."""
    path = path_of(out, result.snapshot) if isinstance(result, StageFinished) else ensemble_path(out, result.name)
    store.write_atomic(disk, path, json.dumps(asdict(result)).encode())
    try:
        read_as(type(result), json_object(_read(path)))
    except (OSError, ValueError) as error:
        raise StorageError(
            f"{path} was written without an error, but can't be read back: {error}",
            "see the system's log (dmesg), or choose another folder with --out",
        ) from error


def results(plan: Plan, out: Path) -> list[StageFinished]:
    """Return the results of the finished stages, in running order."""
    return [r for s in plan.stages if s.end is not None and (r := read_result(out, s.end)) is not None]


def unfinished(plan: Plan, out: Path, evaluated: set[str] | None = None) -> list[PlannedStage]:
    """Return stages that are trained, but whose evaluation is missing, or was made with other images or another transform. `evaluated`:
    names of snapshots whose evaluation counts; it is brought up to date."""
    counted, missing = evaluated if evaluated is not None else set(), []
    for planned in plan.stages:
        if planned.state is State.DONE and (end := planned.end) is not None and end.name not in counted:
            result = read_result(out, end)
            if result and tested_alike(plan.schedule, planned.stage, result.tested_on, result.tested_set):
                counted.add(end.name)
            else:
                missing.append(planned)
    return missing


def parents(plan: Plan, out: Path) -> dict[str, Before]:
    """Return by stage the value that its gain is measured against: the name of its parent or average; the top-1 of the snapshot for a
    stage that starts inside another; None if unknown."""
    before: dict[str, Before] = {}
    for planned in plan.stages:
        stage, ref = planned.stage, planned.end or planned.start
        if stage.average or (stage.parent_iter is None and stage.parent_at != BEST):
            before[stage.name] = stage.average or stage.parent
        elif ref is None:
            before[stage.name] = None
        else:
            start = ref.parent if ref.stage == stage.name else ref.id
            before[stage.name] = top1_of(out, start, plan.inventory, tested_set(plan.schedule, stage))
    return before


def top1_of(out: Path, id: str, inventory: Inventory, images: str) -> float | None:
    """Return the top-1 of a snapshot; None if it was not evaluated, or on other images."""
    ref = next((ref for ref in inventory.snapshots if ref.id == id), None)
    result = read_result(out, ref) if ref is not None else None
    return None if result is None or same_set(result.tested_set, images) is False else result.top1


def ensemble_path(out: Path, name: str) -> Path:
    return results_folder(out) / "ensembles" / f"{name}.json"


def read_ensemble(out: Path, name: str) -> EnsembleTested | None:
    """Return the result stored under that name, from whatever members; None as in `read_result`."""
    result = _stored(EnsembleTested, ensemble_path(out, name))
    return result if result is not None and result.name == name else None


def ensemble_on_disk(out: Path, name: str, inventory: Inventory) -> EnsembleTested | None:
    """Return the last evaluation of an ensemble, if all its members exist and none was retrained since. With a schedule, call
    `planned_ensembles`."""
    tested = read_ensemble(out, name)
    if tested is None:
        return None
    members = [ref for ref in inventory.snapshots if ref.id in tested.snapshots]
    # An older version didn't write the time: no earlier than its members were trained.
    evaluated = max([(tested.attempt, tested.serial), *((ref.attempt, ref.serial) for ref in members)])

    def replaced(member: SnapshotRef) -> bool:
        later = [ref for ref in inventory.of(member.stage) if (ref.attempt, ref.serial) > evaluated]
        return any(_definition(ref) != _definition(member) for ref in later)

    whole = {ref.id for ref in members} >= set(tested.snapshots)
    return tested if whole and not any(map(replaced, members)) else None


def _definition(ref: SnapshotRef) -> tuple[str, dict[str, str]]:
    return ref.parent, completed(ref.identity)


def planned_ensembles(plan: Plan, out: Path) -> tuple[PlannedEnsemble, ...]:
    """Return each ensemble of the schedule, with its state on disk."""
    results = [read_ensemble(out, ensemble.name) for ensemble in plan.schedule.ensembles]
    return plan_ensembles(plan, {result.name: result for result in results if result is not None})


def ensembles(plan: Plan, out: Path) -> list[EnsembleTested]:
    """Return the results of ensembles that count."""
    return [e.result for e in planned_ensembles(plan, out) if e.result is not None]


def nothing_to_do(plan: Plan, out: Path) -> bool:
    return plan.next is None and not unfinished(plan, out) and not ready_ensembles(plan, out)


def relied_on(plan: Plan) -> list[SnapshotRef]:
    """Return the snapshots that a run relies on: the start of the next stretch or, if nothing is left, the ends of all stages."""
    if plan.next is not None:
        return [plan.next.start] if plan.next.start is not None else []
    return [s.end for s in plan.stages if s.state is State.DONE and s.end is not None]


def ready_ensembles(plan: Plan, out: Path) -> list[PlannedEnsemble]:
    """Return ensembles that can be evaluated now. Call it when no stage is `unfinished`."""
    return [e for e in planned_ensembles(plan, out) if e.state is EnsembleState.READY]


# -- what a rehearsal measured


def figures_file(out: Path) -> Path:
    return out / "rehearsal.json"


def read_figures(out: Path) -> Figures | None:
    """Return the figures of the last rehearsal, or None."""
    return _stored(Figures, figures_file(out), _MOST_FIGURES)


# -- a restart loop that gets nowhere

# Lives without progress after which another one has no point; a passing fault seldom comes three times in a row.
LIMIT = 3

# Ends that a launcher, a scheduler or a batch script answers with another start. Any other code asks a person to do something.
_BAD = {None, ExitCode.BUG, *WORTH_ANOTHER_START} - {ExitCode.SAVED}


def standing(disk: store.Disk, out: Path, schedule: Schedule, inventory: store.Inventory) -> str:
    """Return a digest of the state to resume from: the schedule, the names of complete snapshots, the results. Any progress changes it,
    and so does an edit of the schedule, a good reason to try again. StorageError, PermissionDenied."""
    digest = hashlib.sha256(canonical(schedule).encode())
    for ref in inventory.snapshots:
        digest.update(f"\n{ref.name}".encode())
    for path in (results_folder(out), results_folder(out) / "ensembles"):
        folder = Path(os.path.realpath(path))  # it may be a link, as in `_read`
        with store.reporting("list the results", folder), suppress(FileNotFoundError):
            for name in sorted(disk.names(folder)):
                if name.endswith(".json") and not name.startswith("."):
                    content = b""  # unreadable: it is made again
                    with suppress(OSError):
                        content = disk.read(folder / name, _MOST)
                    line = f"\n{name} {hashlib.sha256(content).hexdigest()}"
                    digest.update(line.encode(errors="surrogateescape"))
    return digest.hexdigest()


def require_progress(disk: store.Disk, out: Path, newest: str) -> None:
    """Raise ResumeRefused if the last LIMIT lives were cut off or failed, and all began from `newest`, the `standing` now. StorageError,
    PermissionDenied."""
    if not (lives := fruitless(disk, out, newest)):
        return
    ends = [
        f"life {life.attempt} ({life}) "
        + ("was killed, or crashed" if life.code is None else f"ended with exit code {life.code}")
        for life in lives
    ]
    raise ResumeRefused(
        f"the last {LIMIT} runs in {out} wrote no snapshot and no result, and the next would start where they did: "
        + "; ".join(ends),
        (f"see {out / LOG}; " if (out / LOG).exists() else "") + "`stagerun run --retry` resumes all the same",
    )


def fruitless(disk: store.Disk, out: Path, newest: str) -> list[store.Life]:
    """Return the last LIMIT lives if they were cut off or failed, and all began from `newest`; else an empty list. StorageError,
    PermissionDenied."""
    lives = store.last_lives(disk, out, LIMIT)
    bad = [life for life in lives if life.readable and life.code in _BAD and life.newest == newest]
    return bad if len(bad) == LIMIT else []
