"""Output of `run` before workers start: the plan, or the results if nothing remains."""

import shlex
from dataclasses import replace
from pathlib import Path

from stagerun.base.events import RunFinished
from stagerun.command.ending import say
from stagerun.command.options import arguments
from stagerun.logs.follower import lacks
from stagerun.logs.lines import ensembles_table, finished_line, results_table
from stagerun.logs.table import Opened, all_logs
from stagerun.plan import Plan, State
from stagerun.plan.ensembles import ensembles_text
from stagerun.plan.hours import render_hours
from stagerun.plan.render import render_text, resuming
from stagerun.train import results
from stagerun.train.hours import find_hours, left_together
from stagerun.train.options import RunOptions


def say_done(plan: Plan, out: Path, options: RunOptions) -> None:
    """Print that nothing remains, and the results; send a tracker the events that it missed."""
    left = tuple(s.stage.name for s in plan.stages if s.state is State.NOT_CHOSEN)
    say(finished_line(RunFinished(trained=False, seconds=0.0, not_chosen=left)))
    ensembles, few = results.ensembles(plan, out), plan.schedule.few_classes
    stages, together = (
        results_table(results.results(plan, out), results.parents(plan, out), ensembles, few=few),
        ensembles_table(ensembles, few),
    )
    say(f"{stages}\n\n{together}" if together else stages)
    for name in dict.fromkeys(options.log):
        if all_logs()[name].tracker and lacks(out, name):
            with all_logs()[name].make(Opened(plan, out, say)):  # which sends the rest
                pass


def say_plan(plan: Plan, out: Path, options: RunOptions) -> None:
    """Print the plan, or the rest of it for a run that resumes."""
    hours = find_hours(plan, out, None)
    left = render_hours(plan, hours, left_together(plan, hours, out)).partition("\n")[0] if hours else ""
    if text := resuming(plan, left if left.startswith("about") else ""):
        options = options if options.replay is None else replace(options, out=str(out))
        same = arguments(options, "folder", "overrides", "out", "redo", "only", "until")
        text = f"{text}\n`{shlex.join(['stagerun', 'plan', *same])}` shows the full plan"
    else:
        text = render_text(plan, extra=[ensembles_text(results.planned_ensembles(plan, out))])
    say(text + "\n")


def say_idle_redo(plan: Plan, options: RunOptions) -> None:
    """Print a note if --redo names a stage that isn't stale."""
    for name in options.redo:
        these = [s for s in plan.stages if name in (s.stage.name, s.stage.group)]
        if not any(s.again or any(s.stage.name in lost.named for lost in plan.lost) for s in these):
            text = f"note: stage `{name}` is not stale, so --redo has nothing to do there"
            say(text)
