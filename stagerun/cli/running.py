"""`stagerun run`: what can go wrong is found here, in the first second and without torch; then workers are started, or
this process is one."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from stagerun import store
from stagerun.cli.logs import LOGS, SCREENS, Opened, Sink, in_format, parents, require_evaluation, require_packages
from stagerun.cli.options import output_folder
from stagerun.cli.workers import Job, check_workers, devices, join, joined, load_everywhere, say, start, work
from stagerun.errors import ExitCode, StagerunError
from stagerun.events import Event, Failed, RunFinished, Stopped
from stagerun.launch import StopRequest
from stagerun.plan import Plan, State, make_plan, require_fresh
from stagerun.plan.ensembles import ensembles_text
from stagerun.plan.render import render_text
from stagerun.recipe import Schedule
from stagerun.report.console import finished_line
from stagerun.report.jsonl import JsonLines
from stagerun.report.table import ensembles_table, results_table
from stagerun.runner import results
from stagerun.spec import load
from stagerun.world import World


@dataclass(frozen=True, slots=True)
class RunOptions:
    folder: str
    overrides: tuple[str, ...]
    out: str | None
    redo: tuple[str, ...]
    keep: tuple[str, ...]
    nproc: int | None
    threads: int | None
    log_format: str = "text"
    log: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    until: str | None = None

    def arguments(self) -> list[str]:
        """The command line of a worker."""
        words = ["run", self.folder, "--log-format", self.log_format]
        repeated = (
            ("--set", self.overrides),
            ("--redo", self.redo),
            ("--keep", self.keep),
            ("--only", self.only),
            ("--log", self.log),
        )
        for option, values in repeated:
            words += [word for value in values for word in (option, value)]
        if self.until is not None:
            words += ["--until", self.until]
        if self.out is not None:
            words += ["--out", self.out]
        return words


def run_command(options: RunOptions) -> int:
    """The exit code."""
    require_packages(options.log)
    return work(_job(options)) if joined(options.nproc) else _start(options)


def _job(options: RunOptions) -> Job:
    return lambda world, stop: _train(options, world, stop)


# -- the process that a person started


def _start(options: RunOptions) -> int:
    schedule = load(options.folder, options.overrides)
    require_evaluation(options.log, schedule)
    out = output_folder(schedule.name, options.out)
    plan = _look(schedule, out, options)
    if plan.next is None and not results.unfinished(plan, out) and not results.ready_ensembles(plan, out):
        say(in_format(options.log_format, finished_line(_nothing(plan))))
        say(in_format(options.log_format, _table(plan, out)))
        return ExitCode.DONE
    nproc = options.nproc or devices()
    check_workers(schedule, nproc)
    from stagerun.runner.images import preflight

    preflight(schedule)
    together = ensembles_text(results.planned_ensembles(plan, out))
    say(in_format(options.log_format, render_text(plan, beside=[together]) + "\n"))
    return start(options.arguments(), nproc, options.threads, _job(options))


def _look(schedule: Schedule, out: Path, options: RunOptions) -> Plan:
    """The plan, and the proof that the folder can be written and nobody else holds it."""
    disk = store.LocalDisk()
    store.prepare(disk, out)
    with store.Lock(out):
        plan = make_plan(schedule, store.inventory(disk, out), options.redo, options.keep, options.only, options.until)
    require_fresh(plan)
    for name in options.redo:
        these = [s for s in plan.stages if name in (s.stage.name, s.stage.group)]
        if not any(s.again or any(s.stage.name in lost.named for lost in plan.lost) for s in these):
            text = f"note: stage `{name}` is not stale, so --redo has nothing to do there"
            say(in_format(options.log_format, text))
    return plan


def _nothing(plan: Plan) -> RunFinished:
    """What a run that finds nothing to do would tell."""
    left = tuple(s.stage.name for s in plan.left_out if s.state is State.NOT_CHOSEN)
    return RunFinished(trained=False, seconds=0.0, not_chosen=left)


def _table(plan: Plan, out: Path) -> str:
    stages = results_table(results.results(plan, out), parents(plan))
    together = ensembles_table(results.ensembles(plan, out))
    return f"{stages}\n\n{together}" if together else stages


# -- a worker


def _train(options: RunOptions, world: World, stop: StopRequest) -> int:
    from stagerun.runner.keeper import Keeper
    from stagerun.runner.together import rank0
    from stagerun.runner.walk import run

    device, comm = join(world, options.threads)
    schedule = load_everywhere(options.folder, options.overrides, comm)
    out = output_folder(schedule.name, options.out)
    keeper = None
    if comm.rank == 0:
        keeper = Keeper(schedule, out, options.redo, options.keep, options.only, options.until)
    with ExitStack() as stack:
        sinks: list[Sink] = []

        def open_folder() -> None:
            assert keeper is not None
            stack.callback(keeper.close)
            keeper.open()
            plan = keeper.plan()
            before = results.results(plan, out)
            screen = SCREENS[options.log_format](plan, before, results.ensembles(plan, out))
            sinks.append(stack.enter_context(screen))
            sinks.append(stack.enter_context(JsonLines(out / "log.jsonl", screen.say)))
            require_evaluation(options.log, schedule)
            opened = Opened(plan, out, before, screen.say)
            for name in dict.fromkeys(options.log):
                sinks.append(stack.enter_context(LOGS[name].make(opened)))

        rank0(comm, open_folder)
        last = None
        events = run(schedule, str(out), comm, world, device, keeper, stop)
        for event in told(events) if sinks else events:
            for sink in sinks:
                sink(event)
            last = event
    comm.close()
    return ExitCode.SAVED if isinstance(last, Stopped) else ExitCode.DONE


def told(events: Iterator[Event]) -> Iterator[Event]:
    """The events, and Failed before an error goes on its way: who looks in the morning finds it in the log."""
    try:
        yield from events
    except StagerunError as error:
        yield Failed(code=int(error.exit_code), text=error.render())
        raise
    except Exception as error:
        yield Failed(code=int(ExitCode.BUG), text=f"{type(error).__name__}: {error}")
        raise
