"""An output folder that a command reads and doesn't change: its schedule, plan and newest snapshot. Takes no lock."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from stagerun import store
from stagerun.base.code import Sources, code_of
from stagerun.base.errors import StagerunError, UsageError, listing
from stagerun.base.recipe import Sampling, Schedule, Stage
from stagerun.command.shared import output_folder
from stagerun.data.weights import looked_at
from stagerun.language import consent, load
from stagerun.language.code import reserved_name
from stagerun.language.resolve import SCHEDULE_FILE
from stagerun.language.stored import read_foreign
from stagerun.logs.log_file import LOG, read_last_life
from stagerun.plan import Plan, make_plan, under
from stagerun.store.layout import MANIFEST, snapshots_folder
from stagerun.system.image_sets import with_imports
from stagerun.system.typed import json_object
from stagerun.train.keeper import ALL, Selection
from stagerun.train.progress import CODE, MOST_CODE, MOST_RECIPE, RECIPE
from stagerun.train.results import figures_file

DISK = store.LocalDisk()


@dataclass(frozen=True, slots=True)
class Target:
    """An output folder. `schedule` and its `folder` are None where the output folder itself was named; `folder` also with --out."""

    out: Path
    schedule: Schedule | None = None
    folder: Path | None = None

    @property
    def hint(self) -> str:
        """A hint where the default output folder is empty."""
        where = "`run` writes to out/NAME in the folder it is called in; name another one with --out"
        return f"\n  hint: {where}" if self.folder is not None else ""


def find_target(folder: str, overrides: Sequence[str], out: str | None) -> Target:
    """Return the output folder for DIR of a command, which is a schedule's folder or an output folder. RecipeError, UsageError."""
    path = Path(folder)
    if not os.path.lexists(path):
        raise UsageError(
            f"{folder}: no such folder",
            "give a schedule's folder, or the output folder, which `run` makes when it starts",
        )
    if os.path.exists(path / SCHEDULE_FILE) or not os.path.isdir(path):
        schedule = load(folder, overrides)
        default = output_folder(schedule.name, out)
        return Target(default, looked_at(schedule, default), path if out is None else None)
    # `rehearse` leaves its figures in a folder without a run.
    if not (os.path.isdir(path / "snapshots") or any(os.path.exists(p) for p in (path / LOG, figures_file(path)))):
        raise UsageError(
            f"{folder} is neither a schedule's folder ({SCHEDULE_FILE}) nor an output folder (snapshots, {LOG})",
            "give the folder that `stagerun run` reads, or its output folder",
        )
    if out is not None or overrides:
        raise UsageError(
            f"{folder} is an output folder: --out and --set belong to a schedule's folder",
            "leave them out, or give the schedule's folder",
        )
    return Target(path)


def plan_of(schedule: Schedule, out: Path, selection: Selection = ALL) -> Plan:
    """Return what `run` would do, also without the data; snapshots that this user may not read are passed over."""
    inventory = store.inventory(DISK, out, looking=True)
    schedule = with_imports(schedule, out)
    solvers = [stage.solver for stage in schedule.stages]
    # Without snapshots, only sampling by class and `solverstate` depend on the files.
    if inventory.snapshots or any(s.sampling is not Sampling.UNIFORM or s.solverstate is not None for s in solvers):
        schedule = looked_at(schedule, out)
    return make_plan(schedule, inventory, *selection)


def newest_snapshot(inventory: store.Inventory) -> store.SnapshotRef | None:
    """Return the snapshot that was written last, by (attempt, serial): clocks of nodes differ, and a copy has other times."""
    return max(inventory.snapshots, key=lambda ref: (ref.attempt, ref.serial, ref.iter), default=None)


def newest_recipe(out: Path, inventory: store.Inventory) -> Schedule | None:
    """Return the schedule in the newest snapshot; None if it can't be read."""
    newest = newest_snapshot(inventory)
    return recipe_of(out, newest) if newest is not None else None


def recipe_of(out: Path, ref: store.SnapshotRef) -> Schedule | None:
    """Return the schedule in a snapshot; None if it can't be read."""
    try:
        return read_foreign(store.read_file(DISK, snapshots_folder(out) / ref.name, RECIPE, MOST_RECIPE)[1].decode())
    except (StagerunError, ValueError):
        return None


def written(out: Path, name: str) -> float | None:
    """Return when a snapshot was written, by the file system, for people. None if it has just been deleted."""
    try:
        return (snapshots_folder(out) / name / MANIFEST).stat().st_mtime
    except OSError:
        return None


# -- the schedule of a run


def read_schedule(trust_code: bool, folder: str, overrides: Sequence[str]) -> Schedule:
    """Return the schedule of DIR, or of an output folder."""
    target = find_target(folder, overrides, None)
    return target.schedule or stored_schedule(target.out, trust_code)


def stored_schedule(out: Path, trust_code: bool) -> Schedule:
    """Return the schedule in the newest snapshot, each stage as the newest snapshot of it says. UsageError if no snapshot can be read, or if
    the schedule names Python that is not trusted."""
    snapshots = under(store.inventory(DISK, out, looking=True), read_last_life(out / LOG).names)
    schedule, newest = newest_recipe(out, snapshots), newest_snapshot(snapshots)
    if schedule is None or newest is None:
        hint = f"give the schedule's folder, and `--out {out}`"
        raise UsageError(f"{out} has no snapshot that says what was trained", hint)
    refs = {ref.stage: ref for ref in snapshots.snapshots}
    stages = [_as_trained(out, stage, refs.get(stage.name)) for stage in schedule.stages]
    if code := list(dict.fromkeys(name for stage in stages for name in consent.asked(stage))):
        if not trust_code:
            raise UsageError(
                f"the schedule in snapshot {newest.name} runs Python that it names: {listing(code, 'and')}",
                "read it; --trust-code runs the snapshot's copy, and with the schedule's folder DIR its own files are taken",
            )
        sources = sources_in(out / "snapshots" / newest.name)
        stages = [consent.trusted(stage, sources) for stage in stages]
        files = [(RECIPE, ""), *sources.files]
        schedule = replace(schedule, files=tuple((f"{out}/{path}", text) for path, text in files))
    # Nothing is written to the scratch folder that a snapshot names.
    schedule = replace(schedule, stages=tuple(stages)).with_data(lambda data: replace(data, scratch=None))
    return looked_at(schedule, out)


def _as_trained(out: Path, stage: Stage, ref: store.SnapshotRef | None) -> Stage:
    if ref is None:
        return replace(stage, identity={})
    recipe = recipe_of(out, ref)
    for trained in recipe.stages if recipe is not None else ():
        # If the parent was renamed or replaced, only the newest schedule has what the stage starts from.
        same = (trained.parent, trained.average) == (stage.parent, stage.average)
        if trained.name == (ref.trained_as or ref.stage) and same:
            stage = replace(trained, name=stage.name, enabled=stage.enabled, group=stage.group)
    return replace(stage, identity=dict(ref.identity))


def sources_in(folder: Path) -> Sources:
    """Return the Python in a snapshot's folder. ValueError if no run has written it."""
    has_code = CODE in store.inspect_folder(DISK, folder).files
    texts = json_object(store.read_file(DISK, folder, CODE, MOST_CODE)[1]) if has_code else {}
    for path, text in texts.items():
        if not isinstance(text, str):
            raise ValueError(f"{CODE}: {path[:40]!a} is not a text")
        code_of(f"{path}:name")
        if reserved_name(path):
            raise ValueError(f"{CODE}: {path} has the name of a module of Python's or torch's")
    return Sources(str(folder / CODE), tuple((path, str(text)) for path, text in sorted(texts.items())))
