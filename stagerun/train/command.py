"""`stagerun run` on the command line: this process is a worker, or starts them on this machine or on several hosts."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from stagerun.base.errors import StagerunError, UsageError
from stagerun.base.recipe import Determinism, Schedule
from stagerun.base.text import listed
from stagerun.base.wings import wing
from stagerun.command.ending import over_live_line, stopped_after
from stagerun.command.options import command
from stagerun.language import load
from stagerun.launch.options import HostOptions, chosen_hosts, devices
from stagerun.launch.start import Job, joined, start, work
from stagerun.logs.table import require_packages
from stagerun.system.host import nvidia_gpus
from stagerun.system.portable import pin
from stagerun.system.world import default_threads
from stagerun.train.first_look import look_first
from stagerun.train.options import Cut, RunOptions

SIDE_BY_SIDE = "tools.parallel.train_side_by_side"


@command(grouped=True)
def run(options: RunOptions, hosts: HostOptions) -> int:
    """Trains what is not yet done. The same command resumes after a kill, a crash or a full disk.

    On this machine it starts --nproc workers, on others (--hosts) over ssh. Under mpirun, mpiexec, srun, torchrun or any launcher that
    sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, each process joins as one worker.
    """
    others = chosen_hosts(hosts)
    if options.parallel is not None:
        _refuse_with_parallel(options, others is not None)
    with stopped_after(options.stop_after):
        over_live_line()
        require_packages(options.log)
        orders = options.orders  # UsageError for a --timeout
        if options.replay is not None and options.redo:
            raise UsageError("--replay with --redo", "take another --out to replay once more")
        if others is not None:
            return _on_hosts(options, others)
        if joined(options.nproc):
            return work(job_of(options), orders)
        return _start(options)


def _refuse_with_parallel(options: RunOptions, others: bool) -> None:
    """UsageError for what can't go with --parallel."""
    if wing(SIDE_BY_SIDE) is None:
        raise UsageError("--parallel: this installation lacks stagerun/tools/parallel.py", "install all of stagerun")
    wrong = {
        "--nproc": options.nproc not in (None, 1), "--hosts": others, "--profile": options.profile is not None,
        "--replay": options.replay is not None, "--log": bool(options.log),
        "--bind numa": options.bind == "numa", "--timeout": bool(options.timeouts),
    }  # fmt: skip
    if names := [name for name, wanted in wrong.items() if wanted]:
        raise UsageError(
            f"--parallel with {listed(names)}: stages side by side have one worker each, on this machine",
            "leave one of them out",
        )
    if nvidia_gpus():
        raise UsageError("--parallel with a GPU", "stages side by side are for processors: leave --parallel out")


def job_of(options: RunOptions, cut: Cut | None = None) -> Job:
    """Return the function that a worker of the run calls."""

    def job(world: Any, stop: Any, watch: Any) -> int:
        read = read_before_torch(options.folder, options.overrides, options.threads, load if cut is None else cut.read)
        from stagerun.train.worker import train

        return train(options, world, stop, watch, read, cut)

    return job


def read_before_torch(
    folder: str, overrides: Sequence[str], threads: int | None, read: Callable[..., Schedule]
) -> Callable[[], Schedule]:
    """Read the schedule, and set what `determinism: PORTABLE` needs before torch is loaded. The result returns the schedule, or raises
    its mistakes, which all ranks report together. UsageError where bits can't be portable."""
    try:
        schedule = read(folder, overrides)
    except StagerunError as error:
        mistakes = error

        def refuse() -> NoReturn:
            raise mistakes

        return refuse
    if schedule.determinism is Determinism.PORTABLE:
        pin(threads)
    return lambda: schedule


def _start(options: RunOptions) -> int:
    schedule, job = load(options.folder, options.overrides), job_of(options)
    if options.parallel is not None and options.parallel > 1:
        options = replace(options, threads=options.threads or default_threads(options.parallel))
        code: int | None = look_first(options, schedule, 1)
        if code is None:
            code = wing(SIDE_BY_SIDE)(options, schedule)
        if code is not None:
            return code
        options = replace(options, nproc=1, retry=True)
    nproc = options.nproc or devices(schedule)
    done = look_first(options, schedule, nproc)
    return done if done is not None else start(job, options.orders, nproc)


def _on_hosts(options: RunOptions, hosts: HostOptions) -> int:
    # Only here: it compares what data hosts see, and so loads numpy, whose threads others start with signals held.
    from stagerun.launch.hosts import on_hosts

    schedule = load(options.folder, options.overrides)
    out = options.out if options.replay is None else str(options.output(schedule))
    remote = replace(options, folder=hosts.folder_on_host(options.folder), out=out)
    return on_hosts(remote.orders, options.folder, schedule, hosts, options.nproc)
