"""The options of `stagerun run`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from stagerun.base.events import Event
from stagerun.base.recipe import Schedule
from stagerun.command.options import arguments, flag, option
from stagerun.command.shared import (
    TRAINED,
    WORKERS,
    Duration,
    Nproc,
    PlannedOptions,
    Threads,
    limits,
    output_folder,
)
from stagerun.language import load
from stagerun.launch import GRACE_S
from stagerun.launch.start import Orders
from stagerun.logs.table import LogName, all_logs
from stagerun.train.keeper import Selection

STOPPING = "Stopping and resuming"
LOGGED = "Logs"


@dataclass(frozen=True, slots=True)
class RunOptions(PlannedOptions):
    nproc: Nproc = None
    threads: Threads = None
    bind: str = option(
        "--bind",
        "numa: put each worker on contiguous cores of one NUMA node, if the machine has several and runs this job alone.",
        title=WORKERS,
        type=click.Choice(("none", "numa")),
        default="none",
    )
    grace: float | None = option(
        "--grace TIME",
        "From a signal to stop until the scheduler kills: an iteration that can't be finished and saved by then is broken off, "
        "and nothing before it is lost.  [default: 10m]",
        title=STOPPING,
        type=Duration(least=1.0),
        word="{:f}s".format,
    )
    stop_after: float | None = option(
        "--stop-after TIME",
        "Stop and save, as after a signal to stop (75), when the command has run for so long: for a night, or an allocation.",
        title=STOPPING,
        type=Duration(least=1.0),
        launcher=True,  # the launching process counts; its signal reaches the workers
        word="{:f}s".format,
    )
    timeouts: tuple[str, ...] = option(
        "--timeout SECTION=TIME",
        "End the run (69), naming the rank, when a rank has not moved for so long in a section: start (10m without it), copy (30m), "
        "first_iteration (10m), iteration and evaluation (1m, or ten times the slowest step of late; with `compile` 10m), save (10m). "
        "SECTION=off, or `off` for all: never, for a debugger. Repeatable.",
        title=STOPPING,
        default=(),
    )
    parallel: int | None = option(
        "--parallel N",
        "Train N stages that don't wait for each other side by side, on this machine, with one worker each. Their bits are the same as "
        "alone with as many --threads, by default the processors shared evenly.",
        title=WORKERS,
        least=1,
        launcher=True,
    )
    retry: bool = flag("--retry", "Run although the last three runs made no progress.", title=STOPPING)
    replay: str | None = option(
        "--replay OUT",
        "Train stages with `method: ASYNC` in the order that the run in OUT has recorded, with any number of workers; that the bits are the "
        "same is checked. Ends where the record does. Into --out, or out/NAME-replay.",
        title=TRAINED,
    )
    exact: bool = flag(
        "--require-bit-exact",
        "Refuse (78) to resume where the same bits are not promised: with another torch build, processor, number of threads or "
        "workers, or other training images; on a GPU always. Without it the run resumes, and says EQUIVALENT.",
        title=STOPPING,
    )
    log: tuple[str, ...] = option(
        "--log",
        f"Write a log into the output folder as well, or send it to a tracker. {' '.join(f'{name}: {log.about}' for name, log in all_logs().items())} Repeatable.",
        title=LOGGED,
        type=LogName(),
        multiple=True,
        default=(),
    )
    profile: str | None = option(
        "--profile FILE",
        "Write a Chrome trace of ten iterations after the first three (open it in ui.perfetto.dev): images, forward, backward, each piece of the gradients "
        "on its way to the others, update, of all workers.",
        title=LOGGED,
    )

    @property
    def grace_s(self) -> float:
        """Seconds from a signal to stop until the process must have ended."""
        return GRACE_S if self.grace is None else self.grace

    @property
    def selection(self) -> Selection:
        return Selection(self.redo, self.only, self.until)

    @property
    def orders(self) -> Orders:
        return Orders(tuple(self.arguments()), self.threads, self.grace_s, limits=limits(self.timeouts))

    def output(self, schedule: Schedule) -> Path:
        return output_folder(schedule.name + ("-replay" if self.replay is not None else ""), self.out)

    def arguments(self) -> list[str]:
        """The command line of a worker."""
        return ["run", *arguments(self)]


@dataclass(frozen=True, slots=True)
class Cut:
    """Settings that make a run short, for a trial: a change of the schedule, batches of the evaluation after a stage, `until`: whether
    an event is the last before the stop, and `read`: makes the schedule of a folder and --set."""

    schedule: Callable[[Schedule], Schedule]
    final_test_iter: int
    until: Callable[[Event], bool] = lambda event: False
    read: Callable[[str, Sequence[str]], Schedule] = load
