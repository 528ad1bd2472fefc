"""`stagerun bench ...`."""

import sys

import click

from stagerun.cli.ending import guarded
from stagerun.cli.options import at_least, schedule_options


@click.group()
def bench() -> None:
    """Measures on the machines at hand.

    \b
    stagerun bench scaling DIR   speed and efficiency with 1, 2, 4 ... workers, and where the time goes
    """


class Counts(click.ParamType):  # generic in a newer click alone
    """`1,2,4`: growing numbers of workers."""

    name = "counts"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            counts = tuple(int(word) for word in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is no list of numbers: write 1,2,4.", param, ctx)
        if min(counts) < 1 or list(counts) != sorted(set(counts)):
            self.fail(f"{value!r}: write growing numbers from 1 on, such as 1,2,4.", param, ctx)
        return counts


@bench.command()
@schedule_options
@click.option("--workers", type=Counts(), required=True, metavar="1,2,4", help="The numbers of workers to try.")
@click.option("--stage", metavar="STAGE", help="Which stage's training.  [default: the first]")
@click.option(
    "--iterations", type=int, default=5, metavar="N", help="Of a turn, after one that is not counted.  [default: 5]"
)
@click.option("--rounds", type=int, default=3, metavar="N", help="Turns for each number of workers.  [default: 3]")
@click.option("--synthetic", is_flag=True, help="Make up images of the right kind: no data needed.")
@click.option(
    "--threads", type=int, metavar="N", help="Threads per worker.  [default: the processors shared by all evenly]"
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@click.option("--plot", metavar="FILE", help="Also draw it into FILE (.svg, .png; pip install 'stagerun[plots]').")
@guarded
def scaling(
    folder: str,
    overrides: tuple[str, ...],
    workers: tuple[int, ...],
    stage: str | None,
    iterations: int,
    rounds: int,
    synthetic: bool,
    threads: int | None,
    as_json: bool,
    plot: str | None,
) -> None:
    """Trains with each of some numbers of workers in turn, and tells images/s, efficiency, and the shares of computing,
    communicating and waiting for data.

    Whole iterations of the schedule (`batch_size` images, whatever the number of workers) are timed; in each round every number has
    a turn, so that a machine whose speed drifts slows all alike. Weights hardly move, and nothing is saved. All workers are
    started at once, on this machine, or by a launcher that starts as many as the largest number: those that are not in a turn wait.
    """
    from stagerun import signals

    with signals.held():
        from stagerun.cli.benching import ScalingOptions, scaling_command

    at_least(1, iterations=iterations, rounds=rounds, threads=threads)
    sys.exit(
        scaling_command(
            ScalingOptions(folder, overrides, workers, stage, iterations, rounds, synthetic, threads, as_json, plot)
        )
    )
