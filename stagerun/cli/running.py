"""`stagerun run`: what can go wrong is found here, in the first second and without torch; then workers are started, or
this process is one."""

import shlex
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from stagerun import signals, store
from stagerun.cli.ending import over_live_line, tell
from stagerun.cli.looking import DISK
from stagerun.cli.options import AUTO, CORES, NONE, limits, output_folder
from stagerun.cli.timing import find_hours
from stagerun.cli.workers import say, start, watched, work
from stagerun.data.fingerprint import with_sets
from stagerun.errors import ExitCode, UsageError
from stagerun.events import RunFinished
from stagerun.launch import GRACE_S, StopRequest
from stagerun.launch.workers import Job, Orders, Wish, check_workers, devices, joined
from stagerun.plan import Plan, State, make_plan, require_fresh
from stagerun.plan.ensembles import ensembles_text
from stagerun.plan.hours_text import render_hours
from stagerun.plan.render import going_on, render_text
from stagerun.pulse import Limits
from stagerun.recipe import Schedule
from stagerun.report.console import finished_line
from stagerun.report.table import ensembles_table, results_table
from stagerun.snapshots import Inventory
from stagerun.spec import load
from stagerun.train import results
from stagerun.train.keeper import Selection
from stagerun.train.logs import in_format, parents, require_evaluation, require_packages
from stagerun.train.results import require_progress, standing
from stagerun.world import World

if TYPE_CHECKING:
    from stagerun.cli.hosting import HostOptions


@dataclass(frozen=True, slots=True)
class RunOptions:
    folder: str
    overrides: tuple[str, ...] = ()
    out: str | None = None
    redo: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    nproc: int | None = None
    threads: int | None = None
    log_format: str = "text"
    log: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    until: str | None = None
    grace: float | None = None
    retry: bool = False
    exact: bool = False
    timeouts: tuple[str, ...] = ()
    bind: str = AUTO
    comm_cores: int | None = None
    profile: str | None = None
    profile_iterations: int | None = None

    @property
    def selection(self) -> Selection:
        return Selection(self.redo, self.keep, self.only, self.until)

    @property
    def wish(self) -> Wish:
        return Wish({AUTO: None, CORES: True, NONE: False}[self.bind], self.comm_cores, self.threads)

    @property
    def orders(self) -> Orders:
        return Orders(tuple(self.arguments()), self.threads, self.grace_s)

    def output(self, schedule: Schedule) -> Path:
        return output_folder(schedule.name, self.out)

    @property
    def grace_s(self) -> float:
        """Seconds from a signal to the end."""
        return GRACE_S if self.grace is None else self.grace

    def what(self) -> "RunOptions":
        """What is trained, and nothing about how."""
        return RunOptions(
            self.folder, self.overrides, self.out, only=self.only, until=self.until, redo=self.redo, keep=self.keep
        )

    def arguments(self) -> list[str]:
        """The command line of a worker."""
        given = {
            "--set": self.overrides,
            "--out": self.out,
            "--redo": self.redo,
            "--keep": self.keep,
            "--only": self.only,
            "--until": self.until,
            "--log-format": None if self.log_format == "text" else self.log_format,
            "--log": self.log,
            "--timeout": self.timeouts,
            "--grace": None if self.grace is None else f"{self.grace:f}s",  # no exponent
            "--profile": self.profile,
            "--profile-iterations": self.profile_iterations,
            "--bind": None if self.bind == AUTO else self.bind,
            "--comm-cores": self.comm_cores,
        }
        words = ["run", self.folder, *["--retry"] * self.retry, *["--require-bit-exact"] * self.exact]
        for option, value in given.items():
            for one in value if isinstance(value, tuple) else (value,):
                words += [] if one is None else [option, str(one)]
        return words


def run_command(options: RunOptions, hosts: "HostOptions | None" = None) -> int:
    """The exit code. `hosts`: what --hosts and the options beside it say."""
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


def _on_hosts(options: RunOptions, hosts: "HostOptions", watched: bool) -> int:
    # Only here: it compares what data hosts see, and so loads numpy, whose threads others start with signals held.
    from stagerun.cli.hosting import Task, on_hosts

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
    words = ["stagerun", "plan", *options.what().arguments()[1:]]
    text += f", {left}" if left.startswith("about") else ""
    return f"{text}\n`{shlex.join(words)}` shows the full plan"


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
