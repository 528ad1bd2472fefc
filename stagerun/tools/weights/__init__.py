"""Trained weights: which snapshots `eval`, `predict` and `export` mean, and their common options. No torch: a mistake is reported at once."""

import math
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import click

from stagerun import store
from stagerun.base.errors import UsageError, listing, nearest
from stagerun.base.events import Tested
from stagerun.base.recipe import BEST, EMA, EnsembleRule, Schedule, point
from stagerun.base.snapshots import Inventory, SnapshotRef
from stagerun.command.ending import tell
from stagerun.command.options import option
from stagerun.command.shared import TrustCode
from stagerun.logs.log_file import LOG, Log
from stagerun.plan import PlannedStage, make_plan
from stagerun.plan.ensembles import state_in_words
from stagerun.store.layout import averages_folder, snapshots_folder
from stagerun.system.world import World, default_threads
from stagerun.tools.output import DISK, Target, find_target
from stagerun.train.results import planned_ensembles, read_ensemble

Ema = Annotated[bool, option("--ema", "The averaged weights (`ema_decay`) instead of the trained ones.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Options that say where SNAPSHOT|DIR is."""

    out: str | None = option(
        "--out FOLDER", "Output folder of DIR, or of a SNAPSHOT's name.  [default of DIR: ./out/NAME]"
    )
    stage: str | None = option("--stage STAGE", "With DIR: this stage (also `trunk@best`, `trunk@ema`) or ensemble.")
    overrides: tuple[str, ...] = option(
        "--set STAGE.FIELD=VALUE", "Change a field of DIR for this command.", default=()
    )

    def means_ema(self, argument: str) -> bool:
        """Return whether SNAPSHOT|DIR or --stage is the name of a stage's averaged weights: `trunk@ema`."""
        names = (self.stage or "", "" if os.path.lexists(argument) else argument)
        return any(_stage_at(name)[1] == EMA for name in names)


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

    def device(self) -> Any:
        """Return the device of this process; torch gets its threads."""
        import torch

        from stagerun.engine.device import choose_device

        torch.set_num_threads(self.threads or default_threads(1))
        return choose_device(World())


SETS = "if `stagerun run` had --set, repeat it here"


@dataclass(frozen=True, slots=True)
class Chosen:
    """Directories of snapshots: one, or of the members of an `ensemble`, whose answers are averaged by `rule`. `stages`: that they end, named
    as in the schedule; '' for snapshots that the user named."""

    folders: tuple[Path, ...]
    stages: tuple[str, ...] = ("",)
    ensemble: str | None = None
    rule: EnsembleRule = EnsembleRule.MEAN_PROBABILITY


def choose(argument: str, where: Where) -> tuple[list[Chosen], Schedule | None]:
    """SNAPSHOT|DIR: one snapshot or ensemble, or the ends of a schedule's or an output folder's finished stages. And DIR's schedule, if any.

    UsageError, RecipeError, ResumeRefused, StorageError, PermissionDenied.
    """
    if (chosen := _snapshot(argument, where.out)) is None:
        target = find_target(argument, where.overrides, where.out)
        return _ends(target, where.stage), target.schedule
    if where.overrides or where.stage is not None:
        text = f"{argument} is a snapshot: --set and --stage belong to a schedule's folder"
        raise UsageError(text, "leave them out, or give the schedule's folder")
    return [chosen], None


def choose_one(argument: str, where: Where) -> tuple[Chosen, Schedule | None]:
    """Return `choose` of one snapshot or ensemble. UsageError for a folder with several stages, and as of `choose`."""
    chosen, schedule = choose(argument, where)
    if len(chosen) > 1:
        names = [one.stages[0] for one in chosen]
        raise UsageError(f"{argument} has {len(names)} trained stages", f"choose one with --stage: {listing(names)}")
    return chosen[0], schedule


def choose_snapshot(path: str) -> Path:
    """Return the directory of a snapshot. UsageError for another path."""
    chosen = _snapshot(path, None)
    if chosen is None:
        raise UsageError(f"{path} is not a snapshot", "give the directory of one (OUT/snapshots/NAME)")
    return chosen.folders[0]


def _snapshot(argument: str, out: str | None) -> Chosen | None:
    """Return the snapshot at a path, or with `out` by its name; None for a folder of something else. UsageError."""
    path = Path(argument)
    if not os.path.lexists(path):
        if out is not None:
            return _named(argument, Path(out))
        hint = "give OUT/snapshots/NAME, its name with --out OUT, or a schedule's or output folder with --stage STAGE"
        raise UsageError(f"{argument} is not a snapshot, and no such folder exists", hint)
    path = path.resolve()
    if store.parse_name(path.name) is None or not path.is_dir():
        return None
    root = path.parent.parent
    return Chosen((path,), ensemble=root.name if root.parent.name == averages_folder(Path()).name else None)


def _named(name: str, out: Path) -> Chosen:
    """Return a snapshot, a stage's newest end, or an ensemble, by its name in an output folder. UsageError."""
    snapshots, average = snapshots_folder(out), averages_folder(out) / name
    if store.parse_name(name) is not None and os.path.isdir(snapshots / name):
        return Chosen((snapshots / name,))
    inventory = store.inventory(DISK, out)
    stage, at = _stage_at(name)
    end = _newest_end(inventory, stage)
    if end := _best(end or next(reversed(inventory.of(stage)), None), inventory, out) if at == BEST else end:
        return Chosen((snapshots / end.name,))
    tested = read_ensemble(out, name)
    stages = tuple(point(member)[0] for member in tested.members) if tested is not None else ("",)
    if os.path.isdir(snapshots_folder(average)) and (networks := store.inventory(DISK, average).snapshots):
        return Chosen((snapshots_folder(average).resolve() / networks[-1].name,), stages[:1], name)
    if tested is not None and tested.rule in (EnsembleRule.MEAN_PROBABILITY.value, EnsembleRule.MEAN_LOGIT.value):
        paths = {ref.id: snapshots / ref.name for ref in inventory.snapshots}
        if not paths.keys() >= {*tested.snapshots}:
            text = f"`{name}`: some of the snapshots that it was made of are missing in {out}"
            raise UsageError(text, "`stagerun run DIR` makes it again")
        return Chosen(tuple(paths[id] for id in tested.snapshots), stages, name, EnsembleRule(tested.rule))
    names = [*inventory.by_stage, *(ref.name for ref in inventory.snapshots)]
    text = f"{out} has no snapshot, no stage that has ended, and no evaluated ensemble, named `{name}`"
    raise UsageError(text, ("" if name in names else nearest(name, names)) or _snapshots_of(out))


def _stage_at(name: str) -> tuple[str, str]:
    """Return a stage, and BEST or EMA after its `@`, else ''."""
    stage, _, at = name.rpartition("@")
    return (stage, at) if at in (BEST, EMA) else (name, "")


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


def _ends(target: Target, named: str | None) -> list[Chosen]:
    """Choose the ends of finished stages that count for the schedule, or without one the newest; or one stage or ensemble. Notes name the
    other stages."""
    inventory = store.inventory(DISK, target.out)
    stage, at = (None, "") if named is None else _stage_at(named)
    if target.schedule is None:
        stages = {name: (_newest_end(inventory, name), "half trained") for name in inventory.by_stage}
        if named is not None and stage not in stages:
            return [_named(named, target.out)]
    else:
        plan = make_plan(target.schedule, inventory)
        inventory, stages = plan.inventory, {one.name: (one.end, _state(one)) for one in plan.stages}
        ensembles = {one.ensemble.name: one for one in planned_ensembles(plan, target.out)}
        if named in ensembles:
            if ensembles[named].result is None:
                text = f"ensemble `{named}` is {state_in_words(ensembles[named])}"
                raise UsageError(text, f"`stagerun run` evaluates it; {SETS}")
            return [_named(named, target.out)]
        if named is not None and stage not in stages:
            names = [*stages, *ensembles]
            raise UsageError(
                f"no stage or ensemble is named `{named}`", nearest(named, names) or f"there are {listing(names)}"
            )
    ends, states = list[Chosen](), list[str]()
    for name, (end, state) in stages.items():
        if stage not in (None, name):
            continue
        if at == BEST and end is not None:
            end, state = _best(end, inventory, target.out), "not evaluated where it has snapshots"
        if end is not None:
            ends.append(Chosen((snapshots_folder(target.out) / end.name,), (name,)))
        else:
            states.append(f"stage `{name}` is {state}")
    if not ends:
        which = "no stage has" if stage is None else f"`{stage}` has not"
        text = "\n  ".join([f"{which} ended in {target.out}", *states])
        raise UsageError(text, f"{SETS}; {_snapshots_of(target.out)}")
    tell("\n".join(f"note: {state} and is left out" for state in states))
    return ends


def _snapshots_of(out: Path) -> str:
    return f"`stagerun status {shlex.quote(str(out))} --snapshots` lists snapshots"


def _state(planned: PlannedStage) -> str:
    """`stale (its parent `init` is stale)`, as `plan` words it."""
    state = {"fresh": "not trained", "resume": "half trained"}.get(planned.state.value, planned.state.value)
    return f"{state} ({planned.why})" if planned.why else state
