"""`stagerun status --snapshots`: what is on disk, its sizes, and which of it can go; --pin and --unpin."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from stagerun import store
from stagerun.base.errors import PermissionDenied, ResumeRefused, StorageError, UsageError, listing, nearest
from stagerun.base.recipe import Schedule
from stagerun.base.text import columns, count, percent, size
from stagerun.command.ending import show, tell
from stagerun.command.options import flag, option
from stagerun.command.shared import Folder, Json, Out, Overrides
from stagerun.plan import changed_fields, make_plan
from stagerun.store.layout import snapshots_folder
from stagerun.tools.output import DISK, Target, newest_recipe, written
from stagerun.train.progress import MOST_STATE, STATE
from stagerun.train.results import read_result

SNAPSHOTS = "Snapshots"


@dataclass(frozen=True, slots=True)
class StatusOptions:
    folder: Folder
    overrides: Overrides = ()
    out: Out = None
    as_json: Json = False
    snapshots: bool = flag(
        "--snapshots", "List the snapshots instead: sizes, damage, what needs them.", title=SNAPSHOTS
    )
    verify: bool = flag(
        "--verify", "Also read every byte of them; exit code 78 if one differs from its digest.", title=SNAPSHOTS
    )
    pin: tuple[str, ...] = option(
        "--pin NAME", "Protect this snapshot from deletion by a run. Repeatable.", title=SNAPSHOTS, default=()
    )
    unpin: tuple[str, ...] = option("--unpin NAME", "Take the pin off. Repeatable.", title=SNAPSHOTS, default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A snapshot in the list. `state`: complete, outdated (the schedule was edited), damaged, unreadable, or set aside. `needed`: what keeps
    it; without that it can go."""

    name: str
    stage: str
    iter: int
    attempt: int
    state: str
    reason: str = ""
    bytes: int | None = None
    written: float | None = None
    top1: float | None = None
    needed: tuple[str, ...] = ()


def show_snapshots(target: Target, options: StatusOptions) -> None:
    """Pin and unpin, then list. ResumeRefused or StorageError if --verify finds a snapshot that can't be used."""
    _pin(target, options)
    rows = list_snapshots(target, options.verify)
    if options.as_json:
        show(json.dumps({"out": str(target.out), "snapshots": [asdict(row) for row in rows]}, indent=1))
    else:
        show(_text(rows) if rows else f"no snapshots in {target.out.absolute()}{target.hint}")
    states = [row.state for row in rows if options.verify]
    if number := states.count("unreadable"):
        hint = "they may be intact: see the reasons, and the system's log (dmesg)"
        raise StorageError(f"{count(number, 'snapshot')} unreadable", hint)
    if number := states.count("damaged"):
        hint = "`stagerun run` resumes from the previous one; damaged ones may be deleted while no run is alive"
        raise ResumeRefused(f"{count(number, 'snapshot')} damaged", hint)


def list_snapshots(target: Target, verify: bool = False) -> list[Row]:
    """Return every snapshot, in the order of stages, attempts and iterations. `verify`: read every byte of them."""
    out, inventory = target.out, store.inventory(DISK, target.out, looking=True)
    aside, pins = store.aside(DISK, out), store.pins(DISK, out)
    names = [*(ref.name for ref in inventory.snapshots), *inventory.damaged, *inventory.forbidden, *aside]
    if target.schedule is not None:
        inventory = make_plan(target.schedule, inventory).inventory
    schedule = target.schedule or newest_recipe(out, inventory)
    refs = {ref.name: ref for ref in inventory.snapshots}
    rows = []
    for name in names:
        if not (snapshots_folder(out) / name).exists():  # a run has just deleted it
            continue
        state, reason = ("set aside", "") if name in aside else _state(target, name, refs.get(name), verify)
        stage, iter, attempt = store.parse_name(name) or aside[name]
        row = Row(name=name, stage=stage, iter=iter, attempt=attempt, state=state, reason=reason)
        if (ref := refs.get(name)) is not None:
            result, pinned = read_result(out, ref), ["pinned"] if name in pins else []
            needed = (*pinned, *_needed(schedule, inventory, ref))
            top1 = result.top1 if result is not None else None
            row = replace(row, stage=ref.stage, bytes=ref.bytes, top1=top1, needed=needed)
        rows.append(replace(row, written=written(out, name)))
    order = {stage.name: n for n, stage in enumerate(schedule.stages if schedule is not None else ())}
    return sorted(rows, key=lambda row: (order.get(row.stage, len(order)), row.stage, row.attempt, row.iter))


def _state(target: Target, name: str, ref: store.SnapshotRef | None, verify: bool) -> tuple[str, str]:
    """Return the state of a snapshot, and the reason."""
    try:
        if verify:
            store.verify(DISK, target.out, name)
        store.read_file(DISK, snapshots_folder(target.out) / name, STATE, MOST_STATE)
    except PermissionDenied as error:
        if verify:
            raise
        return "unreadable", error.message
    except store.Damaged as error:
        return "unreadable" if error.disk_fails else "damaged", error.reason
    for stage in target.schedule.stages if target.schedule is not None else ():
        if ref is not None and ref.stage == stage.name and (changed := changed_fields(ref, stage)):
            fields = listing([field.removeprefix("solver.") for field in changed], "and")
            return "outdated", f"another {fields} than the schedule's"
    return "complete", ""


def _needed(schedule: Schedule | None, inventory: store.Inventory, ref: store.SnapshotRef) -> list[str]:
    """Return what training needs a snapshot for. An edit may be undone: what the stage is in the schedule now doesn't matter."""
    if any((o.stage, o.iter, o.id) == (ref.stage, ref.iter, ref.id) and o.name < ref.name for o in inventory.snapshots):
        return []  # another one has the same bits
    refs = inventory.of(ref.stage)
    needed = [f"end of {ref.stage}"] if ref.ends_stage else []
    if ref == refs[-1] and not any(other.ends_stage for other in refs):
        needed.append(f"{ref.stage} resumes")
    starts = [other.stage for other in inventory.snapshots if other.parent == ref.id]
    if schedule is not None:
        point = (ref.stage, ref.iter)
        starts += [stage.name for stage in schedule.stages if (stage.parent, stage.parent_iter) == point]
        starts += schedule.best_of(ref.stage) if ref.iter == refs[-1].best else []
        starts += [ensemble.name for ensemble in schedule.ensembles if point in ensemble.points]
    return needed + [f"start of {name}" for name in dict.fromkeys(starts)]


def _text(rows: Sequence[Row]) -> str:
    table = [["snapshot", "iteration", "size", "written", "top-1", "state", "needed"]]
    for row in rows:
        date = "" if row.written is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.written))
        bytes_text = "" if row.bytes is None else size(row.bytes)
        needed = ", ".join(row.needed)
        table.append([row.name, str(row.iter), bytes_text, date, percent(row.top1), row.state, needed])
    whole = [row for row in rows if row.state in ("complete", "outdated")]
    free = sum(row.bytes or 0 for row in whole if not row.needed)
    total = f"{count(len(whole), 'complete snapshot')}, {size(sum(row.bytes or 0 for row in whole))}"
    if free:
        total += f"; {size(free)} can go (`rm -r`, while no run is alive)"
    return "\n".join(
        [*columns(table), total, *(f"{row.state}: {row.name}: {row.reason}" for row in rows if row.reason)]
    )


def _pin(target: Target, options: StatusOptions) -> None:
    out = target.out
    for name in options.unpin:
        tell(f"{name} is {'no longer' if store.unpin(DISK, out, name) else 'not'} pinned")
    names = [ref.name for ref in store.inventory(DISK, out, looking=True).snapshots] if options.pin else []
    for name in options.pin:
        if name not in names:
            hint = nearest(name, names) or f"`stagerun status {out} --snapshots` lists them"
            raise UsageError(f"{out} has no snapshot {name}", hint)
        if not store.pin(DISK, out, name):
            raise UsageError(f"the run has just deleted snapshot {name}; it is not pinned", "pin a newer one")
        tell(f"{name} is pinned")
