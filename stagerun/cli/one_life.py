"""What `stagerun verify-resume` was asked for, and one process life of the run that it interrupts: `run` of the schedule cut down."""

from dataclasses import dataclass
from pathlib import Path

from stagerun.cli.commands_run import RunOptions
from stagerun.cli.options import arguments, option
from stagerun.cli.running import Cut, job_of
from stagerun.cli.shared_options import (
    DeviceBatch,
    Folder,
    Json,
    Nproc,
    OutToCome,
    Overrides,
    Synthetic,
    Threads,
    limits,
)
from stagerun.cli.workers import start, work
from stagerun.launch import die_with_launcher
from stagerun.launch.workers import Orders, joined
from stagerun.plan.rehearsal import interruptible, with_sources
from stagerun.recipe import Schedule

SYNTHETIC_IMAGES = 512


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    folder: Folder
    overrides: Overrides = ()
    out: OutToCome = None
    kills: int = option("--kills N", "How often the run is interrupted.", least=1, default=5)
    seed: int = option("--seed N", "Draws the moments and their order.", default=1)
    iters: int = option("--iters N", "Iterations per stage, 2 or more.", least=2, default=6)
    device_batch: DeviceBatch = None
    then_workers: int | None = option(
        "--then-workers N",
        "After each interruption go on with N workers, then again with --nproc, in turn; for `determinism: ELASTIC`.",
        least=1,
    )
    synthetic: Synthetic = False
    nproc: Nproc = None
    threads: Threads = None
    as_json: Json = False
    # Set in the processes of a life alone.
    life: str | None = option("--life", "The output folder of the life.", hidden=True)
    batches: int | None = option("--batches", "Device batches per iteration.", hidden=True)

    def life_arguments(self, out: Path, batches: int, threads: int) -> list[str]:
        """The command line of a life, and of each of its workers."""
        same = arguments(self, "folder", "overrides", "iters", "device_batch", "synthetic")
        return ["verify-resume", *same, "--batches", str(batches), "--threads", str(threads), "--life", str(out)]


def shortened(options: VerifyOptions, schedule: Schedule, batches: int, folder: Path) -> Schedule:
    """The schedule as it is run. With --synthetic its images are in `folder`."""
    short = interruptible(schedule, options.iters, batches, options.device_batch)
    if not options.synthetic:
        return short
    train, val = ((str(folder / kind), SYNTHETIC_IMAGES) for kind in ("train", "val"))
    return with_sources(short, train, val)


def live(options: VerifyOptions) -> int:
    """The process that `verify-resume` started, or a worker of it. The exit code."""
    assert options.life is not None
    out, batches = Path(options.life), options.batches or 1
    nproc, threads = options.nproc or 1, options.threads or 1
    # A life may well have been hit before it came any further: that is no reason to give up here.
    of_run = RunOptions(options.folder, options.overrides, str(out), nproc=nproc, threads=threads, retry=True)
    cut = Cut(lambda schedule: shortened(options, schedule, batches, out.parent), batches)
    job = job_of(of_run, limits(()), cut)
    orders = Orders(tuple(options.life_arguments(out, batches, threads)), threads)
    if joined(options.nproc):
        return work(job, orders)
    die_with_launcher()
    return start(job, orders, nproc)
