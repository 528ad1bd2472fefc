"""Trained weights: which snapshots `eval`, `predict` and `export` mean, and their common options. No torch: a mistake is reported at once."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import click

from stagerun import store
from stagerun.base.errors import UsageError, listing, nearest
from stagerun.base.events import Tested
from stagerun.base.recipe import BEST, EMA, EnsembleRule, Schedule
from stagerun.base.snapshots import Inventory, SnapshotRef
from stagerun.command.ending import tell
from stagerun.command.options import option
from stagerun.command.shared import TrustCode
from stagerun.logs.log_file import LOG, Log
from stagerun.plan import PlannedStage, make_plan
from stagerun.store.layout import averages_folder, snapshots_folder
from stagerun.system.world import World, default_threads
from stagerun.tools.output import DISK, Target, find_target
from stagerun.train.results import read_ensemble

Out = Annotated[str | None, option("--out FOLDER", "Output folder, where SNAPSHOT is a name.")]
Ema = Annotated[bool, option("--ema", "The averaged weights (`ema_decay`) instead of the trained ones.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """Options of a forward pass."""

    views: str = option(
        "--views",
        "What is averaged for an image: nothing; it and its mirror; four corners, centre, and their mirrors.",
        type=click.Choice(["one", "flip", "10crop"]),
        default="one",
    )
    device_batch: int | None = option(
        "--device-batch N", "Images per forward pass.  [default: test_batch_size]", least=1
    )
    threads: int | None = option("--threads N", "Threads.  [default: OMP_NUM_THREADS, or one per processor]", least=1)
    ema: Ema = False
    trust_code: TrustCode = False

    def meant_by(self, *names: str | None) -> "Forward":
        """Return the options with `ema` for a name of averaged weights."""
        return replace(self, ema=self.ema or any(map(means_ema, names)))

    def device(self) -> Any:
        """Return the device of this process; torch gets its threads."""
        import torch

        from stagerun.engine.device import choose_device

        torch.set_num_threads(self.threads or default_threads(1))
        return choose_device(World())


# By a snapshot's directory the stage that it ends, named as in the schedule; '' for a snapshot that the user named. And the schedule, if any.
Choice = tuple[dict[Path, str], Schedule | None]
SETS = "if `stagerun run` had --set, repeat it here"
_LIST = "`stagerun status --snapshots` lists snapshots"


def choose(argument: str, overrides: Sequence[str], out: str | None, stage: str | None) -> Choice:
    """SNAPSHOT|DIR: one snapshot, or the ends of a schedule's or an output folder's finished stages, or of one `stage`.

    UsageError, RecipeError, ResumeRefused, StorageError, PermissionDenied.
    """
    path = _snapshot(argument, out)
    if path is None:
        return _ends(find_target(argument, overrides, out), stage)
    if overrides or stage is not None:
        text = f"{argument} is a snapshot: --set and --stage belong to a schedule's folder"
        raise UsageError(text, "leave them out, or give the schedule's folder")
    return {path: ""}, None


def choose_snapshot(argument: str, out: str | None) -> Path:
    """Return the directory of SNAPSHOT: a path, or with `out` the name of a snapshot, of a stage that has ended, or of an ensemble that
    averages weights. UsageError."""
    path = _snapshot(argument, out)
    if path is None:
        hint = f"give the directory of one (OUT/snapshots/NAME), or its name with --out; {_LIST}"
        raise UsageError(f"{argument} is not a snapshot", hint)
    return path


def choose_members(argument: str, out: str | None) -> tuple[Path, ...]:
    """Return the directory of SNAPSHOT, or of the members of an ensemble that averages probabilities. UsageError."""
    root = Path(out or "")
    tested = read_ensemble(root, argument) if out is not None and not os.path.exists(argument) else None
    if tested is None or tested.rule != EnsembleRule.MEAN_PROBABILITY.value:
        return (choose_snapshot(argument, out),)
    paths = {ref.id: snapshots_folder(root) / ref.name for ref in store.inventory(DISK, root).snapshots}
    if not paths.keys() >= {*tested.snapshots}:
        text = f"`{argument}`: some of the snapshots that it was made of are missing in {out}"
        raise UsageError(text, "`stagerun run DIR` makes it again")
    return tuple(paths[id] for id in tested.snapshots)


def ensemble_of(folder: Path) -> str | None:
    """Return the ensemble whose network is in a snapshot's directory; None for a stage's."""
    root = folder.resolve().parent.parent
    return root.name if root.parent.name == averages_folder(Path()).name else None


def _snapshot(argument: str, out: str | None) -> Path | None:
    """Return the directory of a snapshot; None for a path of something else."""
    path = Path(argument)
    if out is not None and not os.path.exists(path):
        return _named(argument, Path(out))
    path = path.resolve()
    return path if store.parse_name(path.name) is not None and path.is_dir() else None


def _named(name: str, out: Path) -> Path:
    """Return the directory of a snapshot, of a stage's newest end, or of an ensemble's network. UsageError."""
    path, average = snapshots_folder(out) / name, averages_folder(out) / name
    if store.parse_name(name) is not None and os.path.isdir(path):
        return path
    inventory = store.inventory(DISK, out)
    stage, at = _stage_at(name)
    end = _newest_end(inventory, stage)
    if end := _best(end or next(reversed(inventory.of(stage)), None), inventory, out) if at == BEST else end:
        return snapshots_folder(out) / end.name
    if os.path.isdir(snapshots_folder(average)) and (networks := store.inventory(DISK, average).snapshots):
        return snapshots_folder(average).resolve() / networks[-1].name
    names = [*inventory.by_stage, *(ref.name for ref in inventory.snapshots)]
    text = f"{out} has no snapshot, no stage that has ended, and no ensemble with one network, named `{name}`"
    raise UsageError(text, ("" if name in names else nearest(name, names)) or _LIST)


def means_ema(name: str | None) -> bool:
    """Return whether a name means a stage's averaged weights: `trunk@ema`."""
    return _stage_at(name)[1] == EMA


def _stage_at(name: str | None) -> tuple[str, str]:
    """Return a stage, and BEST or EMA after its `@`, else ''."""
    stage, _, at = (name or "").rpartition("@")
    return (stage, at) if at in (BEST, EMA) else (name or "", "")


def _best(newest: SnapshotRef | None, inventory: Inventory, out: Path) -> SnapshotRef | None:
    """Return the snapshot with the best evaluation in the course of training that led to `newest`: the one that other stages start from or,
    if none does, the first of the best among those kept, by the log. None if none was evaluated."""
    if newest is None:
        return None
    scores, metric = dict[int, float](), newest.identity.get("solver.early_stop.metric", "TOP1")
    for _, event in Log(out / LOG, lambda name: name == "Tested"):
        if isinstance(event, Tested) and event.stage == (newest.trained_as or newest.stage) and not event.ema:
            score = {"LOSS": -event.loss, "MAP": event.mean_ap}.get(metric, event.top1)
            scores[event.iter] = -math.inf if score is None or math.isnan(score) else score
    scores = {newest.best: 0.0} if newest.best else scores
    kept = [r for r in inventory.of(newest.stage) if (r.parent, r.identity) == (newest.parent, newest.identity)]
    tested = [ref for ref in kept if ref.iter in scores]
    return max(tested, key=lambda ref: (scores[ref.iter], -ref.iter), default=None)


def _newest_end(inventory: Inventory, stage: str) -> SnapshotRef | None:
    return next((ref for ref in reversed(inventory.of(stage)) if ref.ends_stage), None)


def _ends(target: Target, stage: str | None) -> Choice:
    """Choose the ends of finished stages that count for the schedule, or without one the newest. Notes name the other stages."""
    inventory = store.inventory(DISK, target.out)
    stage, at = (None, "") if stage is None else _stage_at(stage)
    if target.schedule is None:
        stages = {name: (_newest_end(inventory, name), "half trained") for name in inventory.by_stage}
    else:
        plan = make_plan(target.schedule, inventory)
        inventory, stages = plan.inventory, {one.name: (one.end, _state(one)) for one in plan.stages}
    if stage is not None and stage not in stages:
        raise UsageError(
            f"no stage is named `{stage}`", nearest(stage, stages) or f"the stages are {listing(list(stages))}"
        )
    ends: dict[Path, str] = {}
    states = []
    for name, (end, state) in stages.items():
        if at == BEST and stage == name and end is not None:
            end, state = _best(end, inventory, target.out), "not evaluated where it has snapshots"
        if stage in (None, name) and end is not None:
            ends[snapshots_folder(target.out) / end.name] = name
        elif stage in (None, name):
            states.append(f"stage `{name}` is {state}")
    if not ends:
        raise UsageError("\n  ".join([f"no end of a stage in {target.out}", *states]), f"{SETS}; {_LIST}")
    tell("\n".join(f"note: {state} and is left out" for state in states))
    return ends, target.schedule


def _state(planned: PlannedStage) -> str:
    """`stale (its parent `init` is stale)`, as `plan` words it."""
    state = {"fresh": "not trained", "resume": "half trained"}.get(planned.state.value, planned.state.value)
    return f"{state} ({planned.why})" if planned.why else state
