"""`stagerun snapshots`: the snapshots of an output folder and their results. Without --pin, --unpin and --drop it changes nothing."""

import json
import os
import shlex
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from stagerun import store
from stagerun.base.errors import PermissionDenied, ResumeRefused, StorageError
from stagerun.base.events import StageFinished
from stagerun.base.recipe import Schedule
from stagerun.base.snapshots import Inventory, SnapshotRef
from stagerun.base.text import columns, count, percent, size
from stagerun.command.ending import show, tell
from stagerun.command.options import command, flag
from stagerun.command.shared import Folder, Json, Out, Overrides
from stagerun.plan import make_plan
from stagerun.store.layout import snapshots_folder
from stagerun.tools.status.snapshot_changes import Wishes, tend
from stagerun.train.output import DISK, elsewhere, find_target, newest_recipe, written
from stagerun.train.progress import MOST_STATE, STATE, progress_of
from stagerun.train.results import read_result

_FORBIDDEN = "no permission"


@command()
def snapshots(
    folder: Folder,
    overrides: Overrides = (),
    out: Out = None,
    verify: bool = flag("--verify", "Read every byte and compare it with its digest; exit code 78 if one differs."),
    *,
    wishes: Wishes,
    as_json: Json = False,
) -> None:
    """Lists the snapshots of an output folder: complete, damaged and set aside, and what started from them.

    DIR is the schedule's folder, or the output folder itself. A snapshot counts as complete when its manifest is as it was
    written and its files have the right sizes; --verify reads the files too. --pin and --unpin work beside a run, --drop does not.
    """
    target = find_target(folder, overrides, out)
    if wishes != Wishes():
        tell("\n".join(tend(target, wishes)))
    found = list_snapshots(target.out, verify, target.schedule)
    text = snapshots_json(target.out, found) if as_json else snapshots_text(target.out, found)
    show(text + (elsewhere(target) if not found and not as_json else ""))
    if verify:
        refuse_damaged(target.out, found)


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
