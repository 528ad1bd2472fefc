"""`stagerun run` on the command line: this process is a worker, or starts them on this machine or on several hosts."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from stagerun.base.errors import UsageError
from stagerun.base.text import duration
from stagerun.command.ending import over_live_line
from stagerun.command.options import command
from stagerun.command.shared import limits
from stagerun.language import load
from stagerun.launch import StopRequest
from stagerun.launch.options import HostOptions, chosen_hosts
from stagerun.launch.start import Job, joined, start, work
from stagerun.launch.watch.worker import Monitored
from stagerun.launch.worker_count import devices
from stagerun.system import signals
from stagerun.system.world import World, default_threads, rank_said
from stagerun.train.first_look import look_first
from stagerun.train.logs.table import require_packages
from stagerun.train.options import Cut, RunOptions
from stagerun.train.parallel import refuse, train_side_by_side


@command(grouped=True)
def run(options: RunOptions, hosts: HostOptions) -> int:
    """Trains what is not yet done. The same command goes on after a kill, a crash or a full disk.

    On this machine it starts --nproc workers itself, on others (--hosts) over ssh. Under mpirun, mpiexec, srun, torchrun or any launcher
    that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, each process joins as one worker.
    """
    others = chosen_hosts(hosts)
    if options.parallel is not None:
        refuse(options, others is not None)
    with stopped_after(options.stop_after):
        over_live_line()
        _check(options)
        if others is not None:
            return _on_hosts(options, others)
        job = job_of(options)
        if joined(options.nproc):
            return work(job, options.orders)
        return _start(job, options)


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
        # A second SIGINT would end it at once.
        numbers = [number for number in signals.stop_signals() if number != signal.SIGINT]
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


def _check(options: RunOptions) -> None:
    """UsageError for options that don't go together, before anything is started."""
    require_packages(options.log)
    limits(options.timeouts)
    if options.replay is not None and options.redo:
        raise UsageError("--replay with --redo", "take another --out to replay once more")


def job_of(options: RunOptions, cut: Cut | None = None) -> Job:
    """What a worker of the run does."""

    def job(world: World, stop: StopRequest, watch: Monitored | None) -> int:
        from stagerun.train.run import train  # and with it torch

        return train(options, world, stop, watch, cut)

    return job


def _start(job: Job, options: RunOptions) -> int:
    schedule = load(options.folder, options.overrides)
    if options.parallel is not None and options.parallel > 1:
        code = train_side_by_side(options, schedule)
        if code is not None:
            return code
        options = replace(options, nproc=1, threads=options.threads or default_threads(options.parallel), retry=True)
    nproc = options.nproc or devices(schedule)
    done = look_first(options, schedule, nproc)
    return done if done is not None else start(job, options.orders, nproc)


def _on_hosts(options: RunOptions, hosts: HostOptions) -> int:
    # Only here: it compares what data hosts see, and so loads numpy, whose threads others start with signals held.
    from stagerun.launch.hosts import on_hosts

    schedule = load(options.folder, options.overrides)
    out = options.out if options.replay is None else str(options.output(schedule))
    there = replace(options, folder=hosts.folder_there(options.folder), out=out)
    return on_hosts(there.orders, options.folder, schedule, hosts, options.nproc)
