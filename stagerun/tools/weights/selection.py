"""Which snapshots `eval` and `export` were asked for. No torch: a mistake is found at once."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import click

from stagerun import store
from stagerun.base.errors import UsageError, listing, nearest
from stagerun.base.recipe import Ensemble, EnsembleRule, Schedule, Stage
from stagerun.base.snapshots import Inventory, SnapshotRef
from stagerun.command.options import option
from stagerun.language.resolve import SCHEDULE_FILE
from stagerun.language.values import differing, identity
from stagerun.plan import PlannedStage, State, make_plan
from stagerun.store.layout import MANIFEST, averages_folder, snapshots_folder
from stagerun.tools.status.output import DISK, Target, find_target, newest_recipe, recipe_of
from stagerun.train.results import read_ensemble

OutOfName = Annotated[str | None, option("--out FOLDER", "Output folder, where SNAPSHOT is a name.")]
ForwardBatch = Annotated[
    int | None, option("--device-batch N", "Images per forward pass.  [default: test_batch_size]", least=1)
]
OwnThreads = Annotated[
    int | None, option("--threads N", "Threads.  [default: OMP_NUM_THREADS, or one per processor]", least=1)
]
Views = Annotated[
    str,
    option(
        "--views",
        "What is averaged for an image: nothing; it and its mirror; four corners, centre, and their mirrors.",
        type=click.Choice(["one", "flip", "10crop"]),
    ),
]
Ema = Annotated[bool, option("--ema", "The averaged weights (`ema_decay`) in place of the trained ones.")]

SETS = "if `stagerun run` had --set, give the same here"


@dataclass(frozen=True, slots=True)
class Chosen:
    """The directories of the snapshots, the schedule if they were chosen by it, and what was left out and why. `stages`: by the
    directory's name the stage that it is the end of, with a schedule under the name that it has there."""

    folders: tuple[Path, ...]
    schedule: Schedule | None = None
    notes: tuple[str, ...] = ()
    stages: Mapping[str, str] = field(default_factory=dict)


def choose_snapshot(argument: str, out: str | None) -> Path:
    """The directory of SNAPSHOT: a path to it, or the name of a snapshot, of a stage with one end, or of an averaged ensemble, and the output
    folder. UsageError."""
    found = _snapshot(argument, out)
    if found is None:
        _require_unknown(argument, out)
        text = f"{argument} is not a snapshot"
        hint = "give the directory of one (OUT/snapshots/NAME), or its name with --out; `stagerun status --snapshots` lists them"
        raise UsageError(text, hint)
    return found


def choose_members(argument: str, out: str | None) -> tuple[Path, ...]:
    """The same, or the members of an ensemble that averages probabilities. UsageError."""
    if out is not None and not os.path.exists(argument):
        ensemble = _ensembles_of(None, Path(out)).get(argument)
        asked = ensemble is not None and ensemble.rule is EnsembleRule.MEAN_PROBABILITY
        tested = read_ensemble(Path(out), argument) if asked else None
        if tested is not None:
            names = {ref.id: ref.name for ref in store.inventory(DISK, Path(out)).snapshots}
            if gone := [member for member, id in zip(tested.members, tested.snapshots, strict=True) if id not in names]:
                text = f"`{argument}` is made from snapshots that are not in {out} any more: those of {listing(gone, 'and')}"
                raise UsageError(text, "`stagerun run DIR` makes it anew")
            return tuple(snapshots_folder(Path(out)) / names[id] for id in tested.snapshots)
    return (choose_snapshot(argument, out),)


def choose(argument: str, overrides: Sequence[str], out: str | None, stage: str | None) -> Chosen:
    """SNAPSHOT|DIR: one snapshot, or the ends of a schedule's or an output folder's finished stages, or of one `stage`.

    UsageError, RecipeError, ResumeRefused, StorageError, PermissionDenied.
    """
    found = _snapshot(argument, out)
    if found is None and not os.path.exists(argument):
        _require_unknown(argument, out)
        text = f"there is no {argument} here"
        hint = (
            "give a snapshot's directory (OUT/snapshots/NAME), its name with --out, that of an ensemble with averaged weights, or the "
            "schedule's folder"
        )
        raise UsageError(text, hint)
    if found is None:
        return _ends(find_target(argument, overrides, out), stage)
    if overrides or stage is not None:
        text = f"{argument} is a snapshot: --set and --stage belong to a schedule's folder"
        raise UsageError(text, "leave them out, or give the schedule's folder")
    return Chosen((found,))


def _require_unknown(argument: str, out: str | None) -> None:
    """UsageError that says what the argument is, where it is a name of something else in the output folder, or near one."""
    error = _not_a_snapshot(argument, Path(out)) if out is not None and not os.path.exists(argument) else None
    if error is not None:
        raise error


def ensemble_of(folder: Path) -> str | None:
    """The ensemble whose network is in a snapshot's directory; None for a stage's."""
    root = folder.resolve().parent.parent
    return root.name if root.parent.name == averages_folder(Path()).name else None


def _snapshot(argument: str, out: str | None) -> Path | None:
    """None if the argument is not a snapshot, nor an ensemble's network, nor a stage with one end."""
    path = Path(argument)
    average = averages_folder(Path(out)) / argument if out is not None else path
    if average.parent.name == averages_folder(Path()).name and os.path.isdir(snapshots_folder(average)):
        found = store.inventory(DISK, average).snapshots
        if found:
            return snapshots_folder(average).resolve() / found[-1].name
    if os.path.isdir(path):
        real = path.resolve()
        if store.parse_name(real.name) is None:
            if os.path.exists(path / MANIFEST) and not os.path.exists(path / SCHEDULE_FILE):
                text = f"`{real.name}` is not a snapshot's name, though there is a {MANIFEST} in it"
                hint = "a snapshot keeps the name that it was written under; one that was damaged is set aside as .bad-NAME"
                raise UsageError(text, hint)
            return None
        if out is not None:
            raise UsageError("--out, but the snapshot is given as a directory", "leave --out out")
        return real
    if store.parse_name(argument) is None:
        refs = store.inventory(DISK, Path(out)).of(argument) if out is not None and not os.path.exists(argument) else ()
        ends = [ref.name for ref in refs if ref.ends_stage]
        return snapshots_folder(Path(out or "")) / ends[0] if len(ends) == 1 else None
    if out is None:
        text = f"there is no directory {argument}; it is a snapshot's name, but of which output folder?"
        raise UsageError(text, "give --out FOLDER, or the path of its directory")
    folder = snapshots_folder(Path(out)) / argument
    if not os.path.isdir(folder):
        names = [ref.name for ref in store.inventory(DISK, Path(out)).snapshots]
        raise UsageError(f"there is no snapshot {argument} in {out}", nearest(argument, names))
    return folder


def _ends(target: Target, stage: str | None) -> Chosen:
    inventory = store.inventory(DISK, target.out)
    ends, waiting = _planned(target.schedule, inventory) if target.schedule else _newest(target.out, inventory)
    known = [*ends, *waiting]
    if stage is not None and stage not in known:
        ensembles = _ensembles_of(target.schedule, target.out)
        if stage in ensembles:
            raise _not_a_stage(ensembles[stage], target.out)
        hint = nearest(stage, [*known, *ensembles]) or (f"the stages are {listing(known)}" if known else "")
        raise UsageError(f"no stage is named `{stage}`", hint)
    asked = {name: ref for name, ref in ends.items() if stage in (None, name)}
    if not asked:
        what = f"stage `{stage}` is {waiting[stage]}" if stage is not None else f"no stage is finished in {target.out}"
        why = [waiting[stage]] if stage is not None else list(waiting.values())
        stale = any(text.startswith(State.STALE.value) for text in why)
        if stale and stage is None:
            what += " as the schedule says now" + "".join(
                f"\n  stage `{name}` is {text}" for name, text in waiting.items()
            )
        hint = "give one of its snapshots; `stagerun status --snapshots` lists them"
        raise UsageError(what, f"{SETS}; or {hint}" if stale else hint)
    notes = [f"stage `{name}` is {why} and is left out" for name, why in waiting.items() if stage is None]
    if target.schedule is None and (newest := newest_recipe(target.out, inventory)) is not None:
        other = "was trained with other settings than the schedule of the newest snapshot has"
        notes += [f"`{ref.name}` {other}" for ref in asked.values() if _of_another(target.out, ref, newest)]
    folders = tuple(snapshots_folder(target.out) / ref.name for ref in asked.values())
    stages = {ref.name: ref.stage for ref in asked.values()}
    return Chosen(folders, target.schedule, tuple(notes), stages)


def _planned(schedule: Schedule, inventory: Inventory) -> tuple[dict[str, SnapshotRef], dict[str, str]]:
    """The ends that count for the schedule, and the other stages with the reason."""
    plan = make_plan(schedule, inventory)
    ends = {s.stage.name: s.end for s in plan.stages if s.end is not None}
    words = {"fresh": "not trained", "resume": "half trained"}
    return ends, {s.stage.name: words.get(s.state.value, _why(s)) for s in plan.stages if s.end is None}


def _why(planned: PlannedStage) -> str:
    """`stale (its parent `init` is stale)`, as `plan` says it."""
    why = "; ".join([planned.why, *map(str, planned.changes)]) if planned.why else ""
    return planned.state.value + (f" ({why})" if why else "")


def _newest(out: Path, inventory: Inventory) -> tuple[dict[str, SnapshotRef], dict[str, str]]:
    """The same for an output folder without a schedule: the newest snapshot that ended each stage."""
    recipe = newest_recipe(out, inventory)
    order = [stage.name for stage in recipe.stages] if recipe is not None else []
    present = dict.fromkeys(ref.stage for ref in inventory.snapshots)
    stages = [*(name for name in order if name in present), *(name for name in present if name not in order)]
    ends: dict[str, SnapshotRef] = {}
    for name in stages:
        for ref in inventory.of(name):  # oldest first
            if ref.ends_stage:
                ends[name] = ref
    return ends, {name: "half trained" for name in stages if name not in ends}


def _of_another(out: Path, ref: SnapshotRef, newest: Schedule) -> bool:
    """Whether the schedule inside a snapshot says something else than `newest` of how its stage is trained, or one that it came from."""
    if (own := recipe_of(out, ref)) is None:
        return False
    was: Stage | None = own.stage(ref.stage)
    called = [stage for stage in newest.stages if stage.name == ref.stage]
    renamed = [stage for stage in newest.stages if stage.identity == ref.identity]
    now = next(iter(called + renamed), None)
    while was is not None and now is not None:
        found = [*differing(was.solver, now.solver, "solver"), *differing(was.model, now.model, "model")]
        solver = now.solver
        if was.parent_iter != now.parent_iter or any(identity(key, solver.lr_policy) for key, _, _ in found):
            return True
        was = own.stage(was.parent) if was.parent is not None else None
        now = newest.stage(now.parent) if now.parent is not None else None
    return was is not now


# -- a name that no snapshot has: that of a stage, of an ensemble, or a slip of the pen


def _not_a_snapshot(name: str, out: Path) -> UsageError | None:
    """What to type in place of a name; None where nothing is known of the folder."""
    inventory = store.inventory(DISK, out)
    schedule = newest_recipe(out, inventory)
    ensembles = _ensembles_of(schedule, out)
    if name in ensembles:
        return _not_a_stage(ensembles[name], out)
    own = inventory.of(name)
    if ends := [ref.name for ref in own if ref.ends_stage]:
        return UsageError(f"stage `{name}` has {len(ends)} ends in {out}", f"give one of them: {listing(ends)}")
    stages = dict.fromkeys(
        [*(s.name for s in (schedule.stages if schedule else ())), *(r.stage for r in inventory.snapshots)]
    )
    if name in stages:
        hint = f"its newest snapshot is `{own[-1].name}`" if own else "`stagerun run DIR` trains it"
        return UsageError(f"stage `{name}` has not ended in {out}", hint)
    if not inventory.snapshots:
        return None
    known = [*ensembles, *stages, *(ref.name for ref in inventory.snapshots)]
    hint = nearest(name, known) or f"`stagerun status {out} --snapshots` lists the snapshots"
    return UsageError(f"no snapshot, ensemble or stage of {out} is named `{name}`", hint)


def _not_a_stage(ensemble: Ensemble, out: Path) -> UsageError:
    """What there is of an ensemble that was taken for a stage or a snapshot."""
    name = ensemble.name
    if ensemble.averages:
        hint = f"`stagerun eval {name} --out {out}` evaluates its network, which `stagerun run` makes"
        return UsageError(f"`{name}` is an ensemble, not a stage", hint)
    hint = f"its members have networks: {listing(ensemble.members, 'and')}"
    if ensemble.rule is EnsembleRule.MEAN_PROBABILITY:
        hint += f"; `stagerun predict {name} --out {out}` asks them all"
    return UsageError(f"`{name}` is an ensemble ({ensemble.rule.value}), which has no network of its own", hint)


def _ensembles_of(schedule: Schedule | None, out: Path) -> dict[str, Ensemble]:
    """By name: the schedule's, or without one those of the newest snapshot's."""
    found = schedule if schedule is not None else newest_recipe(out, store.inventory(DISK, out))
    return {one.name: one for one in found.ensembles} if found is not None else {}
