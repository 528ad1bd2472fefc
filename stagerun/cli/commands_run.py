"""`stagerun run`."""

import sys

import click

from stagerun.cli.ending import guarded
from stagerun.cli.logs import LOGS, SCREENS
from stagerun.cli.options import Duration, at_least, choice_options, output_options, schedule_options


@click.command()
@schedule_options
@output_options
@choice_options
@click.option("--nproc", type=int, metavar="N", help="Workers on this machine.  [default: one per GPU, or 1]")
@click.option("--threads", type=int, metavar="N", help="Threads per worker.  [default: the processors shared evenly]")
@click.option(
    "--grace",
    type=Duration(least=1.0),
    metavar="TIME",
    help="From a signal to stop until the scheduler kills: an iteration that can't be finished and saved by then is broken off, "
    "and nothing before it is lost.  [default: 10m]",
)
@click.option(
    "--log-format",
    type=click.Choice(list(SCREENS)),
    default="text",
    help="What is printed: text for people, or Caffe's own lines, for parse_log and the plot scripts that read Caffe's "
    "logs; `Iteration N` then counts through all stages in the order in which they run.  [default: text]",
)
@click.option(
    "--log",
    type=click.Choice(list(LOGS)),
    multiple=True,
    help="Write a log into the output folder as well. tensorboard: OUT/tensorboard, a run for each stage; needs the "
    "package tensorboard. dawnbench: OUT/dawnbench.tsv, in a tree a file for each of its ends, with a row for each evaluation of "
    "all images; its hours are those of training iterations alone, over all process lives. mllog: OUT/mllog.txt, MLPerf's :::MLLOG lines; their clock is the "
    "wall's. Repeatable.",
)
@click.option(
    "--timeout",
    "timeouts",
    metavar="SECTION=TIME",
    multiple=True,
    help="End the run (69), naming the rank, when one has not moved for so long in a section: start (10m without it), copy (30m), "
    "first_iteration (10m), iteration and evaluation (1m, or ten times the slowest step of late; with `compile` 10m), save (10m). "
    "`off`: never, for a debugger. Repeatable.",
)
@click.option(
    "--require-bit-exact",
    "exact",
    is_flag=True,
    help="Refuse (78) to go on where the same bits are not promised: with another torch build, instruction set, number of threads or "
    "workers; on a GPU always. Without it the run goes on, and says EQUIVALENT.",
)
@click.option(
    "--retry", is_flag=True, help="Go on though the last three runs ended without getting any further than they began."
)
@guarded
def run(
    folder: str,
    overrides: tuple[str, ...],
    out: str | None,
    redo: tuple[str, ...],
    keep: tuple[str, ...],
    only: tuple[str, ...],
    until: str | None,
    nproc: int | None,
    threads: int | None,
    grace: float | None,
    log_format: str,
    log: tuple[str, ...],
    timeouts: tuple[str, ...],
    exact: bool,
    retry: bool,
) -> None:
    """Trains what is not yet done. The same command goes on after a kill, a crash or a full disk.

    On this machine it starts --nproc workers itself. Under a launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and
    MASTER_PORT (torchrun, say) it joins as one worker.
    """
    from stagerun.cli.running import RunOptions, run_command

    at_least(1, nproc=nproc, threads=threads)
    sys.exit(
        run_command(
            RunOptions(
                folder,
                overrides,
                out,
                redo,
                keep,
                nproc,
                threads,
                log_format,
                log,
                only,
                until,
                grace,
                retry=retry,
                exact=exact,
                timeouts=timeouts,
            )
        )
    )
