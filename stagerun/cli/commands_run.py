"""`stagerun run`."""

import sys

import click

from stagerun.cli.ending import guarded
from stagerun.cli.options import at_least, output_options, schedule_options


@click.command()
@schedule_options
@output_options
@click.option("--nproc", type=int, metavar="N", help="Workers on this machine.  [default: one per GPU, or 1]")
@click.option("--threads", type=int, metavar="N", help="Threads per worker.  [default: the processors shared evenly]")
@guarded
def run(
    folder: str,
    overrides: tuple[str, ...],
    out: str | None,
    redo: tuple[str, ...],
    keep: tuple[str, ...],
    nproc: int | None,
    threads: int | None,
) -> None:
    """Trains what is not yet done. The same command goes on after a kill, a crash or a full disk.

    On this machine it starts --nproc workers itself. Under a launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and
    MASTER_PORT (torchrun, say) it joins as one worker.
    """
    from stagerun.cli.running import RunOptions, run_command

    at_least(1, nproc=nproc, threads=threads)
    sys.exit(run_command(RunOptions(folder, overrides, out, redo, keep, nproc, threads)))
