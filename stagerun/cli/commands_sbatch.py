"""`stagerun sbatch`."""

import click

from stagerun.cli.commands_plan import FASTEST, SLOWEST
from stagerun.cli.commands_run import run
from stagerun.cli.ending import guarded
from stagerun.cli.options import Duration, FiniteRange, at_least, schedule_options


@click.command()
@schedule_options
@click.option("--out", metavar="FOLDER", help="Output folder, seen by all nodes.  [default: ./out/NAME]")
@click.option("--nodes", type=int, required=True, metavar="N", help="Nodes of the job.")
@click.option(
    "--time",
    type=Duration(least=120.0),
    required=True,
    metavar="TIME",
    help="Length of one allocation, as 4h. A run that takes longer gets as many as it needs.",
)
@click.option(
    "--workers-per-node",
    type=int,
    metavar="N",
    help="Workers on each node.  [default: one per GPU that is asked for, or 1]",
)
@click.option("--gpus-per-node", type=int, metavar="N", help="GPUs to ask for.  [default: none]")
@click.option(
    "--cpus-per-worker",
    type=int,
    metavar="N",
    help="Processors for each worker, on shared nodes.  [default: whole nodes]",
)
@click.option("--partition", metavar="NAME", help="Partition to queue in.")
@click.option("--account", metavar="NAME", help="Account to charge.")
@click.option(
    "--signal-before",
    type=Duration(least=10.0),
    metavar="TIME",
    help="How long before the end of an allocation all workers are told to save. Nine tenths of it or more become --grace of `run`.  "
    "[default: 5m, at most a quarter of --time]",
)
@click.option(
    "--images-per-second",
    type=FiniteRange(SLOWEST, FASTEST),
    metavar="N",
    help="Speed of training of the whole job, to tell the number of allocations.  [default: as the last run or rehearsal here]",
)
@click.option(
    "--output", metavar="FILE", help="Write the script into FILE, which is not overwritten.  [default: on stdout]"
)
@click.option("--submit", is_flag=True, help="Queue it with sbatch, and tell the job's number.")
@click.argument("words", nargs=-1, metavar="[-- OPTIONS OF RUN]", type=click.UNPROCESSED)
@guarded
def sbatch(
    folder: str,
    overrides: tuple[str, ...],
    out: str | None,
    nodes: int,
    time: float,
    workers_per_node: int | None,
    gpus_per_node: int | None,
    cpus_per_worker: int | None,
    partition: str | None,
    account: str | None,
    signal_before: float | None,
    images_per_second: float | None,
    output: str | None,
    submit: bool,
    words: tuple[str, ...],
) -> None:
    """Writes a batch script for Slurm that runs a schedule to its end, in as many allocations as that takes.

    All that `run` would refuse is told now, and not when the job's turn has come. Before an allocation ends the workers save, and the
    job queues itself again; so it does when a node is lost or it is preempted. It ends when all is done, with a mistake, after three
    allocations that came to nothing, or by scancel. The script is plain, to be read and changed. What follows `--` goes to `run`.
    """
    from stagerun.cli.batching import SbatchOptions, sbatch_command

    at_least(
        1, nodes=nodes, workers_per_node=workers_per_node, gpus_per_node=gpus_per_node, cpus_per_worker=cpus_per_worker
    )
    given = [*(w for value in overrides for w in ("--set", value)), *(() if out is None else ("--out", out)), *words]
    context = run.make_context("run", [folder, *given], parent=click.get_current_context().parent)
    chosen = {
        str(option.name): option.opts[0]
        for option in run.params
        if option.name and context.get_parameter_source(option.name) is not click.core.ParameterSource.DEFAULT
    }
    sbatch_command(
        SbatchOptions(
            folder=folder,
            run=context.params,
            chosen=chosen,
            words=tuple(given),
            nodes=nodes,
            time=time,
            workers_per_node=workers_per_node,
            gpus_per_node=gpus_per_node,
            cpus_per_worker=cpus_per_worker,
            partition=partition,
            account=account,
            signal_before=signal_before,
            images_per_second=images_per_second,
            output=output,
            submit=submit,
        )
    )
