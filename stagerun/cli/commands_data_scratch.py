"""`stagerun data stage` and `unstage`: copies of LMDBs on a node's own disk, made ahead of time and taken away again."""

import click

from stagerun.cli.ending import guarded
from stagerun.cli.options import FiniteRange

SCRATCH = click.option(
    "--scratch", metavar="FOLDER", help="Folder on this node's fast disk.  [default: `scratch` of the schedule]"
)
SET = click.option(
    "--set", "overrides", metavar="FIELD=VALUE", multiple=True, help="Change a field of the schedule. Repeatable."
)


@click.command(short_help="Copies LMDBs to this node's fast disk, ahead of a run.")
@click.argument("target", metavar="DIR")
@SET
@SCRATCH
@click.option(
    "--reserve",
    type=FiniteRange(0, max=1_000_000_000),
    metavar="GB",
    help="Gigabytes that stay free there.  [default: `scratch_reserve` of the schedule, 1]",
)
@click.option("--verify", is_flag=True, help="Read copies that are there already, and mend what is not as it was.")
@guarded
def stage(target: str, overrides: tuple[str, ...], scratch: str | None, reserve: float | None, verify: bool) -> None:
    """Has copies of the images on this node's scratch disk, as `run` would make them; `run` then finds them there.

    DIR is a schedule's folder or that of one LMDB. Every block is read back from the disk and compared with what was read from
    the source. A copy that is there is not made again; where room is missing, copies that stagerun made and nobody uses are
    removed, the longest unused first. Any number of processes may do this at once, on one node and on many:

    \b
    srun --ntasks-per-node=1 stagerun data stage solvers/resnet50_72ep

    Interrupted, by whatever means, the same command goes on where it was; exit code 75 if it was asked to stop.
    """
    from stagerun.cli.data_copying import stage_images

    stage_images(target, overrides, scratch, reserve, verify)


@click.command(short_help="Removes copies that stagerun made on this node's fast disk.")
@click.argument("target", metavar="DIR", required=False)
@SET
@SCRATCH
@click.option("--all", "everything", is_flag=True, help="All copies of yours in --scratch, in place of those of DIR.")
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@guarded
def unstage(
    target: str | None, overrides: tuple[str, ...], scratch: str | None, everything: bool, dry_run: bool
) -> None:
    """Removes the copies of DIR's images from this node's scratch disk: older states and interrupted copies, too.

    DIR is a schedule's folder or that of one LMDB, which may be gone itself. Copies that a run reads or makes are kept. Nothing
    else is touched.
    """
    from stagerun.cli.data_copying import unstage_images

    unstage_images(target, overrides, scratch, everything, dry_run)


COMMANDS: tuple[click.Command, ...] = (stage, unstage)
