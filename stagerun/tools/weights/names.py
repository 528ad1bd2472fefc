"""What a name means in an output folder where no snapshot has it: a stage, an ensemble, or a slip of the pen. No torch."""

from pathlib import Path

from stagerun import store
from stagerun.base.errors import UsageError, nearest
from stagerun.base.recipe import Ensemble, Schedule
from stagerun.store.layout import averages_folder, snapshots_folder
from stagerun.train.output import DISK, newest_recipe
from stagerun.train.results import ensemble_path, read_ensemble


def not_a_snapshot(name: str, out: Path, evaluated: bool) -> UsageError | None:
    """What to type in place of a name; None where nothing is known of the folder. `evaluated`: for `eval`, which takes a stage."""
    inventory = store.inventory(DISK, out)
    schedule = newest_recipe(out, inventory)
    ensembles = ensembles_of(schedule, out)
    if name in ensembles:
        return of_ensemble(ensembles[name], out)
    stages = dict.fromkeys(
        [*(s.name for s in (schedule.stages if schedule else ())), *(r.stage for r in inventory.snapshots)]
    )
    if name not in stages:
        if not inventory.snapshots:
            return None
        known = [*ensembles, *stages, *(ref.name for ref in inventory.snapshots)]
        hint = nearest(name, known) or f"`stagerun snapshots {out}` lists the snapshots"
        return UsageError(f"no snapshot, ensemble or stage of {out} is named `{name}`", hint)
    own = inventory.of(name)
    if not own:
        return UsageError(f"`{name}` is a stage, which has no snapshot in {out} yet", "`stagerun run DIR` trains it")
    end = next((ref for ref in reversed(own) if ref.ends_stage), None)
    hint = f"its newest snapshot is `{own[-1].name}`" if end is None else f"the snapshot of its end is `{end.name}`"
    if evaluated and end is not None:
        hint = f"`stagerun eval {out} --stage {name}`, or `stagerun eval DIR --stage {name}` with the schedule's folder; {hint}"
    return UsageError(f"`{name}` is a stage, not a snapshot", hint)


def of_ensemble(ensemble: Ensemble, out: Path) -> UsageError:
    """What there is of an ensemble that was taken for a stage or a snapshot."""
    name, found = ensemble.name, read_ensemble(out, ensemble.name)
    if not ensemble.rule.averages:
        hint = "`stagerun run` evaluates it when its members are trained"
        if found is not None:
            top1 = f"top-1 {100 * found.top1:.2f} %, "
            hint = f"`run` has evaluated it: {top1}in {ensemble_path(out, name)}"
        return UsageError(f"`{name}` is an ensemble ({ensemble.rule.value}), which has no network of its own", hint)
    if store.inventory(DISK, averages_folder(out) / name).snapshots:
        return UsageError(
            f"`{name}` is an ensemble, not a stage", f"`stagerun eval {name} --out {out}` evaluates its network"
        )
    hint = "`stagerun run` makes it when its members are trained"
    return UsageError(
        f"`{name}` is an ensemble, whose network is not in {snapshots_folder(averages_folder(out) / name)}", hint
    )


def ensembles_of(schedule: Schedule | None, out: Path) -> dict[str, Ensemble]:
    """By name: the schedule's, or without one those of the newest snapshot's."""
    found = schedule if schedule is not None else newest_recipe(out, store.inventory(DISK, out))
    return {one.name: one for one in found.ensembles} if found is not None else {}
