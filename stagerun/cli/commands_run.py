"""`stagerun run`."""

import sys
from dataclasses import fields
from typing import Any

import click

from stagerun.cli.ending import guarded
from stagerun.cli.host_options import chosen_hosts, host_options
from stagerun.cli.options import BIND, Duration, at_least, choice_options, output_options, schedule_options
from stagerun.cli.titled import Titled
from stagerun.train.logs import LOGS, SCREENS

TITLES = {
    "What is trained": ("--redo", "--keep", "--only", "--until"),
    "Workers": ("--nproc", "--threads", "--bind", "--comm-cores"),
    "Other hosts": (
        "--hosts", "--workers-per-node", "--min-nodes", "--max-restarts", "--remote-python", "--ssh", "--sync", "--sync-code",
    ),
    "Stopping and going on": ("--grace", "--timeout", "--retry", "--require-bit-exact"),
    "Logs": ("--log-format", "--log", "--profile", "--profile-iterations"),
}  # fmt: skip


@click.command(cls=Titled, titles=TITLES)
@schedule_options
@output_options
@choice_options
@host_options
@click.option(
    "--nproc", type=int, metavar="N", help="Workers on this machine.  [default: one per GPU, else one per NUMA node]"
)
@click.option("--threads", type=int, metavar="N", help="Threads per worker.  [default: the processors shared evenly]")
@click.option(
    "--bind",
    type=click.Choice(BIND),
    default="auto",
    help="Put each worker on cores of its own, within one NUMA node, and its memory there; `stagerun topology` draws it. auto: where "
    "the cores are known to be the job's own (some of a machine's CPUs, a whole one from Slurm, several hosts), or a machine has "
    "several NUMA nodes; not where a worker is alone.  [default: auto]",
)
@click.option(
    "--comm-cores",
    type=int,
    metavar="N",
    help="With --bind cores: cores of each worker that are set apart for all that doesn't compute.  [default: one in 12, at most 4]",
)
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
    help="Refuse (78) to go on where the same bits are not promised: with another torch build, processor, number of threads or "
    "workers, or other training images; on a GPU always. Without it the run goes on, and says EQUIVALENT.",
)
@click.option(
    "--retry", is_flag=True, help="Go on though the last three runs ended without getting any further than they began."
)
@click.option(
    "--profile",
    metavar="FILE",
    help="Write a Chrome trace of some iterations (open it in ui.perfetto.dev): images, forward, backward, each piece of the gradients "
    "on its way to the others, update, of all workers.",
)
@click.option(
    "--profile-iterations",
    type=int,
    metavar="N",
    help="With --profile: how many, after the first three.  [default: 10]",
)
@guarded
def run(**given: Any) -> None:
    """Trains what is not yet done. The same command goes on after a kill, a crash or a full disk.

    On this machine it starts --nproc workers itself, on others (--hosts) over ssh. Under mpirun, mpiexec, srun, torchrun or any launcher that sets
    RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, each process joins as one worker.
    """
    from stagerun.cli.running import RunOptions, run_command

    options = RunOptions(**{field.name: given.pop(field.name) for field in fields(RunOptions)})
    at_least(1, profile_iterations=options.profile_iterations)
    at_least(1, nproc=options.nproc, threads=options.threads)
    at_least(0, comm_cores=options.comm_cores)
    sys.exit(run_command(options, chosen_hosts(nproc=options.nproc, **given)))
