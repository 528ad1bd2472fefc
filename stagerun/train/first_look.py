"""Checks of `run` before workers start: most mistakes are reported here, in the first second and without torch."""

from dataclasses import replace
from pathlib import Path

from stagerun import store
from stagerun.base.errors import ExitCode, Problems, RecipeError, StagerunError, UsageError
from stagerun.base.recipe import Schedule
from stagerun.base.wings import wing
from stagerun.data.weights import find, looked_at
from stagerun.language import require_folders
from stagerun.plan import Plan, make_plan, require_fresh
from stagerun.plan.choice import check_workers, choice
from stagerun.plan.planned import needed
from stagerun.system import signals
from stagerun.train import results
from stagerun.train.first_words import say_done, say_idle_redo, say_plan
from stagerun.train.keeper import Selection
from stagerun.train.options import RunOptions

DISK = store.LocalDisk()
# Larger snapshots are looked at by the worker alone, which knows how large the network makes them: a forged one may claim any size.
_LOOKED_AT_BYTES = 16 * 10**9


def look_first(options: RunOptions, schedule: Schedule, size: int) -> ExitCode | None:
    """Check, and print the plan, where rank 0 will be, before `size` workers are started. Return the exit code if nothing remains;
    raise on mistakes."""
    out = options.output(schedule)
    schedule = looked_at(schedule, out)
    if options.replay is not None:
        recorded = wing("wire.replay.recorded")
        if recorded is None:
            raise UsageError(
                "--replay: this installation lacks stagerun/wire, which replays", "install all of stagerun"
            )
        recorded(Path(options.replay), schedule, out)
    require_folders(schedule)
    plan, inventory = whole_plan(schedule, out, options.selection)
    say_idle_redo(plan, options)
    if results.nothing_to_do(plan, out):
        say_done(plan, out, options)
        return ExitCode.DONE
    if not options.retry:
        results.require_progress(DISK, out, results.standing(DISK, out, schedule, inventory))
    check_workers(schedule, size)
    require_weights(plan)
    with signals.held():
        from stagerun.data.loaders import preflight

    preflight(schedule)
    say_plan(plan, out, options)
    return None


def require_weights(plan: Plan) -> None:
    """Raise RecipeError for each stage to be trained whose weights file is missing; its content is checked when training starts."""
    problems = Problems(plan.schedule.files)
    for one in plan.work:
        if (weights := needed(one)) is not None:
            try:
                find(weights)
            except StagerunError as error:
                span = one.stage.written(one.stage.solver.start_field)
                problems.add(span or one.stage.span, error.message, error.hint)
    if problems:
        raise RecipeError(problems.all())


def whole_plan(schedule: Schedule, out: Path, selection: Selection) -> tuple[Plan, store.Inventory]:
    """Return the plan of a run before it holds its folder, and its snapshots, without those that read back differently. The folder is
    writable then, and not locked; the worker waits for a run on another host, of which only a lease is visible."""
    choice(schedule, *selection)  # a mistake in a name comes before a folder that is held
    store.prepare(DISK, out)
    with store.Lock(out):
        inventory = store.inventory(DISK, out)
        plan = make_plan(schedule, inventory, *selection)
        while harmed := [
            ref
            for ref in results.relied_on(plan)
            if ref.bytes <= _LOOKED_AT_BYTES and store.is_harmed(DISK, out, ref.name)
        ]:
            whole = tuple(ref for ref in inventory.snapshots if ref not in harmed)
            inventory = replace(inventory, snapshots=whole, damaged=(*inventory.damaged, *(ref.name for ref in harmed)))
            plan = make_plan(schedule, inventory, *selection)
    require_fresh(plan)
    return plan, inventory
