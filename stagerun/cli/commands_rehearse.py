"""`stagerun rehearse`."""

import sys

import click

from stagerun.cli.ending import guarded
from stagerun.cli.options import at_least, schedule_options


@click.command()
@schedule_options
@click.option("--out", metavar="FOLDER", help="Output folder of the run to come.  [default: ./out/NAME]")
@click.option(
    "--iters",
    type=int,
    metavar="N",
    help="Iterations per stage, 2 or more.  [default: 5, or as many as take the first stage 5 s]",
)
@click.option(
    "--device-batch", type=int, metavar="N", help="Images per forward pass, where the real batch does not fit."
)
@click.option(
    "--workers", type=int, metavar="N", help="Estimate for a job of N workers.  [default: as many as rehearse]"
)
@click.option("--synthetic", is_flag=True, help="Make up images of the right kind: no data needed.")
@click.option(
    "--nproc", type=int, metavar="N", help="Workers on this machine.  [default: one per GPU, else one per NUMA node]"
)
@click.option("--threads", type=int, metavar="N", help="Threads per worker.  [default: the processors shared evenly]")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@guarded
def rehearse(
    folder: str,
    overrides: tuple[str, ...],
    out: str | None,
    iters: int | None,
    device_batch: int | None,
    workers: int | None,
    synthetic: bool,
    nproc: int | None,
    threads: int | None,
    as_json: bool,
) -> None:
    """Goes through the whole schedule with a few iterations per stage, and tells what the real run will take.

    Everything is done as in `run`, in a folder that is thrown away: data and transforms of each stage, carry-over,
    snapshots, a stop and a resume, evaluation. Then comes the time per stage, disk and memory, and what would run out.
    One device batch is run per worker and iteration; the rest of a real iteration is extrapolated. `plan` shows the estimate
    from then on.
    """
    from stagerun import signals

    with signals.held():
        from stagerun.cli.rehearsing import RehearseOptions, rehearse_command

    at_least(1, device_batch=device_batch, workers=workers, nproc=nproc, threads=threads)
    at_least(2, iters=iters)
    options = RehearseOptions(folder, overrides, out, iters, device_batch, workers, synthetic, nproc, threads, as_json)
    sys.exit(rehearse_command(options))
