"""The start of a job's workers on this machine, and what one worker does around its job: what `run`, `rehearse` and others have in common."""

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from stagerun.base.errors import Diverged, ExitCode, StagerunError, UsageError
from stagerun.command.ending import bug_report, of_surroundings, tell
from stagerun.launch.local import Orders, run_workers
from stagerun.launch.meeting import go_there, meet
from stagerun.launch.stopping import StopRequest, die_with_launcher
from stagerun.launch.watch.worker import Monitored, monitored
from stagerun.system.world import World, default_threads, from_environment, launched, rank_said, started_by

# What a worker does: its exit code. Its monitor is None where the orders have no limits.
Job = Callable[[World, StopRequest, Monitored | None], int]
__all__ = ["Job", "Orders", "joined", "start", "work"]


def joined(nproc: int | None) -> bool:
    """Whether a launcher started this process as one of several. UsageError if --nproc says otherwise."""
    if launched() and nproc is not None:
        raise UsageError(
            f"--nproc, but a launcher has started this process as one of several ({started_by()})",
            "leave --nproc out: the launcher says how many workers there are",
        )
    return launched()


def start(job: Job, orders: Orders, nproc: int) -> int:
    """Runs `nproc` workers on this machine, or `job` here if one is enough; the exit code."""
    if nproc == 1:
        os.environ["OMP_NUM_THREADS"] = str(orders.threads or default_threads(1))
        return work(job, orders)
    code, text = run_workers(orders, nproc)
    tell(text)
    return code


def work(job: Job, orders: Orders) -> int:
    """One worker, whoever started it. Reports to a launcher of ours how it ended, or else to the terminal."""
    # Without anything to save, no one waits.
    stop = StopRequest("to save", grace=orders.grace) if orders.saves else StopRequest("which leaves nothing")
    rank, world = rank_said(), World()

    def say(text: str) -> None:
        tell(f"rank {rank}: {text}" if rank and text else text)  # rank 0 speaks for all

    try:
        stop.install(orders.stopped)
        die_with_launcher()
        world = from_environment()
        rank = world.rank
        if world.size > 1:
            go_there(meet(world))
        with monitored(world, orders.limits, say) as watch:  # before the job imports torch, which may take long
            code, text = job(world, stop, watch), ""
    except Diverged as error:  # the ranks agree on the loss, so all raise it, and one says so
        code, text = int(error.exit_code), "" if rank else error.render()
    except StagerunError as error:
        code, text = int(error.exit_code), error.render()
    except Exception as error:
        known = of_surroundings(error)
        code, text = (int(known.exit_code), known.render()) if known else (int(ExitCode.BUG), bug_report(error))
    if not stop.settle(code, text):
        say(text)
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
        if thread.name == "snapshot":  # of `train.snapshotter`
            thread.join()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # no one reads any more
            stream.flush()
    os._exit(code)
