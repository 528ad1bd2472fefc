"""`stagerun verify-resume`."""

import sys

import click

from stagerun.cli.ending import guarded
from stagerun.cli.options import at_least, schedule_options


@click.command("verify-resume")
@schedule_options
@click.option("--out", metavar="FOLDER", help="Output folder of the run to come.  [default: ./out/NAME]")
@click.option("--kills", type=int, default=5, metavar="N", help="How often the run is interrupted.  [default: 5]")
@click.option("--seed", type=int, default=1, metavar="N", help="Draws the moments and their order.  [default: 1]")
@click.option("--iters", type=int, default=6, metavar="N", help="Iterations per stage, 2 or more.  [default: 6]")
@click.option(
    "--device-batch", type=int, metavar="N", help="Images per forward pass, where the real batch does not fit."
)
@click.option(
    "--then-workers",
    type=int,
    metavar="N",
    help="After each interruption go on with N workers, then again with --nproc, in turn; for `determinism: ELASTIC`.",
)
@click.option("--synthetic", is_flag=True, help="Make up images of the right kind: no data needed.")
@click.option(
    "--nproc", type=int, metavar="N", help="Workers on this machine.  [default: one per GPU, else one per NUMA node]"
)
@click.option("--threads", type=int, metavar="N", help="Threads per worker.  [default: the processors shared evenly]")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@click.option("--life", hidden=True, help="Be one process life of the run, in this output folder.")
@click.option("--batches", type=int, hidden=True, help="Device batches per iteration of that run.")
@guarded
def verify_resume(
    folder: str,
    overrides: tuple[str, ...],
    out: str | None,
    kills: int,
    seed: int,
    iters: int,
    device_batch: int | None,
    then_workers: int | None,
    synthetic: bool,
    nproc: int | None,
    threads: int | None,
    as_json: bool,
    life: str | None,
    batches: int | None,
) -> None:
    """Proves on this machine that the interrupted schedule gives the same bits as the uninterrupted one.

    The schedule, cut down as for `rehearse`, is run twice: once straight, and once interrupted --kills times, at random
    moments all over it, and continued each time. In turn, in random order, SIGKILL hits rank 0, another worker, all processes, the launcher; one in five
    is a SIGTERM, after which all must be saved (exit code 75). Then the end of each stage (weights, momentum, averaged
    weights), each loss and each evaluation are compared.

    Takes a minute for a small network on few processors. All is done in a folder below --out that is removed at the end.
    Exit code 0: all bits are equal; 70: they are not, on a CPU, where they should be. On a GPU nothing is promised: what
    came out is told, with 0 either way.
    """
    from stagerun import signals

    with signals.held():
        from stagerun.cli.verdict import VerifyOptions
        from stagerun.cli.verifying import verify_command

    at_least(1, kills=kills, device_batch=device_batch, then_workers=then_workers, nproc=nproc, threads=threads)
    at_least(2, iters=iters)
    options = VerifyOptions(
        folder, overrides, out, kills, seed, iters, device_batch, then_workers, synthetic, nproc, threads, as_json, life, batches
    )  # fmt: skip
    sys.exit(verify_command(options))
