"""What `stagerun verify-resume` was asked for, and one process life of the run that it interrupts: `run` of the schedule cut down."""

from dataclasses import dataclass
from pathlib import Path

from stagerun.cli.options import limits
from stagerun.cli.running import Cut, RunOptions, job_of
from stagerun.cli.workers import start, work
from stagerun.launch import die_with_launcher
from stagerun.launch.workers import Orders, joined
from stagerun.plan.rehearsal import interruptible, with_sources
from stagerun.recipe import Schedule

SYNTHETIC_IMAGES = 512


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """`life` (an output folder) and `batches` (device batches per iteration) are set in the processes of a life alone."""

    folder: str
    overrides: tuple[str, ...]
    out: str | None
    kills: int
    seed: int
    iters: int
    device_batch: int | None
    then_workers: int | None
    synthetic: bool
    nproc: int | None
    threads: int | None
    as_json: bool
    life: str | None = None
    batches: int | None = None

    def life_arguments(self, out: Path, batches: int, threads: int) -> list[str]:
        """The command line of a life, and of each of its workers."""
        words = ["verify-resume", self.folder, *[word for value in self.overrides for word in ("--set", value)]]
        if self.device_batch is not None:
            words += ["--device-batch", str(self.device_batch)]
        words += ["--iters", str(self.iters), "--batches", str(batches), "--threads", str(threads)]
        return [*words, *["--synthetic"] * self.synthetic, "--life", str(out)]


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
    of_run = RunOptions(options.folder, options.overrides, str(out), (), (), nproc, threads, retry=True)
    cut = Cut(lambda schedule: shortened(options, schedule, batches, out.parent), batches)
    job = job_of(of_run, limits(()), cut)
    orders = Orders(tuple(options.life_arguments(out, batches, threads)), threads)
    if joined(options.nproc):
        return work(job, orders)
    die_with_launcher()
    return start(job, orders, nproc)
