"""What `status` and `snapshots` look at: an output folder, its snapshots and their results. Changes nothing, takes no lock.

Which of two is newer, (attempt, serial) alone says: clocks of nodes differ, and a copy has other times.
"""

import json
import os
import shlex
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from stagerun import store
from stagerun.cli.options import output_folder
from stagerun.errors import PermissionDenied, ResumeRefused, StagerunError, StorageError, UsageError
from stagerun.events import EnsembleTested, StageFinished
from stagerun.lmdb_file import with_sets
from stagerun.plan import make_plan
from stagerun.recipe import Schedule
from stagerun.snapshots import Inventory, SnapshotRef
from stagerun.spec import load
from stagerun.spec.build import completed
from stagerun.spec.resolve import SCHEDULE_FILE
from stagerun.spec.stored import read_foreign
from stagerun.store.layout import MANIFEST, snapshots_folder
from stagerun.text import columns, count, size
from stagerun.train.progress import MOST_RECIPE, MOST_STATE, RECIPE, STATE, progress_of
from stagerun.train.results import figures_file, read_ensemble, read_result

LOG = "log.jsonl"
_FORBIDDEN = "no permission"
DISK = store.LocalDisk()


@dataclass(frozen=True, slots=True)
class Target:
    """An output folder, and the schedule it belongs to if that was named; `folder`: the schedule's, if --out was not given."""

    out: Path
    schedule: Schedule | None = None
    folder: Path | None = None


def find_target(folder: str, overrides: Sequence[str], out: str | None) -> Target:
    """DIR of a command: a schedule's folder, or an output folder. RecipeError, UsageError."""
    path = Path(folder)
    if not os.path.lexists(path):
        raise UsageError(
            f"{folder}: there is no such folder",
            "give a schedule's folder, or the output folder, which `run` makes when it starts",
        )
    if os.path.exists(path / SCHEDULE_FILE) or not os.path.isdir(path):
        schedule = with_sets(load(folder, overrides))
        return Target(output_folder(schedule.name, out), schedule, path if out is None else None)
    # `rehearse` leaves its figures in a folder in which nothing has been run.
    if not (os.path.isdir(path / "snapshots") or any(os.path.exists(p) for p in (path / LOG, figures_file(path)))):
        raise UsageError(
            f"{folder} is neither a schedule's folder ({SCHEDULE_FILE}) nor an output folder (snapshots, {LOG})",
            "give the folder that `stagerun run` was given, or the one that it writes to",
        )
    if out is not None or overrides:
        raise UsageError(
            f"{folder} is an output folder: --out and --set belong to a schedule's folder",
            "leave them out, or give the schedule's folder",
        )
    return Target(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A snapshot as `snapshots` shows it. `epoch` is that of the whole schedule along the path of ancestors.

    `state`: complete, damaged, unreadable (the disk fails at it), no permission, or set aside. `end` whether its stage ends with it; `started` the
    stages that started from it, `kept_for` those that the schedule lets start there, before the stage's end. `written`: seconds
    since the epoch, by the file system, for people. `pinned`: nothing deletes it.
    """

    name: str
    stage: str
    iter: int
    attempt: int
    state: str
    reason: str = ""
    epoch: float | None = None
    bytes: int | None = None
    written: float | None = None
    result: StageFinished | None = None
    end: bool = False
    started: tuple[str, ...] = ()
    kept_for: tuple[str, ...] = ()
    pinned: bool = False


def list_snapshots(out: Path, verify: bool = False, schedule: Schedule | None = None) -> list[Found]:
    """Every snapshot, in the order of stages, attempts and iterations. `verify` reads every byte of them. Without a schedule
    that of the newest one counts, and each is under the name that its stage was trained under.

    Errors as of `store.inventory`.
    """
    inventory = known = store.inventory(DISK, out, looking=True)
    if schedule is not None:
        inventory = make_plan(schedule, inventory).inventory
    found = [_complete(out, ref, inventory, verify) for ref in inventory.snapshots]
    found += [_damaged(out, name) for name in (*inventory.damaged, *known.forbidden)]
    found += _set_aside(out)
    # A run that goes on may have deleted some while they were looked at.
    found = [f for f in found if f.state == "complete" or os.path.exists(snapshots_folder(out) / f.name)]
    schedule = schedule or newest_recipe(out, inventory)
    stages = schedule.stages if schedule is not None else ()
    order = {stage.name: number for number, stage in enumerate(stages)}
    pins = store.pins(DISK, out)

    def place(stage: str) -> int:
        return order.get(stage, len(order))

    def kept_for(f: Found) -> tuple[str, ...]:
        return tuple(s.name for s in stages if (s.parent, s.parent_iter) == (f.stage, f.iter) and f.state == "complete")

    found = [
        replace(f, kept_for=kept_for(f), started=tuple(sorted(f.started, key=place)), pinned=f.name in pins)
        for f in found
    ]
    return sorted(found, key=lambda f: (place(f.stage), f.stage, f.attempt, f.iter))


def snapshots_text(out: Path, found: Sequence[Found]) -> str:
    """A table of `list_snapshots`, and how much it is in all."""
    if not found:
        return f"no snapshots in {out.absolute()}"
    rows = [
        {
            "snapshot": f.name,
            "iteration": str(f.iter),
            "epoch": "" if f.epoch is None else f"{f.epoch:.2f}",
            "size": "" if f.bytes is None else size(f.bytes),
            "written": "" if f.written is None else date(f.written),
            "top-1": percent(f.result.top1 if f.result else None),
            "EMA top-1": percent(f.result.ema_top1 if f.result else None),
            "state": f.state,
            "end of": f.stage if f.end else "",
            "started": ", ".join(f.started),
            "kept for": ", ".join(f.kept_for),
            "pinned": "pinned" if f.pinned else "",
        }
        for f in found
    ]
    optional = ("EMA top-1", "kept for", "pinned")
    titles = [title for title in rows[0] if title not in optional or any(row[title] for row in rows)]
    whole = [f for f in found if f.state == "complete"]
    lines = columns([titles, *([row[title] for title in titles] for row in rows)])
    lines.append(f"{count(len(whole), 'complete snapshot')}, {size(sum(f.bytes or 0 for f in whole))}")
    lines += [f"{f.state}: {f.name}: {f.reason}" for f in found if f.state in ("damaged", "unreadable", _FORBIDDEN)]
    return "\n".join(lines)


def snapshots_json(out: Path, found: Sequence[Found]) -> str:
    return json.dumps({"out": str(out), "snapshots": [asdict(f) for f in found]}, indent=1)


def refuse_damaged(out: Path, found: Sequence[Found]) -> None:
    """ResumeRefused if any of them is damaged; one that was set aside is out of the way already. StorageError if the disk fails,
    PermissionDenied."""
    if unreadable := [f for f in found if f.state == "unreadable"]:
        raise StorageError(
            f"{count(len(unreadable), 'snapshot')} can't be read",
            "they may be well: see that the disk is (dmesg), and look again",
        )
    if forbidden := [f for f in found if f.state == _FORBIDDEN]:
        raise PermissionDenied(
            f"{count(len(forbidden), 'snapshot')} may not be read", "ask the owner for read permission, and look again"
        )
    if damaged := [f for f in found if f.state == "damaged"]:
        names = " ".join(f"--drop {f.name}" for f in damaged) + " --force" * any(f.end or f.started for f in damaged)
        raise ResumeRefused(
            f"{count(len(damaged), 'snapshot')} damaged",
            f"`stagerun run` goes on from the one before, where it would start from it; of a finished stage it looks at none: `stagerun "
            f"snapshots {shlex.quote(str(out))} {names}` has it trained again",
        )


def date(seconds: float) -> str:
    """A time of this machine's clock, in its time zone."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.2f} %"


def stage_order(out: Path, inventory: Inventory) -> list[str]:
    """Names of the stages as the recipe in the newest snapshot has them; none if it can't be read."""
    recipe = newest_recipe(out, inventory)
    return [stage.name for stage in recipe.stages] if recipe is not None else []


def newest_recipe(out: Path, inventory: Inventory) -> Schedule | None:
    """The schedule that the newest snapshot was made from; None if it can't be read."""
    newest = newest_snapshot(out, inventory)
    if newest is None:
        return None
    try:
        return read_foreign(store.read_file(DISK, out, newest.name, RECIPE, MOST_RECIPE).decode())
    except (StagerunError, ValueError):
        return None


def newest_snapshot(out: Path, inventory: Inventory) -> SnapshotRef | None:
    """The one written last."""
    # In one process life what came of a snapshot is younger than it: that orders those of versions that did not count them.
    depth: dict[str, int] = {"": 0}
    for ref in sorted(inventory.snapshots, key=lambda ref: (ref.attempt, ref.serial)):
        depth[ref.id] = max(depth.get(ref.id, 0), depth.get(ref.parent, 0) + 1)
    return max(inventory.snapshots, key=lambda ref: (ref.attempt, ref.serial, depth[ref.id], ref.iter), default=None)


def written(out: Path, name: str) -> float | None:
    """When a snapshot was written, by the file system, for people. None if it is gone meanwhile."""
    try:
        return (snapshots_folder(out) / name / MANIFEST).stat().st_mtime
    except OSError:
        return None


def last_result(out: Path, refs: Sequence[SnapshotRef]) -> tuple[SnapshotRef, StageFinished] | None:
    """The newest of a stage's snapshots that was evaluated, and its result."""
    for ref in sorted(refs, key=lambda ref: (ref.attempt, ref.serial, ref.iter), reverse=True):
        if (result := read_result(out, ref)) is not None:
            return ref, result
    return None


def ensemble_on_disk(out: Path, name: str, inventory: Inventory) -> EnsembleTested | None:
    """What was evaluated under that name, if all that it was made from is there, and no member was trained to something else
    after it. What the schedule means now a plan knows (`results.planned_ensembles`)."""
    tested = read_ensemble(out, name)
    if tested is None:
        return None
    by_id = {ref.id: ref for ref in inventory.snapshots}
    members = [by_id.get(id) for id in tested.snapshots]
    whole = [member for member in members if member is not None]
    # An older version did not say when it was evaluated; no earlier than its members were trained.
    stated = (tested.attempt, tested.serial) if tested.attempt else (0, 0)
    evaluated = max([stated, *((ref.attempt, ref.serial) for ref in whole)])

    def replaced(member: SnapshotRef) -> bool:
        later = [ref for ref in inventory.of(member.stage) if (ref.attempt, ref.serial) > evaluated]
        return any(_definition(ref) != _definition(member) for ref in later)

    return None if len(whole) < len(members) or any(map(replaced, whole)) else tested


def _definition(ref: SnapshotRef) -> tuple[str, dict[str, str]]:
    """What is the same for all snapshots of a stage that was trained once, those of its pieces too."""
    return ref.parent, completed(ref.identity)


def _complete(out: Path, ref: SnapshotRef, inventory: Inventory, verify: bool) -> Found:
    epoch, state, reason = None, "complete", ""
    try:
        if verify:
            store.verify(DISK, out, ref.name)
        position = progress_of({STATE: store.read_file(DISK, out, ref.name, STATE, MOST_STATE)}).position
        epoch = position / ref.whole("data.train.images", 0)
    except (store.Damaged, PermissionDenied) as error:
        state, reason = _wrong(error)
    except (ValueError, KeyError, ZeroDivisionError, ResumeRefused):
        pass  # made by something else than `run`: its epoch is not known
    return Found(
        name=ref.name,
        stage=ref.stage,
        iter=ref.iter,
        attempt=ref.attempt,
        state=state,
        reason=reason,
        epoch=epoch,
        bytes=ref.bytes,
        written=written(out, ref.name),
        result=read_result(out, ref),
        end=ref.identity.get("solver.max_iter") == str(ref.iter),
        started=tuple(dict.fromkeys(other.stage for other in inventory.snapshots if other.parent == ref.id)),
    )


def _damaged(out: Path, name: str) -> Found:
    place = store.parse_name(name)
    assert place is not None  # an inventory has no other names
    state, reason = "unreadable", "it could not be read when it was looked at"
    try:
        store.read_file(DISK, out, name, STATE, MOST_STATE)
    except (store.Damaged, PermissionDenied) as error:
        state, reason = _wrong(error)
    return Found(name=name, **place._asdict(), state=state, reason=reason, written=written(out, name))


def _wrong(error: store.Damaged | PermissionDenied) -> tuple[str, str]:
    """State and reason."""
    if isinstance(error, PermissionDenied):
        return _FORBIDDEN, error.message
    return "unreadable" if error.disk_fails else "damaged", error.reason


def _set_aside(out: Path) -> list[Found]:
    return [
        Found(name=name, **place._asdict(), state="set aside", written=written(out, name))
        for name, place in store.aside(DISK, out).items()
    ]
