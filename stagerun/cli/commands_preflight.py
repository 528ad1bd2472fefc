"""`stagerun preflight`."""

import sys
from functools import partial

import click

from stagerun.cli.ending import guarded
from stagerun.cli.host_options import chosen_hosts, host_options
from stagerun.cli.options import at_least, schedule_options


@click.command()
@schedule_options
@click.option("--out", metavar="FOLDER", help="Output folder of the run to come.  [default: ./out/NAME]")
@partial(host_options, lives=False)
@click.option(
    "--nproc", type=int, metavar="N", help="Workers on this machine.  [default: one per GPU, else one per NUMA node]"
)
@click.option("--threads", type=int, metavar="N", help="Threads per worker.  [default: the processors shared evenly]")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@guarded
def preflight(
    folder: str,
    overrides: tuple[str, ...],
    out: str | None,
    nproc: int | None,
    threads: int | None,
    as_json: bool,
    hosts: str | None,
    per_node: int | None,
    python: str | None,
    ssh: str | None,
    sync: str | None,
    sync_code: bool,
) -> None:
    """Looks at every host of a job before it is paid for: which is missing, slow or different.

    Start it as the run itself: on one machine, with --hosts and what the run has beside it, or under torchrun, mpirun or srun. Compared are versions, code, schedule and images;
    looked at, scratch and output folders; measured, the links between the hosts, the sum of the gradients, and a training step on made-up
    images, on each host alone and on all together. It takes some seconds, and leaves nothing.

    \b
    Ends with 0 where the hosts are ready, else with the code of the first of these that was found:
      64  other versions or code, a mistake in the schedule    65  images missing or not the same
      77  a folder may not be written                          74  no room, or no such folder
      78  another schedule                                     69  a host or link is missing or slow
    """
    from stagerun.cli.preflighting import PreflightOptions, preflight_command

    at_least(1, nproc=nproc, threads=threads)
    reached = chosen_hosts(
        hosts,
        nproc,
        per_node=per_node,
        python=python,
        ssh=ssh,
        sync=sync,
        sync_code=sync_code,
        least=None,
        restarts=None,
    )
    sys.exit(preflight_command(PreflightOptions(folder, overrides, out, nproc, threads, as_json), reached))
