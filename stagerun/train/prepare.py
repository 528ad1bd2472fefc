"""`stagerun run`: what can go wrong is found here, in the first second and without torch; then workers are started, or
this process is one."""

import os
import shlex
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from stagerun import store
from stagerun.base.errors import ExitCode, UsageError
from stagerun.base.events import RunFinished
from stagerun.base.recipe import Schedule
from stagerun.base.snapshots import Inventory
from stagerun.base.text import duration
from stagerun.command.ending import over_live_line, tell
from stagerun.command.options import arguments
from stagerun.command.shared import CORES, limits
from stagerun.language import load
from stagerun.launch import StopRequest
from stagerun.launch.options import HostOptions
from stagerun.launch.work import say, start, watched, work
from stagerun.launch.workers import Job, check_workers, devices, joined
from stagerun.plan import Plan, State, make_plan, require_fresh
from stagerun.plan.ensembles import ensembles_text
from stagerun.plan.hours import render_hours
from stagerun.plan.render import going_on, render_text
from stagerun.system import signals
from stagerun.system.lmdb_file import with_sets
from stagerun.system.pulse import Limits
from stagerun.system.world import World, rank_said
from stagerun.train import results
from stagerun.train.command import RunOptions
from stagerun.train.hours import find_hours
from stagerun.train.logs.results import ensembles_table, finished_line, results_table
from stagerun.train.logs.table import in_format, parents, require_evaluation, require_packages
from stagerun.train.output import DISK
from stagerun.train.results import require_progress, standing

PROFILED = 10  # iterations of --profile


def run_command(options: RunOptions, hosts: HostOptions | None = None) -> int:
    """The exit code. `hosts`: what --hosts and the options beside it say."""
    with stopped_after(options.stop_after):
        return _run(options, hosts)


@contextmanager
def stopped_after(seconds: float | None) -> Iterator[None]:
    """Within it this process gets a stop signal from itself after that time; None: never.

    The process is the one that the user called, so a launcher hands the signal on as it does any other. Of the workers that another
    program started, rank 0 alone has a clock, and the others follow it as they follow a signal that reached one of them.
    """
    if seconds is None or rank_said() != 0:
        yield
        return

    def strike() -> None:
        numbers = [
            number for number in signals.stop_signals() if number != signal.SIGINT
        ]  # a second one would end it at once
        if numbers:  # none once all is done
            signals.say(f"--stop-after {duration(seconds)}: the time is up")
            os.kill(os.getpid(), signal.SIGTERM if signal.SIGTERM in numbers else numbers[0])

    clock = threading.Timer(seconds, strike)
    clock.daemon = True
    with signals.held():  # so that the thread which sends the signal is not the one that gets it
        clock.start()
    try:
        yield
    finally:
        clock.cancel()


def _run(options: RunOptions, hosts: HostOptions | None) -> int:
    over_live_line()
    require_packages(options.log)
    times = limits(options.timeouts)
    if options.profile is None and options.profile_iterations is not None:
        raise UsageError("--profile-iterations without --profile", "`--profile FILE` says where to write them")
    if options.comm_cores is not None and options.bind != CORES:
        hint = "it says how many cores of a worker are set apart"
        raise UsageError(f"--comm-cores {options.comm_cores} without --bind cores", hint)
    store.planned_fault()  # a mistake in it is reported before anything is started
    if hosts is not None:
        return _on_hosts(options, hosts, watched=times is not None)
    job = job_of(options, times)
    return work(job, options.orders) if joined(options.nproc) else _start(job, options)


@dataclass(frozen=True, slots=True)
class Cut:
    """What makes a run short, to try something: what becomes of the schedule in the files, and batches of the evaluation after a
    stage."""

    schedule: Callable[[Schedule], Schedule]
    final_test_iter: int


def job_of(options: RunOptions, times: Limits | None, cut: Cut | None = None) -> Job:
    """What a worker of the run does. `times`: how long it may stay in a section; None: it has no monitor."""

    def job(world: World, stop: StopRequest) -> int:
        with watched(world, times) as watch:
            from stagerun.train.run import train

            return train(options, world, stop, watch, tell, cut)

    return job


def _start(job: Job, options: RunOptions) -> int:
    schedule = load(options.folder, options.overrides)
    nproc = options.nproc or devices(schedule)
    done = look_first(options, schedule, nproc)
    return done if done is not None else start(job, options.orders, nproc)


def _on_hosts(options: RunOptions, hosts: HostOptions, watched: bool) -> int:
    # Only here: it compares what data hosts see, and so loads numpy, whose threads others start with signals held.
    from stagerun.launch.hosts import Task, on_hosts

    schedule = load(options.folder, options.overrides)
    require_evaluation(options.log, schedule)
    bundle, folder = hosts.bundle(options.folder)
    options = replace(options, folder=folder)
    task = Task(
        replace(options.orders, watched=watched),
        {"folder": folder, "overrides": options.overrides, "out": options.out},
        lambda size: check_workers(schedule, size),
        {"options": asdict(options)},
        bundle,
        again=() if options.retry else ("--retry",),
    )
    return on_hosts(task, hosts)


def look_first(options: RunOptions, schedule: Schedule, size: int) -> ExitCode | None:
    """What `run` finds and prints where rank 0 will be, before `size` workers are started; the exit code where there is nothing to do.
    What is wrong is raised."""
    require_evaluation(options.log, schedule)
    out = options.output(schedule)
    schedule = with_sets(schedule)
    plan, found = look(schedule, out, options)
    _report_idle_redo(plan, options)
    if results.nothing_to_do(plan, out):
        left = tuple(s.stage.name for s in plan.left_out if s.state is State.NOT_CHOSEN)
        finished = RunFinished(trained=False, seconds=0.0, not_chosen=left)
        say(in_format(options.log_format, finished_line(finished)))
        say(in_format(options.log_format, _table(plan, out)))
        return ExitCode.DONE
    if not options.retry:
        require_progress(DISK, out, standing(DISK, out, schedule, found))
    check_workers(schedule, size)
    with signals.held():
        from stagerun.train.images import preflight

    preflight(schedule)
    together = ensembles_text(results.planned_ensembles(plan, out))
    text = _shortly(plan, out, options) or render_text(plan, beside=[together])
    say(in_format(options.log_format, text + "\n"))
    return None


def _shortly(plan: Plan, out: Path, options: RunOptions) -> str:
    """Of a run that goes on; '' of one that starts."""
    if not (text := going_on(plan)):
        return ""
    hours = find_hours(plan, out, None)
    left = render_hours(plan, hours).partition("\n")[0] if hours else ""
    same = arguments(options, "folder", "overrides", "out", "redo", "keep", "only", "until")
    text += f", {left}" if left.startswith("about") else ""
    return f"{text}\n`{shlex.join(['stagerun', 'plan', *same])}` shows the full plan"


def look(schedule: Schedule, out: Path, options: RunOptions) -> tuple[Plan, Inventory]:
    """The plan, and the proof that the folder can be written and that no lock says it is held. A run on another host, of which only
    a lease is seen, is waited for by the worker."""
    store.prepare(DISK, out)
    with store.Lock(out, optional=True):
        found = store.inventory(DISK, out)
        plan = make_plan(schedule, found, *options.selection)
    require_fresh(plan)
    return plan, found


def _report_idle_redo(plan: Plan, options: RunOptions) -> None:
    for name in options.redo:
        these = [s for s in plan.stages if name in (s.stage.name, s.stage.group)]
        if not any(s.again or any(s.stage.name in lost.named for lost in plan.lost) for s in these):
            text = f"note: stage `{name}` is not stale, so --redo has nothing to do there"
            say(in_format(options.log_format, text))


def _table(plan: Plan, out: Path) -> str:
    stages = results_table(results.results(plan, out), parents(plan))
    together = ensembles_table(results.ensembles(plan, out))
    return f"{stages}\n\n{together}" if together else stages
