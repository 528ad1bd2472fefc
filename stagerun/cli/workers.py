"""Being one worker of a job, and starting several on this machine: what `run` and `rehearse` have in common."""

import os
import resource
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

from stagerun import signals
from stagerun.cli.ending import bug_report, of_surroundings, show, tell
from stagerun.errors import Diverged, ExitCode, Problem, RecipeError, StagerunError, StorageError, UsageError, listing
from stagerun.launch import (
    GRACE_S,
    StopRequest,
    bound_note,
    die_with_launcher,
    go_there,
    meet,
    place_note,
    report,
    run_workers,
)
from stagerun.pulse import Section
from stagerun.recipe import Schedule, Stage
from stagerun.spec import load
from stagerun.text import count, to_nowhere
from stagerun.topology import default_workers, read
from stagerun.watch.worker import Monitored
from stagerun.world import (
    World,
    default_threads,
    from_environment,
    give_threads,
    launched,
    rank_said,
    started_by,
    torchrun_note,
)

if TYPE_CHECKING:
    import torch

    from stagerun.comm import Comm

_ITERATION = "after this iteration"
# When a worker stops that is in a section.
_STOPS = {
    Section.START: "before training goes on",
    Section.COPY: "after this piece of the copy",
    Section.FIRST_ITERATION: _ITERATION,
    Section.ITERATION: _ITERATION,
    Section.EVALUATION: "after this batch of the evaluation",
    Section.SAVE: "after what is being written",  # a snapshot, the log
}

# What a worker does: its exit code.
Job = Callable[[World, StopRequest], int]


def joined(nproc: int | None) -> bool:
    """Whether a launcher started this process as one of several. UsageError if --nproc says otherwise."""
    if launched() and nproc is not None:
        raise UsageError(
            f"--nproc, but a launcher has started this process as one of several ({started_by()})",
            "leave --nproc out: the launcher says how many workers there are",
        )
    return launched()


def start(
    arguments: Sequence[str],
    nproc: int,
    threads: int | None,
    job: Job,
    stopping: str = "to save",
    grace: float | None = GRACE_S,
    stopped: int = ExitCode.SAVED,
) -> int:
    """Runs `nproc` workers of `stagerun ARGUMENTS...` on this machine, or `job` here if one is enough; the exit code. The rest as of
    `work`."""
    give_threads(threads)
    threads = threads or default_threads(nproc)
    if nproc == 1:
        os.environ["OMP_NUM_THREADS"] = str(threads)
        return work(job, stopping, grace, stopped)
    _require_files(nproc)
    # What nobody waits for has nothing to save.
    code, text = run_workers(arguments, nproc, threads, GRACE_S if grace is None else grace, stopped, grace is not None)
    tell(text)
    return code


def _require_files(nproc: int) -> None:
    """StorageError where the launcher, which has pipes from each worker, would wait for workers that can't open theirs."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 48 + 8 * nproc
    if files != resource.RLIM_INFINITY and files < needed:
        raise StorageError(
            f"{count(nproc, 'worker')} and their launcher need {needed} open files each, and a process may have {files} here",
            "raise that limit (ulimit -n 1024) and run the same command again",
        )


def say(text: str) -> None:
    """Where nobody reads any more (`stagerun run ... | head`) it says nothing, and training goes on all the same."""
    try:
        show(text)
    except OSError:
        to_nowhere(sys.stdout)


def devices(schedule: Schedule | None = None) -> int:
    """One worker per GPU that torch can use here; where there is none, one per NUMA node, as far as the batch of `schedule` has device
    batches for them. Nvidia's driver and the environment tell where there is at most
    one, which spares importing torch; batch systems name GPUs for a torch that was built without them, too.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        listed = len(os.listdir("/proc/driver/nvidia/gpus"))
    except OSError:
        listed = 0
    named = listed if visible is None else len([n for n in visible.split(",") if n.strip() not in ("", "-1")])
    found = named
    if named > 1:
        with signals.held():
            import torch

            found = torch.cuda.device_count()
    stages = schedule.stages if schedule is not None else ()
    most = min((stage.solver.logical_workers for stage in stages if stage.enabled), default=None)
    return found or default_workers(replace(read(), gpus=()), most)


def check_workers(schedule: Schedule, nproc: int) -> None:
    """RecipeError with a mistake for each division of a batch into fewer device batches, at the first stage that has it."""
    small: dict[tuple[int, int], list[Stage]] = {}
    for stage in schedule.stages:
        if stage.enabled and nproc > stage.solver.logical_workers:
            small.setdefault((stage.solver.batch_size, stage.solver.device_batch_size), []).append(stage)
    problems = []
    for (batch, device_batch), stages in small.items():
        most = stages[0].solver.logical_workers
        origin = stages[0].origins.get("solver.device_batch_size") or stages[0].origins.get("solver.batch_size")
        span = origin.span if origin and origin.span else stages[0].span
        names = listing([s.name for s in stages], "and")
        problems.append(
            Problem(
                f"{nproc} workers are too many for stage{'s' * (len(stages) > 1)} {names}: batch_size {batch} "
                f"holds {most} device batch{'es' * (most > 1)} of {device_batch}",
                span,
                hint=f"use at most {count(most, 'worker')}, or a smaller device_batch_size",
            )
        )
    if problems:
        raise RecipeError(problems)


def work(job: Job, stopping: str = "to save", grace: float | None = GRACE_S, stopped: int = ExitCode.SAVED) -> int:
    """One worker, whoever started it. Tells a launcher of ours how it ended, or else the terminal. `stopping`: what a signal
    is said to lead to, within `grace` seconds (None: nobody waits for it). `stopped`: the exit code of a signal before anything is begun."""
    stop = StopRequest(stopping, grace=grace)
    rank, world = rank_said(), World()
    try:
        stop.install(stopped)
        die_with_launcher()
        world = from_environment()
        rank = world.rank
        tell(place_note(world))
        go_there(meet(world))
        if rank == 0 and world.size > 1:
            tell(bound_note(world.local_size, world.launcher))
            tell(torchrun_note())
        code, text = job(world, stop), ""
    except Diverged as error:  # the ranks agree on the loss, so all raise it, and one says so
        code, text = int(error.exit_code), "" if rank else error.render()
    except StagerunError as error:
        code, text = int(error.exit_code), error.render()
    except Exception as error:
        known = of_surroundings(error)
        code, text = (int(known.exit_code), known.render()) if known else (int(ExitCode.BUG), bug_report(error))
    stop.settle(code)  # what comes now is too late to change how this ended
    if not report(rank, code, text) and text:
        tell(f"rank {rank}: {text}" if rank else text)  # rank 0 speaks for all
    if world.size > 1:
        _leave(code)
    return code


def _leave(code: int) -> NoReturn:
    """Ends one worker of several without taking the interpreter down. A snapshot under way is finished.

    After an error the process group is still open: threads of it may be waiting for peers that are gone or have another
    error, and tearing it down would wait for them. But gloo's threads outlive a group that was destroyed, too; one that wants
    the interpreter while it is being taken down aborts the process (SIGABRT), after all was said and done. Threads of others don't
    end by themselves: those that torch.compile has started wait for more.
    """
    for thread in threading.enumerate():
        if thread.name == "snapshot":  # of `runner.snapshotter`
            thread.join()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # nobody reads any more
            stream.flush()
    os._exit(code)


def join(
    world: World, threads: int | None, stop: StopRequest, watch: Monitored | None = None, patient: bool = False
) -> tuple["torch.device", "Comm"]:
    """This worker's device and the others. With this the job has begun: whoever gets on asks `stop` from time to time. `watch`
    then knows the others, too. `patient`: time-outs are the monitors' affair, or the user wants none.

    UsageError with more workers than GPUs, PeerError if the others don't come.
    """
    import torch

    from stagerun.comm import PATIENT, TIMEOUT, SoloComm, TorchComm
    from stagerun.engine.device import choose_device

    torch.set_num_threads(threads or default_threads(world.local_size))
    device = choose_device(world)
    pulse = watch.pulse if watch is not None else None
    comm: Comm = SoloComm(pulse)
    if world.size > 1:
        with stop.watched():
            comm = TorchComm(world, device, pulse, PATIENT if patient else TIMEOUT)
            if watch is not None:
                watch.meet(comm)

    def when() -> str:
        text = _STOPS[comm.pulse.within]
        # An iteration that can't be finished in time is broken off.
        return f"in or {text}" if text == _ITERATION and stop.grace is not None else text

    stop.begin(when)
    return device, comm


def load_everywhere(folder: str, overrides: Sequence[str], comm: "Comm") -> Schedule:
    """The schedule as this rank reads it. Collective: where one rank's files have a mistake, no rank waits for it."""
    from stagerun.runner.agreement import require_same_code
    from stagerun.runner.together import everyone

    require_same_code(comm)
    loaded: list[Schedule] = []

    def read() -> None:
        schedule = load(folder, overrides)
        check_workers(schedule, comm.size)
        loaded.append(schedule)

    everyone(comm, read)
    return loaded[0]
