"""What `plan` looks at on this machine besides the files: the data."""

import os
from collections.abc import Collection, Mapping
from pathlib import Path

from stagerun.cli.options import missing_data
from stagerun.errors import PermissionDenied, StorageError, listing
from stagerun.plan import Plan, State
from stagerun.plan.counting import other_set
from stagerun.plan.estimate import snapshots_on_disk
from stagerun.plan.render import csv_rows
from stagerun.snapshots import passed_over
from stagerun.spec import look_at_classes
from stagerun.spec.layers import LMDB
from stagerun.store import local_kind, lost_with
from stagerun.text import size
from stagerun.train import results


def remarks(plan: Plan, damaged: Collection[str] = (), forbidden: Collection[str] = ()) -> list[str]:
    """One sentence each: what is missing here, `damaged` or `forbidden`, and what disk it will take as far as that was measured."""
    data = plan.schedule.data
    found = [f"snapshot {name} is damaged and is passed over" for name in damaged]
    found += [passed_over(name) for name in forbidden]
    found += missing_data(data)
    for field, source in (("data.train", data.train), ("data.val", data.val)):
        origin = plan.schedule.stages[0].origins.get(f"{field}.images")
        if source is not None and origin is not None and origin.layer == LMDB:
            found.append(f"{field}.images: {source.images}, read from LMDB {source.path}")
    if (problem := look_at_classes(plan.schedule)) is not None:
        found.append(f"{problem.message} ({problem.span}): `run` will refuse this; {problem.hint}")
    found += [
        f"snapshots of `{name}` count for no stage of this schedule, and are left alone" for name in plan.unclaimed
    ]
    if data.val is None:
        found.append("no data.val: nothing will be evaluated")
    unsaved = [s.stage.name for s in plan.stages if not s.stage.solver.snapshot and s.state is not State.DISABLED]
    if unsaved:
        where = ", ".join(unsaved)
        found.append(f"no snapshot inside {where}: a kill there costs the stage from its start (`snapshot`)")
    sizes = [ref.bytes for s in plan.stages for ref in (s.start, s.end) if ref is not None]
    if sizes:
        whole = snapshots_on_disk(plan.schedule) * max(sizes)
        found.append(f"snapshots take {size(max(sizes))} each, at most {size(whole)} in all")
    return found


def results_remark(plan: Plan, out: Path) -> list[str]:
    """What is trained and still to be evaluated: without a result, or with one of other validation images than lie there now."""
    found = {s.stage.name: results.read_result(out, s.end) for s in results.unfinished(plan, out) if s.end is not None}
    missing = [name for name, result in found.items() if result is None]
    other = [n for n, result in found.items() if result is not None and other_set(plan.schedule, result.tested_set)]
    remarks = []
    if missing and plan.schedule.data.val is not None:
        remarks.append(f"trained but not evaluated: {listing(missing, 'and')}; `run` evaluates")
    if other:
        were = "was" if len(other) == 1 else "were"
        remarks.append(
            f"data.val: the images are not those that {listing(other, 'and')} {were} evaluated on; `run` evaluates again"
        )
    return remarks


def place_remark(out: Path, several_hosts: bool, environment: Mapping[str, str] = os.environ) -> list[str]:
    """What it means for a job of several hosts that OUT lies on a file system of this one alone. `several_hosts`: the command says so;
    else a Slurm allocation of several nodes, which it is called in, does."""
    nodes = environment.get("SLURM_JOB_NUM_NODES", "1")
    if not several_hosts and not (nodes.isascii() and nodes.isdigit() and int(nodes) > 1):
        return []
    kind = local_kind(out)
    return [lost_with(out, kind, "")] if kind else []


def write_csv(plan: Plan, path: str) -> None:
    """One row per iteration. PermissionDenied or StorageError naming the file."""
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.writelines(csv_rows(plan))
    except PermissionError as error:
        raise PermissionDenied(f"may not write {path}") from error
    except OSError as error:
        raise StorageError(f"can't write {path}: {error.strerror}") from error
