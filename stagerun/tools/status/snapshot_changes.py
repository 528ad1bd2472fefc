"""`stagerun snapshots --pin, --unpin, --drop`: what a person does to the snapshots of an output folder."""

import contextlib
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from stagerun import store
from stagerun.base.errors import ResumeRefused, StagerunError, UsageError, nearest
from stagerun.base.recipe import Schedule
from stagerun.base.snapshots import Inventory, SnapshotRef
from stagerun.base.text import count
from stagerun.command.ending import tell
from stagerun.command.options import flag, option
from stagerun.plan import Plan, State, changed_fields, make_plan
from stagerun.store.layout import snapshots_folder
from stagerun.train.output import DISK, Target
from stagerun.train.results import path_of


@dataclass(frozen=True, slots=True)
class Wishes:
    """Names of snapshots; of those to `drop` also of such that were set aside (.bad-NAME). `force`: drop also what is needed."""

    pin: tuple[str, ...] = option("--pin NAME", "Nothing deletes this snapshot any more. Repeatable.", default=())
    unpin: tuple[str, ...] = option("--unpin NAME", "Take the pin off. Repeatable.", default=())
    drop: tuple[str, ...] = option(
        "--drop NAME",
        "Delete this snapshot, or one that was set aside, and its result; not one that is pinned, or that training rests on. "
        "Repeatable.",
        default=(),
    )
    force: bool = flag("--force", "With --drop: also one that training rests on.")


def tend(target: Target, wishes: Wishes) -> list[str]:
    """Does it all, or, where something is wrong with any of it, nothing; what was done, a line each. Should the disk fail amid it,
    or a pin come in between, what was done until then is printed before the error.

    UsageError for a name that is none, ResumeRefused for what is pinned or needed, FolderInUseError to drop beside a run;
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
    with store.Lock(out, optional=True) as lock:
        store.require_free(DISK, out, lock.held)
        # No run has it, so no one adds or deletes one between the look and the deed.
        inventory = store.inventory(DISK, out)
        _refuse_pinned(wishes, store.pins(DISK, out))
        lost = _lost(target.schedule, inventory, wishes.drop)
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
            hint = nearest(name, known) or f"`stagerun snapshots {out}` lists them"
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
    """That of a snapshot which is gone: a later process life that came to number its attempts alike would find a result that is
    none of its own."""
    name = store.snapshot_name(*place)
    if os.path.exists(snapshots_folder(out) / name):
        return
    with store.reporting("delete the result", path_of(out, name).parent), contextlib.suppress(FileNotFoundError):
        path_of(out, name).unlink()


# -- what is lost


def _refuse_pinned(wishes: Wishes, pinned: Collection[str]) -> None:
    for name in wishes.drop:
        if name in pinned and name not in wishes.unpin:
            raise ResumeRefused(
                f"snapshot {name} is pinned", f"`--unpin {name}` beside the --drop takes the pin off first"
            )


def _lost(schedule: Schedule | None, inventory: Inventory, drop: Collection[str]) -> list[str]:
    return lost_in(schedule, inventory, drop) if schedule is not None else needed(inventory, drop)


def _without(inventory: Inventory, drop: Collection[str]) -> Inventory:
    return replace(inventory, snapshots=tuple(ref for ref in inventory.snapshots if ref.name not in drop))


def needed(inventory: Inventory, drop: Collection[str]) -> list[str]:
    """Why some are needed, where no schedule says what counts: the only snapshot of a stage's end, of a place that others
    started from, and the newest of a stage without an end. Pure."""
    left = _without(inventory, drop)
    reasons = []
    for ref in inventory.snapshots:
        if ref.name not in drop or any(
            (r.stage, r.iter, r.id) == (ref.stage, ref.iter, ref.id) for r in left.snapshots
        ):
            continue
        children = dict.fromkeys(r.stage for r in inventory.snapshots if r.parent == ref.id)
        ends = [r for r in inventory.of(ref.stage) if r.identity.get("solver.max_iter") == str(r.iter)]
        if ref in ends:
            reasons.append(f"{ref.name} is the end of stage `{ref.stage}`")
        elif not ends and ref == inventory.of(ref.stage)[-1]:
            reasons.append(f"{ref.name} is what stage `{ref.stage}` goes on from")
        if children:
            reasons.append(f"{ref.name} is what {_stages(children)} started from")
    return reasons


def lost_in(schedule: Schedule, inventory: Inventory, drop: Collection[str]) -> list[str]:
    """What the schedule would lose: iterations to be trained again, and places that its stages start from. Of a stage that is
    disabled, or was edited since, what `needed` names: the plan counts none of it now, and will once that is taken back. Pure."""
    before, after = make_plan(schedule, inventory), make_plan(schedule, _without(inventory, drop))
    reasons = []
    for was, now in zip(before.stages, after.stages, strict=True):
        rests_on = was.end or was.start
        if (
            rests_on is None
            or was.state not in (State.DONE, State.RESUME)
            or (now.state, now.iter) == (was.state, was.iter)
        ):
            continue
        again = now.iterations_left - was.iterations_left
        what = f"{count(again, 'iteration')} again" if again > 0 else "again"
        reasons.append(f"{rests_on.name} is what stage `{was.stage.name}` rests on: it would be trained {what}")
    uncounted = [s.stage.name for s in before.stages if s.state in (State.STALE, State.DISABLED)]
    there = [ref.name for ref in before.inventory.snapshots if ref.name in drop and ref.stage in uncounted]
    return reasons + _branches_lost(before, after, drop) + needed(before.inventory, there)


def _branches_lost(before: Plan, after: Plan, drop: Collection[str]) -> list[str]:
    """Places inside a stage, not its end, that others start from, and that are gone with the last snapshot there."""
    reasons = []
    for planned in before.stages:
        stage = planned.stage
        for iter in sorted(before.schedule.branch_points(stage.name)):
            there = [ref for ref in _counting(before, stage.name, iter) if ref.name in drop]
            if there and not _counting(after, stage.name, iter):
                children = [s.name for s in before.schedule.stages if (s.parent, s.parent_iter) == (stage.name, iter)]
                reasons.append(f"{there[0].name} is what {_stages(children)} {_starts(children)} from")
    return reasons


def _counting(plan: Plan, stage: str, iter: int) -> list[SnapshotRef]:
    of = plan.schedule.stage(stage)
    return [ref for ref in plan.inventory.of(stage) if ref.iter == iter and not changed_fields(ref, of)]


def _stages(names: Collection[str]) -> str:
    return f"stage{'s' * (len(names) > 1)} {', '.join(f'`{name}`' for name in names)}"


def _starts(names: Collection[str]) -> str:
    return "start" if len(names) > 1 else "starts"
