"""An output folder, read and not changed: whose it is, what was written last, and what was evaluated. Takes no lock.

Which of two snapshots is newer, (attempt, serial) alone says: clocks of nodes differ, and a copy has other times.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from stagerun import store
from stagerun.base.errors import DataError, StagerunError, UsageError
from stagerun.base.events import EnsembleTested, StageFinished, Tested, TestedBeside
from stagerun.base.recipe import Sampling, Schedule
from stagerun.base.snapshots import Inventory, SnapshotRef
from stagerun.command.shared import output_folder
from stagerun.language import load
from stagerun.language.build import completed
from stagerun.language.resolve import SCHEDULE_FILE
from stagerun.language.stored import read_foreign
from stagerun.plan import Plan, make_plan
from stagerun.plan.ensembles import EnsembleState
from stagerun.store.given import looked_at
from stagerun.store.layout import MANIFEST, snapshots_folder
from stagerun.system.imports import with_imports
from stagerun.train.keeper import ALL, Selection
from stagerun.train.log_file import Life, earlier_tests, newest_start, started
from stagerun.train.progress import MOST_RECIPE, RECIPE
from stagerun.train.results import figures_file, planned_ensembles, read_ensemble, read_result

LOG = "log.jsonl"
DISK = store.LocalDisk()
_DATA_HINT = "give the folder of a schedule, or that of an LMDB"


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
    matters = any(s.sampling is not Sampling.UNIFORM or s.solverstate is not None for s in solvers)
    if (
        found.snapshots or matters
    ):  # else there is nothing to compare files with: neither classes matter, nor where a stage begins
        schedule = looked_at(schedule, out)
    return make_plan(schedule, found, *asked)


def is_schedule(folder: str) -> bool:
    """Whether it is a schedule's; else it is an LMDB's. DataError if it isn't there, UsageError if it is neither."""
    path = Path(folder)
    if os.path.exists(path / SCHEDULE_FILE):
        return True
    if os.path.exists(path / "data.mdb"):
        return False
    if os.path.isdir(path):
        raise UsageError(
            f"{folder} is neither a schedule's folder (it has no {SCHEDULE_FILE}) nor an LMDB's (no data.mdb)",
            _DATA_HINT,
        )
    if os.path.lexists(path):
        raise UsageError(f"{folder}: is not a folder", _DATA_HINT)
    raise DataError(f"{folder}: no such folder", _DATA_HINT)


def elsewhere(target: Target) -> str:
    """A hint where nothing is in the default output folder; '' where --out or an output folder was given."""
    if target.folder is None:
        return ""
    return "\n  hint: `run` writes to out/NAME in the folder it is called in; name another one with --out"


# -- snapshots and evaluations


def stage_order(out: Path, inventory: Inventory) -> list[str]:
    """Names of the stages as the recipe in the newest snapshot has them; none if it can't be read."""
    recipe = newest_recipe(out, inventory)
    return [stage.name for stage in recipe.stages] if recipe is not None else []


def newest_recipe(out: Path, inventory: Inventory) -> Schedule | None:
    """The schedule that the newest snapshot was made from; None if it can't be read."""
    newest = newest_snapshot(inventory)
    return recipe_of(out, newest) if newest is not None else None


def recipe_of(out: Path, ref: SnapshotRef) -> Schedule | None:
    """The schedule that a snapshot was made from; None if it can't be read."""
    try:
        return read_foreign(recipe_text(out, ref))
    except (StagerunError, ValueError):
        return None


def recipe_text(out: Path, ref: SnapshotRef) -> str:
    """The canonical form of the schedule that a snapshot was made from. Damaged, ValueError where it can't be read."""
    return store.read_file(DISK, out, ref.name, RECIPE, MOST_RECIPE).decode()


def newest_snapshot(inventory: Inventory) -> SnapshotRef | None:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The last one of a stage. `snapshot` is '' for one inside a stage."""

    stage: str
    iter: int
    top1: float | None = None
    top5: float | None = None
    loss: float | None = None
    ema_top1: float | None = None
    ema_top5: float | None = None
    ema_loss: float | None = None
    snapshot: str = ""
    beside: tuple[tuple[str, float, float, float | None, bool], ...] = ()  # as of StageFinished


def evaluations(out: Path, plan: Plan | None, life: Life, inventory: Inventory) -> tuple[Evaluation, ...]:
    """In the order of the schedule, as far as that is known: of a stage in training the last one inside it, of one that is done
    its end's, of another the newest there is."""
    run = started(life)
    order = [s.stage.name for s in plan.stages] if plan else list(run.stages) if run else []
    ends = {s.stage.name: s.end for s in plan.stages} if plan else {}
    inside = _inside(out, life)
    found = []
    for stage in dict.fromkeys([*order, *(ref.stage for ref in inventory.snapshots)]):
        end = ends.get(stage)
        if stage in inside:
            others = [t for t in life.of(TestedBeside) if (t.stage, t.iter) == (stage, inside[stage][0].iter)]
            beside = tuple((t.val, t.top1, t.top5, t.loss, t.ema) for t in others)
            found.append(replace(_evaluation(inside[stage]), beside=beside))
        elif end is not None:
            found += [_of_result(result)] if (result := read_result(out, end)) is not None else []
        elif (last := last_result(out, inventory.of(stage))) is not None:
            found.append(_of_result(last[1]))
    return tuple(found)


def ensembles(out: Path, plan: Plan | None, life: Life, inventory: Inventory) -> tuple[EnsembleTested, ...]:
    """In the order of the schedule, as far as that is known. Where the schedule waits for members, an older evaluation stands as
    those of its members do, unless they have become something else."""
    if plan is None:
        run = started(life)
        found = [ensemble_on_disk(out, name, inventory) for name in (run.ensembles if run else ())]
    else:
        found = [
            ensemble_on_disk(out, e.ensemble.name, inventory) if e.state is EnsembleState.WAITING else e.result
            for e in planned_ensembles(plan, out)
        ]
    return tuple(tested for tested in found if tested is not None)


def _inside(out: Path, life: Life) -> dict[str, list[Tested]]:
    """By stage, the newest evaluation that no StageFinished has followed: of the trained weights and of the averaged ones."""
    found: dict[str, list[Tested]] = {}
    start = newest_start(life)
    if start is not None and start.iter > start.begins:  # in the lives before
        found[start.stage] = earlier_tests(out / LOG, start.stage)
    for event in life.of(Tested, StageFinished):
        if isinstance(event, StageFinished):
            found.pop(event.stage, None)
        else:
            found.setdefault(event.stage, []).append(event)
    return {stage: [t for t in tests if t.iter == tests[-1].iter] for stage, tests in found.items() if tests}


def _evaluation(tests: Sequence[Tested]) -> Evaluation:
    figures = {f"{'ema_' * t.ema}{name}": getattr(t, name) for t in tests for name in ("top1", "top5", "loss")}
    return Evaluation(stage=tests[0].stage, iter=tests[0].iter, **figures)


def _of_result(result: StageFinished) -> Evaluation:
    return Evaluation(
        stage=result.stage,
        iter=result.iterations,
        top1=result.top1,
        top5=result.top5,
        loss=result.test_loss,
        ema_top1=result.ema_top1,
        ema_top5=result.ema_top5,
        ema_loss=result.ema_test_loss,
        snapshot=result.snapshot,
        beside=result.beside,
    )
