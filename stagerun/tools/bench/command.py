"""`stagerun bench scaling`: starts the workers, or is one, and shows what they measured."""

import json
import os
from contextlib import closing
from dataclasses import MISSING, dataclass
from pathlib import Path

import click

from stagerun.base.errors import ExitCode, UsageError, nearest
from stagerun.base.recipe import Schedule
from stagerun.base.text import count
from stagerun.command.ending import say, tell
from stagerun.command.options import arguments, command, option
from stagerun.command.shared import Folder, Json, Overrides, Synthetic, output_folder, require_picture
from stagerun.language import load
from stagerun.launch import StopRequest
from stagerun.launch.start import Job, Orders, joined, start, work
from stagerun.launch.watch.worker import Monitored
from stagerun.launch.worker_count import check_short
from stagerun.plan.rehearsal import for_speed, synthetic_images
from stagerun.system import signals
from stagerun.system.files import writing
from stagerun.system.imports import with_imports
from stagerun.system.world import World
from stagerun.tools.bench.report import WARM_UP, Measured, Turn, as_record, render, rows, sharing


class Counts(click.ParamType):  # generic in a newer click alone
    """`1,2,4`: growing numbers of workers."""

    name = "counts"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            counts = tuple(int(word) for word in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers: write 1,2,4.", param, ctx)
        if min(counts) < 1 or list(counts) != sorted(set(counts)):
            self.fail(f"{value!r}: write growing numbers from 1 on, such as 1,2,4.", param, ctx)
        return counts


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingOptions:
    folder: Folder
    overrides: Overrides = ()
    workers: tuple[int, ...] = option(
        "--workers 1,2,4",
        "The numbers of workers to try.",
        type=Counts(),
        word=lambda counts: ",".join(map(str, counts)),
        default=MISSING,
    )
    stage: str | None = option("--stage STAGE", "Which stage's training.  [default: the first]")
    iterations: int = option(
        "--iterations N", "Iterations of a turn, after one that is not counted.", least=1, default=5
    )
    rounds: int = option("--rounds N", "Turns for each number of workers.", least=1, default=3)
    synthetic: Synthetic = False
    threads: int | None = option(
        "--threads N", "Threads per worker.  [default: the processors shared by all evenly]", least=1, launcher=True
    )
    as_json: Json = False
    plot: str | None = option("--plot FILE", "Also draw it into FILE (.svg, .png; pip install 'stagerun[plots]').")

    def arguments(self) -> list[str]:
        """The command line of a worker."""
        return ["bench", "scaling", *arguments(self)]

    @property
    def orders(self) -> Orders:
        return Orders(tuple(self.arguments()), self.threads, saves=False)


@command()
def scaling(options: ScalingOptions) -> int:
    """Trains with each of some numbers of workers in turn, and reports images/s, efficiency, and the shares of computing,
    communicating and waiting for data.

    Whole iterations of the schedule (`batch_size` images, whatever the number of workers) are timed; in each round every number has
    a turn, so that a machine whose speed drifts slows all alike. Weights hardly move, and nothing is saved. All workers are
    started at once, on this machine, or by a launcher that starts as many as the largest number: those that are not in a turn wait.
    """

    def job(world: World, stop: StopRequest, watch: Monitored | None) -> int:
        return _scaling(options, world, stop)

    return work(job, options.orders) if joined(None) else _start(options, job)


def _start(options: ScalingOptions, job: Job) -> int:
    schedule = load(options.folder, options.overrides)
    schedule = with_imports(schedule, output_folder(schedule.name, None))
    _cut(options, schedule)
    if options.plot is not None:
        require_picture(options.plot)
    most = max(options.workers)
    if not options.synthetic:
        with signals.held():
            from stagerun.data.preflight import preflight

        preflight(schedule)
    return start(job, options.orders, most)


def _cut(options: ScalingOptions, schedule: Schedule) -> Schedule:
    """What is run. RecipeError, UsageError, DataError."""
    check_short(schedule, max(options.workers), None, options.synthetic, "measures")
    enabled = [stage.name for stage in schedule.stages if stage.enabled]
    name = enabled[0] if options.stage is None else options.stage
    if name not in enabled:
        raise UsageError(
            f"--stage {name}: no stage of {schedule.name} that is enabled has this name", nearest(name, enabled)
        )
    # One iteration more than are run, so that the last one isn't the stage's end.
    turns = len(options.workers) * options.rounds
    return for_speed(schedule, name, turns * (WARM_UP + options.iterations) + 1)


# -- a worker


def _scaling(options: ScalingOptions, world: World, stop: StopRequest) -> int:
    import torch

    from stagerun.tools.bench.measure import require_workers, scaling
    from stagerun.train.agreement import rank0
    from stagerun.train.images import Images, made_up_images
    from stagerun.train.join import join, load_everywhere

    device, comm = join(world, options.threads, stop)
    require_workers(comm, options.workers)
    schedule = load_everywhere(options.folder, options.overrides, comm)
    processors = len(os.sched_getaffinity(0))  # not those of this worker alone
    shape = str(synthetic_images(schedule)) if options.synthetic else ""
    short = _cut(options, with_imports(schedule, output_folder(schedule.name, None)))
    if options.plot is not None:
        rank0(comm, lambda: require_picture(str(options.plot)))
    solver = short.stages[0].solver
    quiet = options.as_json or comm.rank > 0
    if not quiet:
        say(
            f"{schedule.name}, stage {short.stages[0].name}: {count(options.rounds, 'round')} of {count(options.iterations, 'iteration')} "
            f"of {solver.batch_size} images with {', '.join(map(str, options.workers))} workers on {device}, "
            f"{count(torch.get_num_threads(), 'thread')} each"
        )

    def watch(turn: Turn) -> None:
        if not quiet:
            say(
                f"  round {turn.round + 1}, {count(turn.workers, 'worker')}: {solver.batch_size / turn.step:.4g} images/s"
            )

    with made_up_images(short, options.synthetic, comm, world) as source, closing(Images(source, device)) as images:
        for _ in images.open(comm, world, stop):
            pass
        images.preflight(comm)
        turns = scaling(source, options.workers, options.rounds, options.iterations, comm, device, images, stop, watch)
    if turns is not None:
        measured = Measured(
            schedule=schedule.name,
            stage=short.stages[0].name,
            device=str(device),
            batch_size=solver.batch_size,
            logical_workers=solver.logical_workers,
            threads=torch.get_num_threads(),
            processors=processors,
            sharing=sharing(turns),
            synthetic=shape,
            rounds=options.rounds,
            iterations=options.iterations,
        )
        rank0(comm, lambda: _tell(options, turns, measured))
    elif comm.rank == 0:
        tell("interrupted: nothing is kept")
    comm.close()
    return ExitCode.DONE if turns is not None else ExitCode.INTERRUPTED


def _tell(options: ScalingOptions, turns: list[Turn], measured: Measured) -> None:
    """Rank 0 only."""
    found = rows(turns, measured.batch_size, measured.logical_workers)
    say(json.dumps(as_record(found, measured, turns), indent=2) if options.as_json else "\n" + render(found, measured))
    if options.plot is None:
        return
    from stagerun.tools.bench.report import scaling_picture

    picture = scaling_picture(found, measured, png=options.plot.endswith(".png"))
    with writing(options.plot):
        Path(options.plot).write_bytes(picture)
