"""`stagerun retry`."""

import sys

import click

from stagerun.cli.ending import guarded
from stagerun.cli.options import at_least


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "--max-restarts",
    type=int,
    metavar="N",
    help="Start it anew N times at most.  [default: as long as it gets further]",
)
@click.option(
    "--schedule",
    metavar="DIR",
    help="The schedule that COMMAND runs, where it does so in a script.  [default: found in COMMAND's words]",
)
@click.option("--out", metavar="FOLDER", help="Its output folder.  [default: found in COMMAND's words]")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND...")
@guarded
def retry(max_restarts: int | None, schedule: str | None, out: str | None, command: tuple[str, ...]) -> None:
    """Runs COMMAND, and runs it again when a worker, a host or a disk was lost.

    For launchers that end all ranks when one dies: `stagerun retry -- mpirun -np 4 stagerun run DIR`, and the same with srun
    or torchrun. Launchers' exit codes say little, so it looks at what the run has left in its output folder. It ends when
    the run is done; when it was told to stop, and has saved (75); with a mistake and what another start would not mend; and
    with 78 after three lives that got no further. A signal goes to COMMAND as SIGUSR1 (torchrun and others: SIGTERM), so
    that the run saves.
    """
    from stagerun.cli.retrying import RetryOptions, retry_command

    at_least(0, max_restarts=max_restarts)
    sys.exit(retry_command(RetryOptions(command, max_restarts, schedule, out)))
