"""`stagerun status --snapshots`: the snapshots of an output folder and their results, and what --pin, --unpin and --drop do to them."""

import contextlib
import json
import os
import shlex
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from stagerun import store
from stagerun.base.errors import (
    PermissionDenied,
    ResumeRefused,
    StagerunError,
    StorageError,
    UsageError,
    listing,
    nearest,
)
from stagerun.base.events import StageFinished
from stagerun.base.recipe import Schedule, Stage
from stagerun.base.snapshots import Inventory, SnapshotRef
from stagerun.base.text import columns, count, percent, size
from stagerun.command.ending import show, tell
from stagerun.command.options import flag, option
from stagerun.plan import changed_fields, make_plan
from stagerun.store.layout import snapshots_folder
from stagerun.tools.status.look import elsewhere, written
from stagerun.tools.status.output import DISK, Target, newest_recipe
from stagerun.train.progress import MOST_STATE, STATE, progress_of
from stagerun.train.results import path_of, read_result

SNAPSHOTS = "Snapshots"
_FORBIDDEN = "no permission"


@dataclass(frozen=True, slots=True)
class Wishes:
    """Names of snapshots; of those to `drop` also of such that were set aside (.bad-NAME). `force`: drop also what is needed."""

    pin: tuple[str, ...] = option(
        "--pin NAME", "Nothing deletes this snapshot any more. Repeatable.", title=SNAPSHOTS, default=()
    )
    unpin: tuple[str, ...] = option("--unpin NAME", "Take the pin off. Repeatable.", title=SNAPSHOTS, default=())
    drop: tuple[str, ...] = option(
        "--drop NAME",
        "Delete this snapshot, or one that was set aside, and its result; not one that is pinned, or that training rests on. "
        "Repeatable.",
        title=SNAPSHOTS,
        default=(),
    )
    force: bool = flag("--force", "With --drop: also one that training rests on.", title=SNAPSHOTS)


def show_snapshots(target: Target, verify: bool, wishes: Wishes, as_json: bool) -> None:
    """Do what is wished, then list what is there. Errors as of `tend`, `list_snapshots` and `refuse_damaged`."""
    if wishes != Wishes():
        tell("\n".join(tend(target, wishes)))
    found = list_snapshots(target.out, verify, target.schedule)
    text = snapshots_json(target.out, found) if as_json else snapshots_text(target.out, found)
    show(text + (elsewhere(target) if not found and not as_json else ""))
    if verify:
        refuse_damaged(target.out, found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A snapshot as it is listed. `epoch` is that of the whole schedule along the path of ancestors.

    `state`: complete, damaged, unreadable (the disk fails at it), no permission, or set aside. `end` whether its stage ends with it;
    `started` the stages that started from it, `kept_for` those that the schedule lets start there, before the stage's end. `written`:
    seconds since the epoch, by the file system, for people. `pinned`: nothing deletes it.
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
    definitions = {stage.name: stage for stage in schedule.stages} if schedule is not None else {}
    found = [_complete(out, ref, inventory, verify, definitions.get(ref.stage)) for ref in inventory.snapshots]
    found += [_damaged(out, name) for name in (*inventory.damaged, *known.forbidden)]
    found += _set_aside(out)
    # A run that goes on may have deleted some while they were looked at.
    found = [f for f in found if f.state == "complete" or os.path.exists(snapshots_folder(out) / f.name)]
    schedule = schedule or newest_recipe(out, inventory)
    order = {stage.name: number for number, stage in enumerate(schedule.stages if schedule is not None else ())}
    pins = store.pins(DISK, out)

    def place(stage: str) -> int:
        return order.get(stage, len(order))

    found = [
        replace(
            f,
            kept_for=_users(schedule, f.stage, f.iter) if f.state == "complete" else (),
            started=tuple(sorted(f.started, key=place)),
            pinned=f.name in pins,
        )
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
    lines += [f"of another definition: {f.name}: {f.reason}" for f in whole if f.reason]
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
            f"`stagerun run` goes on from the one before; `stagerun status {shlex.quote(str(out))} {names}` removes "
            f"{'it' if len(damaged) == 1 else 'them'}",
        )


def date(seconds: float) -> str:
    """A time of this machine's clock, in its time zone."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _complete(out: Path, ref: SnapshotRef, inventory: Inventory, verify: bool, stage: Stage | None) -> Found:
    epoch, state, reason = None, "complete", ""
    if stage is not None and (changed := changed_fields(ref, stage)):
        reason = f"another {listing([name.removeprefix('solver.') for name in changed], 'and')} than the schedule's"
    try:
        if verify:
            store.verify(DISK, out, ref.name)
        position = progress_of(
            {STATE: store.read_file(DISK, snapshots_folder(out) / ref.name, STATE, MOST_STATE)[1]}
        ).position
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
        end=ref.ends_stage,
        started=tuple(dict.fromkeys(other.stage for other in inventory.snapshots if other.parent == ref.id)),
    )


def _damaged(out: Path, name: str) -> Found:
    place = store.parse_name(name)
    assert place is not None  # an inventory has no other names
    state, reason = "unreadable", "it could not be read when it was looked at"
    try:
        store.read_file(DISK, snapshots_folder(out) / name, STATE, MOST_STATE)[1]
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


# -- --pin, --unpin and --drop


def tend(target: Target, wishes: Wishes) -> list[str]:
    """Does it all, or nothing where any of it is wrong. Returns what was done, a line each. If the disk fails halfway, or a pin comes
    in between, what was done until then is printed before the error.

    UsageError for an unknown name, ResumeRefused for what is pinned or needed, FolderInUseError to drop beside a run;
    StorageError, PermissionDenied.
    """
    out = target.out
    inventory = store.inventory(DISK, out)
    if wishes.force and not wishes.drop:
        raise UsageError("--force without --drop", "name a snapshot to delete, or leave --force out")
    if both := set(wishes.pin) & {*wishes.unpin, *wishes.drop}:
        raise UsageError(f"{min(both)} is to be pinned, and something else besides", "say one of these")
    here = [*(ref.name for ref in inventory.snapshots), *inventory.damaged]
    pinned, aside = store.pins(DISK, out), list(store.aside(DISK, out))
    _require_known(out, wishes.pin, here)
    _require_known(out, wishes.unpin, [*here, *pinned])
    _require_known(out, wishes.drop, [*here, *aside])
    if not wishes.drop:
        return _do(out, wishes)
    with store.Lock(out) as lock:
        store.require_free(DISK, out, lock.held)
        # No run holds the folder, so no snapshot appears or goes between the look and the deed.
        inventory = store.inventory(DISK, out)
        pinned = store.pins(DISK, out)
        for name in wishes.drop:
            if name in pinned and name not in wishes.unpin:
                hint = f"`--unpin {name}` beside the --drop takes the pin off first"
                raise ResumeRefused(f"snapshot {name} is pinned", hint)
        lost = _needed(target.schedule, inventory, wishes.drop)
        if lost and not wishes.force:
            raise ResumeRefused("\n".join(lost), "nothing was deleted; --force deletes all the same")
        tell("\n".join(lost))
        return _do(out, wishes)


def _do(out: Path, wishes: Wishes) -> list[str]:
    done: list[str] = []
    try:
        for step in (_unpin(out, wishes.unpin), _pin(out, wishes.pin), _drop(out, dict.fromkeys(wishes.drop))):
            done.extend(step)
    except StagerunError:
        tell("\n".join(done))
        raise
    return done


def _require_known(out: Path, names: Collection[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            hint = nearest(name, known) or f"`stagerun status {out} --snapshots` lists them"
            raise UsageError(f"there is no snapshot {name} in {out}", hint)


def _pin(out: Path, names: Sequence[str]) -> Iterator[str]:
    for name in names:
        if not store.pin(DISK, out, name):
            raise UsageError(f"snapshot {name} was deleted just now by the run, and is not pinned", "pin a newer one")
        yield f"{name} is pinned"


def _unpin(out: Path, names: Sequence[str]) -> Iterator[str]:
    for name in names:
        yield f"{name} is {'no longer' if store.unpin(DISK, out, name) else 'not'} pinned"


def _drop(out: Path, names: Collection[str]) -> Iterator[str]:
    aside = store.aside(DISK, out)
    for name in names:
        if not store.discard(DISK, out, name):  # someone pinned it while this command was looking
            raise ResumeRefused(f"snapshot {name} is pinned", f"--unpin {name} takes the pin off")
        yield f"{name} is deleted"
        _drop_result(out, store.parse_name(name) or aside[name])


def _drop_result(out: Path, place: store.Place) -> None:
    """Deletes the result of a snapshot that is gone. Else a later process life with the same attempt numbers would find it and
    take it for its own."""
    name = store.snapshot_name(*place)
    if os.path.exists(snapshots_folder(out) / name):
        return
    with store.reporting("delete the result", path_of(out, name).parent), contextlib.suppress(FileNotFoundError):
        path_of(out, name).unlink()


# -- what is lost


def _needed(schedule: Schedule | None, inventory: Inventory, drop: Collection[str]) -> list[str]:
    """Why some are needed: the only snapshot of a stage's end, of a place where others start, and the newest of a stage without an end.
    Whatever the schedule counts now: an edit may be taken back."""
    left = {(ref.stage, ref.iter, ref.id) for ref in inventory.snapshots if ref.name not in drop}
    reasons = []
    for ref in inventory.snapshots:
        if ref.name not in drop or (ref.stage, ref.iter, ref.id) in left:
            continue
        of_stage = inventory.of(ref.stage)
        if ref.ends_stage:
            reasons.append(f"{ref.name} is the end of stage `{ref.stage}`")
        elif ref == of_stage[-1] and not any(other.ends_stage for other in of_stage):
            reasons.append(f"{ref.name} is what stage `{ref.stage}` goes on from")
        started = [other.stage for other in inventory.snapshots if other.parent == ref.id]
        if users := dict.fromkeys((*started, *_users(schedule, ref.stage, ref.iter))):
            reasons.append(f"{ref.name} is what {', '.join(f'`{name}`' for name in users)} started from, or will")
    return reasons


def _users(schedule: Schedule | None, stage: str, iter: int) -> tuple[str, ...]:
    """The stages that start at that iteration, before the stage's end, and the ensembles that have it as a member."""
    if schedule is None:
        return ()
    starts = [s.name for s in schedule.stages if (s.parent, s.parent_iter) == (stage, iter)]
    return (*starts, *(e.name for e in schedule.ensembles if (stage, iter) in e.points))
