"""`stagerun run`: what can go wrong is found here, in the first second and without torch; then workers are started, or
this process is one."""

import os
import sys
import threading
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from stagerun import store
from stagerun.cli.ending import bug_report
from stagerun.cli.options import output_folder
from stagerun.errors import Diverged, ExitCode, Problem, RecipeError, StagerunError, UsageError
from stagerun.events import Stopped
from stagerun.launch import StopRequest, die_with_launcher, report, run_workers
from stagerun.plan import Plan, make_plan, require_fresh
from stagerun.plan.render import render_text
from stagerun.recipe import Schedule
from stagerun.report import Console, JsonLines, print_nowhere, results_table
from stagerun.runner import results
from stagerun.spec import load
from stagerun.world import World, default_threads, from_environment, launched

if TYPE_CHECKING:
    from stagerun.comm import Comm


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
    if not launched():
        return _start(options)
    if options.nproc is not None:
        raise UsageError(
            "--nproc, but a launcher has started this process as one of several (RANK and WORLD_SIZE are set)",
            "leave --nproc out: the launcher says how many workers there are",
        )
    return _work(options)


# -- the process that a person started


def _start(options: RunOptions) -> int:
    schedule = load(options.folder, options.overrides)
    out = output_folder(schedule.name, options.out)
    plan = _look(schedule, out, options)
    if plan.next is None and not results.unfinished(plan, out):
        _say("nothing to do: every stage is done")
        _say(_table(plan, out))
        return ExitCode.DONE
    nproc = options.nproc or _devices()
    _check_workers(schedule, nproc)
    from stagerun.runner.images import preflight

    preflight(schedule)
    _say(render_text(plan) + "\n")
    threads = options.threads or default_threads(nproc)
    if nproc == 1:
        os.environ["OMP_NUM_THREADS"] = str(threads)
        return _work(options)
    code, text = run_workers(options.arguments(), nproc, threads)
    if text:
        click.echo(text, err=True)
    return code


def _say(text: str) -> None:
    """Where nobody reads any more (`stagerun run ... | head`) it says nothing, and training goes on all the same."""
    try:
        click.echo(text)
    except OSError:
        print_nowhere()


def _look(schedule: Schedule, out: Path, options: RunOptions) -> Plan:
    """The plan, and the proof that the folder can be written and nobody else holds it."""
    disk = store.LocalDisk()
    store.prepare(disk, out)
    with store.Lock(out):
        plan = make_plan(schedule, store.inventory(disk, out), options.redo, options.keep)
    require_fresh(plan)
    for name in options.redo:
        if not next(s for s in plan.stages if s.stage.name == name).again:
            _say(f"note: stage `{name}` is not stale, so --redo has nothing to do there")
    return plan


def _devices() -> int:
    """One worker per GPU that this process may use, or one. Nvidia's driver lists them, which spares importing torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return max(1, len([name for name in visible.split(",") if name.strip() not in ("", "-1")]))
    try:
        return max(1, len(os.listdir("/proc/driver/nvidia/gpus")))
    except OSError:
        return 1


def _check_workers(schedule: Schedule, nproc: int) -> None:
    problems = []
    for stage in schedule.stages:
        most = stage.solver.logical_workers
        if nproc > most:
            origin = stage.origins.get("solver.device_batch_size") or stage.origins.get("solver.batch_size")
            span = origin.span if origin and origin.span else stage.span
            problems.append(
                Problem(
                    f"{nproc} workers are too many for stage `{stage.name}`: batch_size {stage.solver.batch_size} holds "
                    f"{most} device batches of {stage.solver.device_batch_size}",
                    span,
                    hint=f"use at most {most} workers, or a smaller device_batch_size",
                )
            )
    if problems:
        raise RecipeError(problems)


def _table(plan: Plan, out: Path) -> str:
    return results_table(results.results(plan, out), {s.stage.name: s.stage.parent for s in plan.stages})


# -- a worker


def _work(options: RunOptions) -> int:
    """One worker, whoever started it. Tells a launcher of ours how it ended, or else the terminal."""
    stop = StopRequest()
    stop.install()
    world = World()
    try:
        die_with_launcher()
        world = from_environment()
        code = _train(options, world, stop)
        report(world.rank, code, "")
        return code
    except Diverged as error:  # the ranks agree on the loss, so all raise it, and one says so
        code, text = int(error.exit_code), "" if world.rank else error.render()
    except StagerunError as error:
        code, text = int(error.exit_code), error.render()
    except Exception as error:
        code, text = int(ExitCode.BUG), bug_report(error)
    if not report(world.rank, code, text) and text:
        click.echo(f"rank {world.rank}: {text}" if world.rank else text, err=True)  # rank 0 speaks for all
    if world.size > 1:
        _leave(code)
    return code


def _leave(code: int) -> NoReturn:
    """Ends one worker of several after an error, without taking the interpreter down.

    The process group is still open. Threads of it may be waiting for peers that are gone or have another error: tearing
    it down would wait for them, or abort (SIGABRT), and the exit code would be lost. A snapshot under way is finished.
    """
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # nobody reads any more
            stream.flush()
    os._exit(code)


def _train(options: RunOptions, world: World, stop: StopRequest) -> int:
    import torch

    from stagerun.comm import Comm, SoloComm, TorchComm
    from stagerun.engine.device import choose_device
    from stagerun.runner.keeper import Keeper
    from stagerun.runner.together import rank0
    from stagerun.runner.walk import run

    torch.set_num_threads(options.threads or default_threads(world.local_size))
    device = choose_device(world)
    comm: Comm = SoloComm() if world.size == 1 else TorchComm(world, device)
    schedule = _load_everywhere(options, comm)
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
    if isinstance(comm, TorchComm):
        comm.close()
    return ExitCode.SAVED if isinstance(last, Stopped) else ExitCode.DONE


def _load_everywhere(options: RunOptions, comm: "Comm") -> Schedule:
    """The schedule as this rank reads it. Collective: where one rank's files have a mistake, no rank waits for it."""
    from stagerun.runner.together import everyone

    loaded: list[Schedule] = []

    def read() -> None:
        schedule = load(options.folder, options.overrides)
        _check_workers(schedule, comm.size)
        loaded.append(schedule)

    everyone(comm, read)
    return loaded[0]
