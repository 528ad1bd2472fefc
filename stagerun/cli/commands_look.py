"""`stagerun status` and `snapshots`: what is in an output folder, asked from another terminal. They change nothing."""

import click

from stagerun.cli.ending import guarded
from stagerun.cli.options import schedule_options

OUT = click.option("--out", metavar="FOLDER", help="Output folder.  [default: ./out/NAME]")
JSON = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")


@click.command()
@schedule_options
@OUT
@JSON
@guarded
def status(folder: str, overrides: tuple[str, ...], out: str | None, as_json: bool) -> None:
    """Shows whether a run is alive, how far it is, and its warnings, from any terminal.

    DIR is the schedule's folder, or the output folder itself. A run counts as alive while it holds the output folder's lock,
    on whatever machine.
    """
    import time

    from stagerun.cli.looking import find_target
    from stagerun.cli.status import look
    from stagerun.cli.status_text import status_json, status_text

    target = find_target(folder, overrides, out)
    now = time.time()
    found = look(target, now)
    click.echo(status_json(found) if as_json else status_text(found, now))


@click.command()
@schedule_options
@OUT
@click.option(
    "--verify", is_flag=True, help="Read every byte and compare it with its digest; exit code 78 if one differs."
)
@JSON
@guarded
def snapshots(folder: str, overrides: tuple[str, ...], out: str | None, verify: bool, as_json: bool) -> None:
    """Lists the snapshots of an output folder: complete, damaged and set aside, and what started from them.

    DIR is the schedule's folder, or the output folder itself. A snapshot counts as complete when its manifest is as it was
    written and its files have the right sizes; --verify reads the files too.
    """
    from stagerun.cli.looking import find_target, list_snapshots, refuse_damaged, snapshots_json, snapshots_text

    target = find_target(folder, overrides, out)
    found = list_snapshots(target.out, verify, target.schedule)
    click.echo(snapshots_json(target.out, found) if as_json else snapshots_text(target.out, found))
    if verify:
        refuse_damaged(found)
