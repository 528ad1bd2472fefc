"""What a run leaves beside its snapshots: results of stages and ensembles, a rehearsal's figures, how lives ended. No torch."""

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from stagerun import store
from stagerun.base.errors import WORTH_ANOTHER_START, ExitCode, ResumeRefused, StorageError
from stagerun.base.events import EnsembleTested, StageFinished
from stagerun.base.recipe import Schedule
from stagerun.base.snapshots import Inventory, SnapshotRef, same_set
from stagerun.language import canonical
from stagerun.logs.lines import Before
from stagerun.logs.log_file import LOG
from stagerun.plan import Plan, PlannedStage, State
from stagerun.plan.ensembles import EnsembleState, PlannedEnsemble, plan_ensembles, tested_alike, tested_set
from stagerun.plan.rehearsal import Figures
from stagerun.store.layout import results_folder
from stagerun.system.typed import json_object, read_as

_MOST = 1 << 20  # bytes of a result; a run writes one thousand
_MOST_FIGURES = 1 << 24  # bytes of what a rehearsal measured


def path_of(out: Path, snapshot: str) -> Path:
    return results_folder(out) / f"{snapshot}.json"


def _read(path: Path) -> bytes:
    # The folder may be a link, which someone made on purpose; the file may not.
    return store.LocalDisk().read(Path(os.path.realpath(path.parent)) / path.name, _MOST)


def read_result(out: Path, ref: SnapshotRef) -> StageFinished | None:
    """The result of a snapshot, under its stage's present name; None if there is none, or it can't be read or is not a result (then it
    is made again)."""
    try:
        found = read_as(StageFinished, json_object(_read(path_of(out, ref.name))))
    except (OSError, ValueError):
        return None
    return replace(found, stage=ref.stage) if ref.trained_as else found


def write_result(disk: store.Disk, out: Path, result: StageFinished | EnsembleTested) -> None:
    """Rank 0 only. StorageError or PermissionDenied if it can't be written; StorageError, too, if it can't be read back: what has no result
    is evaluated, and so would be again and again."""
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
    """Those of the finished stages, in running order."""
    return [r for s in plan.stages if s.end is not None and (r := read_result(out, s.end)) is not None]


def unfinished(plan: Plan, out: Path, evaluated: set[str] | None = None) -> list[PlannedStage]:
    """Stages that are trained, but whose evaluation is missing, or was made with other images or another transform. `evaluated`: names of
    snapshots whose evaluation is known to count, which is brought up to date."""
    known, found = evaluated if evaluated is not None else set(), []
    for planned in plan.stages:
        if planned.state is State.DONE and (end := planned.end) is not None and end.name not in known:
            result = read_result(out, end)
            if result and tested_alike(plan.schedule, planned.stage, result.tested_on, result.tested_set):
                known.add(end.name)
            else:
                found.append(planned)
    return found


def parents(plan: Plan, out: Path) -> dict[str, Before]:
    """What each stage's gain is against: the stage at whose end it starts, or the average; for one that starts inside another stage,
    the top-1 there. None if unknown."""
    found: dict[str, Before] = {}
    for planned in plan.stages:
        stage, own = planned.stage, planned.end or planned.start
        if stage.average or stage.parent_iter is None:
            found[stage.name] = stage.average or stage.parent
        elif own is None:
            found[stage.name] = None
        else:
            start = own.parent if own.stage == stage.name else own.id
            found[stage.name] = top1_of(out, start, plan.inventory, tested_set(plan.schedule, stage))
    return found


def top1_of(out: Path, id: str, inventory: Inventory, images: str) -> float | None:
    """The top-1 of a snapshot; None if it was not evaluated, or on other images."""
    ref = next((ref for ref in inventory.snapshots if ref.id == id), None)
    result = read_result(out, ref) if ref is not None else None
    return None if result is None or same_set(result.tested_set, images) is False else result.top1


def ensemble_path(out: Path, name: str) -> Path:
    return results_folder(out) / "ensembles" / f"{name}.json"


def read_ensemble(out: Path, name: str) -> EnsembleTested | None:
    """What was evaluated under that name, whatever it was made from; None as of `read_result`."""
    try:
        found = read_as(EnsembleTested, json_object(_read(ensemble_path(out, name))))
    except (OSError, ValueError):
        return None
    return found if found.name == name else None


def planned_ensembles(plan: Plan, out: Path) -> tuple[PlannedEnsemble, ...]:
    """Each ensemble of the schedule, and what is on disk of it."""
    found = [read_ensemble(out, ensemble.name) for ensemble in plan.schedule.ensembles]
    return plan_ensembles(plan, {tested.name: tested for tested in found if tested is not None})


def ensembles(plan: Plan, out: Path) -> list[EnsembleTested]:
    """The results that count."""
    return [e.result for e in planned_ensembles(plan, out) if e.result is not None]


def nothing_to_do(plan: Plan, out: Path) -> bool:
    return plan.next is None and not unfinished(plan, out) and not ready_ensembles(plan, out)


def relied_on(plan: Plan) -> list[SnapshotRef]:
    """Return what a run goes on from: the snapshot that the next stretch starts with or, where nothing is left, the ends of all stages."""
    if plan.next is not None:
        return [plan.next.start] if plan.next.start is not None else []
    return [s.end for s in plan.stages if s.state is State.DONE and s.end is not None]


def ready_ensembles(plan: Plan, out: Path) -> list[PlannedEnsemble]:
    """Those whose members are all there, and that are not evaluated. To be asked when no stage is `unfinished`."""
    return [e for e in planned_ensembles(plan, out) if e.state is EnsembleState.READY]


# -- what a rehearsal measured


def figures_file(out: Path) -> Path:
    return out / "rehearsal.json"


def read_figures(out: Path) -> Figures | None:
    """What the last rehearsal left; None if there was none, or another version's."""
    try:
        return read_as(Figures, json_object(store.LocalDisk().read(figures_file(out), _MOST_FIGURES)))
    except (OSError, ValueError):
        return None


# -- a restart loop that gets nowhere

# Lives without progress after which another one has no point; a fault that comes and goes seldom comes three times in a row.
LIMIT = 3

# Ends that a launcher, a scheduler or a batch script answers with another start. Those with another code have said what a person must do.
_BAD = {None, ExitCode.BUG, *WORTH_ANOTHER_START} - {ExitCode.SAVED}


def standing(disk: store.Disk, out: Path, schedule: Schedule, found: store.Inventory) -> str:
    """A digest of what there is to go on from: the schedule, the complete snapshots by their names, the results. Any progress changes
    it, and so does an edit of the solver files, which is as good a reason to try again. StorageError, PermissionDenied."""
    digest = hashlib.sha256(canonical(schedule).encode())
    for ref in found.snapshots:
        digest.update(f"\n{ref.name}".encode())
    for place in (results_folder(out), results_folder(out) / "ensembles"):
        folder = Path(os.path.realpath(place))  # it may be a link, as in `_read`
        with store.reporting("list the results", folder), suppress(FileNotFoundError):
            for name in sorted(disk.names(folder)):
                if name.endswith(".json") and not name.startswith("."):
                    content = b""  # of one that can't be read: it is made again
                    with suppress(OSError):
                        content = disk.read(folder / name, _MOST)
                    line = f"\n{name} {hashlib.sha256(content).hexdigest()}"
                    digest.update(line.encode(errors="surrogateescape"))
    return digest.hexdigest()


def require_progress(disk: store.Disk, out: Path, newest: str) -> None:
    """ResumeRefused if the last LIMIT lives were cut off or failed, and all began from `newest`, the `standing` now. StorageError,
    PermissionDenied."""
    if not (lives := fruitless(disk, out, newest)):
        return
    ends = []
    for life in lives:
        end = "was killed, or crashed" if life.code is None else f"ended with exit code {life.code}"
        ends.append(f"life {life.attempt} ({life}) {end}")
    more = f"{out / LOG} may say more; " if (out / LOG).exists() else ""
    raise ResumeRefused(
        f"the last {LIMIT} runs in {out} came to no snapshot and no result, and the next would start where they did: "
        + "; ".join(ends),
        f"{more}`stagerun run --retry` goes on all the same",
    )


def fruitless(disk: store.Disk, out: Path, newest: str) -> list[store.Life]:
    """The last LIMIT lives, where they were cut off or failed and all began from `newest`; else none. StorageError,
    PermissionDenied."""
    lives = store.last_lives(disk, out, LIMIT)
    bad = [life for life in lives if life.readable and life.code in _BAD and life.newest == newest]
    return bad if len(bad) == LIMIT else []
