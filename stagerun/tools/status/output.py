"""An output folder, read and not changed: whose it is, and what was written last. Takes no lock.

Which of two snapshots is newer, (attempt, serial) alone says: clocks of nodes differ, and a copy has other times.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stagerun import store
from stagerun.base.errors import StagerunError, UsageError
from stagerun.base.recipe import Sampling, Schedule
from stagerun.command.shared import output_folder
from stagerun.data.weights import looked_at
from stagerun.language import load
from stagerun.language.resolve import SCHEDULE_FILE
from stagerun.language.stored import read_foreign
from stagerun.logs.log_file import LOG
from stagerun.plan import Plan, make_plan
from stagerun.store.layout import snapshots_folder
from stagerun.system.imports import with_imports
from stagerun.train.keeper import ALL, Selection
from stagerun.train.progress import MOST_RECIPE, RECIPE
from stagerun.train.results import figures_file

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
            f"{folder}: no such folder",
            "give a schedule's folder, or the output folder, which `run` makes when it starts",
        )
    if os.path.exists(path / SCHEDULE_FILE) or not os.path.isdir(path):
        schedule = load(folder, overrides)
        of_it = output_folder(schedule.name, out)
        return Target(of_it, looked_at(schedule, of_it), path if out is None else None)
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


def plan_of(schedule: Schedule, out: Path, asked: Selection = ALL) -> Plan:
    """What `run` would do. Works where the data is not; snapshots that this user may not read are passed over."""
    found = store.inventory(DISK, out, looking=True)
    schedule = with_imports(schedule, out)
    solvers = [stage.solver for stage in schedule.stages]
    # Else there is nothing to compare files with: neither classes matter, nor where a stage begins.
    if found.snapshots or any(s.sampling is not Sampling.UNIFORM or s.solverstate is not None for s in solvers):
        schedule = looked_at(schedule, out)
    return make_plan(schedule, found, *asked)


def newest_recipe(out: Path, inventory: store.Inventory) -> Schedule | None:
    """The schedule that the newest snapshot was made from; None if it can't be read."""
    newest = newest_snapshot(inventory)
    return recipe_of(out, newest) if newest is not None else None


def recipe_of(out: Path, ref: store.SnapshotRef) -> Schedule | None:
    """The schedule that a snapshot was made from; None if it can't be read."""
    try:
        return read_foreign(recipe_text(out, ref))
    except (StagerunError, ValueError):
        return None


def recipe_text(out: Path, ref: store.SnapshotRef) -> str:
    """The canonical form of the schedule that a snapshot was made from. Damaged, ValueError where it can't be read."""
    return store.read_file(DISK, snapshots_folder(out) / ref.name, RECIPE, MOST_RECIPE)[1].decode()


def newest_snapshot(inventory: store.Inventory) -> store.SnapshotRef | None:
    """The one written last."""
    return max(inventory.snapshots, key=lambda ref: (ref.attempt, ref.serial, ref.iter), default=None)
