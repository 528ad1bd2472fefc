"""Being one worker of a job, and starting several on this machine: what `run`, `rehearse` and others have in common."""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from stagerun.base.errors import Diverged, ExitCode, PeerError, StagerunError, StorageError
from stagerun.base.text import count, to_nowhere
from stagerun.command.ending import bug_report, of_surroundings, show, tell
from stagerun.launch import (
    StopRequest,
    bound_note,
    die_with_launcher,
    go_there,
    meet,
    place_note,
    report,
    run_workers,
)
from stagerun.launch.watch.worker import Monitored, monitored
from stagerun.launch.workers import Job, Orders
from stagerun.system.host import open_files
from stagerun.system.pulse import Limits
from stagerun.system.world import World, default_threads, from_environment, give_threads, rank_said, torchrun_note


def start(job: Job, orders: Orders, nproc: int) -> int:
    """Runs `nproc` workers on this machine, or `job` here if one is enough; the exit code."""
    give_threads(orders.threads)
    threads = orders.threads or default_threads(nproc)
    if nproc == 1:
        os.environ["OMP_NUM_THREADS"] = str(threads)
        return work(job, orders)
    _require_files(nproc)
    code, text = run_workers(orders.command, nproc, threads, orders.grace, orders.stopped, orders.saves)
    tell(text)
    return code


def _require_files(nproc: int) -> None:
    """StorageError where the launcher, which has pipes from each worker, would wait for workers that can't open theirs."""
    files, needed = open_files(), 48 + 8 * nproc
    if files < needed:
        raise StorageError(
            f"{count(nproc, 'worker')} and their launcher need {needed} open files each, and a process may have {files} here",
            "raise that limit (ulimit -n 1024) and run the same command again",
        )


def say(text: str) -> None:
    """Prints. Where no one reads any more (`stagerun run ... | head`), training goes on all the same."""
    try:
        show(text)
    except OSError:
        to_nowhere(sys.stdout)


def work(job: Job, orders: Orders) -> int:
    """One worker, whoever started it. Reports to a launcher of ours how it ended, or else to the terminal."""
    # Without anything to save, no one waits.
    stop = StopRequest("to save", grace=orders.grace) if orders.saves else StopRequest("which leaves nothing")
    rank, world = rank_said(), World()
    try:
        stop.install(orders.stopped)
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


@contextmanager
def watched(world: World, limits: Limits | None) -> Iterator[Monitored | None]:
    """Within it this worker has a monitor, which says first who is gone where a PeerError follows from it; none without `limits`. Before
    torch is imported, which may take long."""
    with monitored(world, limits, lambda text: tell(f"rank {world.rank}: {text}" if world.rank else text)) as watch:
        try:
            yield watch
        except PeerError as error:
            if watch is not None:
                watch.explain(error)
            raise


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
        with suppress(OSError):  # nobody reads any more
            stream.flush()
    os._exit(code)
