"""`stagerun topology`."""

import click

from stagerun.cli.ending import guarded
from stagerun.cli.options import at_least


@click.command()
@click.option(
    "--workers-per-node", "workers", type=int, metavar="N", help="Workers on this machine.  [default: as `run`]"
)
@click.option(
    "--comm-cores",
    type=int,
    metavar="N",
    help="Cores of each worker that are set apart for all that doesn't compute.  [default: one in 12, at most 4]",
)
@click.option("--faked", metavar="FILE", help="Another machine, described in FILE, in place of this one.")
@click.option("--save", metavar="FILE", help="Also write the machine's description into FILE.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@guarded
def topology(workers: int | None, comm_cores: int | None, faked: str | None, save: str | None, as_json: bool) -> None:
    """Draws this machine's cores, and which of them each worker gets where `run` binds them.

    A worker has whole cores of one NUMA node, all workers as many. Most of them compute, one thread each; of 12 or more the last
    ones (1 of 12) are set apart for communication, loading, saving and the monitor. With GPUs a worker has cores near its GPU.

    FILE holds a line for each NUMA node, its cores and GPUs, and what a job may use of them:

    \b
      node 0 socket 0 memory 96G    socket and memory may be left out
      cores 0-23 siblings 48-71     first CPUs of the cores; second ones (SMT)
      gpu 0 NVIDIA H200             at this node; before all nodes: at none
      node 1 socket 1 memory 96G
      cores 24-43 siblings 72-91
      cores 44-47 slow              of the slower kind, where there are two
      allowed 0-15,48-63            the job's affinity or cpuset; default: all
      quota 4                       its control group's processors
    """
    from stagerun.cli.drawing import draw

    at_least(1, workers_per_node=workers)
    at_least(0, comm_cores=comm_cores)
    click.echo(draw(workers, comm_cores, faked, save, as_json), nl=False)
