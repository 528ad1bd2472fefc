"""What `run` finds and prints before workers start: most that can go wrong is found here, in the first second and without torch."""

import shlex
from dataclasses import replace
from pathlib import Path

from stagerun import store
from stagerun.base.errors import ExitCode, Problems, RecipeError, StagerunError
from stagerun.base.events import RunFinished
from stagerun.base.recipe import Schedule
from stagerun.base.snapshots import Inventory
from stagerun.command.ending import say
from stagerun.command.options import arguments
from stagerun.language import require_folders
from stagerun.launch.worker_count import check_workers
from stagerun.plan import Plan, State, make_plan, require_fresh
from stagerun.plan.ensembles import ensembles_text
from stagerun.plan.hours import render_hours
from stagerun.plan.plan import choice
from stagerun.plan.planned import needed
from stagerun.plan.render import going_on, render_text
from stagerun.store.given import find, looked_at
from stagerun.system import signals
from stagerun.train import results
from stagerun.train.hours import find_hours
from stagerun.train.logs.results import ensembles_table, finished_line, results_table
from stagerun.train.logs.table import Opened, all_logs
from stagerun.train.logs.trackers.follower import lacks
from stagerun.train.options import RunOptions
from stagerun.train.output import DISK
from stagerun.train.replay import recorded
from stagerun.train.results import require_progress, standing

# Larger snapshots are looked at by the worker alone, which knows how large the network makes them: who forges one may claim any size.
_LOOKED_AT_BYTES = 16 * 10**9


def look_first(options: RunOptions, schedule: Schedule, size: int) -> ExitCode | None:
    """What `run` finds and prints where rank 0 will be, before `size` workers are started; the exit code where there is nothing to do.
    What is wrong is raised."""
    out = options.output(schedule)
    schedule = looked_at(schedule, out)
    if options.replay is not None:
        recorded(Path(options.replay), schedule, out)
    require_folders(schedule)
    plan, found = look(schedule, out, options)
    _report_idle_redo(plan, options)
    if results.nothing_to_do(plan, out):
        left = tuple(s.stage.name for s in plan.left_out if s.state is State.NOT_CHOSEN)
        finished = RunFinished(trained=False, seconds=0.0, not_chosen=left)
        say(finished_line(finished))
        say(_table(plan, out))
        for name in dict.fromkeys(options.log):
            if all_logs()[name].tracker and lacks(out, name):
                with all_logs()[name].make(Opened(plan, out, say)):  # which sends the rest
                    pass
        return ExitCode.DONE
    if not options.retry:
        require_progress(DISK, out, standing(DISK, out, schedule, found))
    check_workers(schedule, size)
    require_weights(plan)
    with signals.held():
        from stagerun.data.preflight import preflight

    preflight(schedule)
    together = ensembles_text(results.planned_ensembles(plan, out))
    text = _shortly(plan, out, options) or render_text(plan, beside=[together])
    say(text + "\n")
    return None


def require_weights(plan: Plan) -> None:
    """RecipeError for each stage to be trained whose weights are not where it says; what is in them is looked at when training starts."""
    problems = Problems(plan.schedule.files)
    for one in plan.work:
        if (weights := needed(one)) is not None:
            try:
                find(weights)
            except StagerunError as error:
                place = one.stage.written(one.stage.solver.start_field)
                problems.add(place or one.stage.span, error.message, error.hint)
    if problems:
        raise RecipeError(problems.all())


def _shortly(plan: Plan, out: Path, options: RunOptions) -> str:
    """What is left of a run that goes on; '' for one that starts."""
    hours = find_hours(plan, out, None)
    left = render_hours(plan, hours).partition("\n")[0] if hours else ""
    if not (text := going_on(plan, left if left.startswith("about") else "")):
        return ""
    options = options if options.replay is None else replace(options, out=str(out))
    same = arguments(options, "folder", "overrides", "out", "redo", "only", "until")
    return f"{text}\n`{shlex.join(['stagerun', 'plan', *same])}` shows the full plan"


def look(schedule: Schedule, out: Path, options: RunOptions) -> tuple[Plan, Inventory]:
    """Return the plan, and what it was made of: snapshots that read back otherwise than they were written don't count, as for the workers. The
    folder can be written then, and no lock says that it is held. A run on another host, of which only a lease is seen, is waited for by
    the worker."""
    choice(schedule, *options.selection)  # a mistake in a name comes before a folder that is held
    store.prepare(DISK, out)
    with store.Lock(out, optional=True):
        found = store.inventory(DISK, out)
        plan = make_plan(schedule, found, *options.selection)
        while harmed := [
            ref
            for ref in results.relied_on(plan)
            if ref.bytes <= _LOOKED_AT_BYTES and store.is_harmed(DISK, out, ref.name)
        ]:
            whole = tuple(ref for ref in found.snapshots if ref not in harmed)
            found = replace(found, snapshots=whole, damaged=(*found.damaged, *(ref.name for ref in harmed)))
            plan = make_plan(schedule, found, *options.selection)
    require_fresh(plan)
    return plan, found


def _report_idle_redo(plan: Plan, options: RunOptions) -> None:
    for name in options.redo:
        these = [s for s in plan.stages if name in (s.stage.name, s.stage.group)]
        if not any(s.again or any(s.stage.name in lost.named for lost in plan.lost) for s in these):
            text = f"note: stage `{name}` is not stale, so --redo has nothing to do there"
            say(text)


def _table(plan: Plan, out: Path) -> str:
    ensembles = results.ensembles(plan, out)
    stages = results_table(results.results(plan, out), results.parents(plan, out), ensembles)
    together = ensembles_table(ensembles)
    return f"{stages}\n\n{together}" if together else stages
