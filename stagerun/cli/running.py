"""`stagerun run`: what can go wrong is found here, in the first second and without torch; then workers are started, or
this process is one."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from stagerun import store
from stagerun.cli.options import output_folder
from stagerun.cli.workers import Job, check_workers, devices, join, joined, load_everywhere, say, start, work
from stagerun.errors import ExitCode
from stagerun.events import Stopped
from stagerun.launch import StopRequest
from stagerun.plan import Plan, make_plan, require_fresh
from stagerun.plan.render import render_text
from stagerun.recipe import Schedule
from stagerun.report import Console, JsonLines, results_table
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

    def arguments(self) -> list[str]:
        """The command line of a worker."""
        words = ["run", self.folder]
        for option, values in (("--set", self.overrides), ("--redo", self.redo), ("--keep", self.keep)):
            words += [word for value in values for word in (option, value)]
        if self.out is not None:
            words += ["--out", self.out]
        return words


def run_command(options: RunOptions) -> int:
    """The exit code."""
    return work(_job(options)) if joined(options.nproc) else _start(options)


def _job(options: RunOptions) -> Job:
    return lambda world, stop: _train(options, world, stop)


# -- the process that a person started


def _start(options: RunOptions) -> int:
    schedule = load(options.folder, options.overrides)
    out = output_folder(schedule.name, options.out)
    plan = _look(schedule, out, options)
    if plan.next is None and not results.unfinished(plan, out):
        say("nothing to do: every stage is done")
        say(_table(plan, out))
        return ExitCode.DONE
    nproc = options.nproc or devices()
    check_workers(schedule, nproc)
    from stagerun.runner.images import preflight

    preflight(schedule)
    say(render_text(plan) + "\n")
    return start(options.arguments(), nproc, options.threads, _job(options))


def _look(schedule: Schedule, out: Path, options: RunOptions) -> Plan:
    """The plan, and the proof that the folder can be written and nobody else holds it."""
    disk = store.LocalDisk()
    store.prepare(disk, out)
    with store.Lock(out):
        plan = make_plan(schedule, store.inventory(disk, out), options.redo, options.keep)
    require_fresh(plan)
    for name in options.redo:
        if not next(s for s in plan.stages if s.stage.name == name).again:
            say(f"note: stage `{name}` is not stale, so --redo has nothing to do there")
    return plan


def _table(plan: Plan, out: Path) -> str:
    return results_table(results.results(plan, out), {s.stage.name: s.stage.parent for s in plan.stages})


# -- a worker


def _train(options: RunOptions, world: World, stop: StopRequest) -> int:
    from stagerun.runner.keeper import Keeper
    from stagerun.runner.together import rank0
    from stagerun.runner.walk import run

    device, comm = join(world, options.threads)
    schedule = load_everywhere(options.folder, options.overrides, comm)
    out = output_folder(schedule.name, options.out)
    keeper = Keeper(schedule, out, options.redo, options.keep) if comm.rank == 0 else None
    with ExitStack() as stack:
        sinks: list[Console | JsonLines] = []

        def open_folder() -> None:
            assert keeper is not None
            stack.callback(keeper.close)
            keeper.open()
            before = results.results(keeper.plan(), out)
            parents = {stage.name: stage.parent for stage in schedule.stages}
            display = {stage.name: stage.solver.display for stage in schedule.stages}
            console = stack.enter_context(Console(display, parents, before))
            sinks.append(console)
            sinks.append(stack.enter_context(JsonLines(out / "log.jsonl", console.say)))

        rank0(comm, open_folder)
        last = None
        for event in run(schedule, str(out), comm, world, device, keeper, stop):
            for sink in sinks:
                sink(event)
            last = event
    comm.close()
    return ExitCode.SAVED if isinstance(last, Stopped) else ExitCode.DONE
