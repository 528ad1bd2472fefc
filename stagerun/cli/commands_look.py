"""`stagerun status` and `snapshots`: what is in an output folder, asked from another terminal. Without --pin, --unpin and --drop
they change nothing."""

import click

from stagerun.cli.ending import guarded, show, tell
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

    DIR is the schedule's folder, or the output folder itself. A run counts as alive while it holds the output folder's lock;
    where that doesn't reach, as on another host, while it gives signs of life, for which is waited 15 s at most.
    """
    import time

    from stagerun.cli.looking import find_target
    from stagerun.cli.nearby import elsewhere
    from stagerun.cli.status import look
    from stagerun.cli.status_text import status_json, status_text

    target = find_target(folder, overrides, out)
    now = time.time()
    found = look(target, now, tell)
    text = status_json(found) if as_json else status_text(found, now)
    show(text + (elsewhere(target) if found.state == "nothing" and not as_json else ""), marks=found.stages)


@click.command()
@schedule_options
@OUT
@click.option(
    "--verify", is_flag=True, help="Read every byte and compare it with its digest; exit code 78 if one differs."
)
@click.option("--pin", metavar="NAME", multiple=True, help="Nothing deletes this snapshot any more. Repeatable.")
@click.option("--unpin", metavar="NAME", multiple=True, help="Take the pin off. Repeatable.")
@click.option(
    "--drop",
    metavar="NAME",
    multiple=True,
    help="Delete this snapshot, or one that was set aside, and its result; not one that is pinned, or that training rests on. "
    "Repeatable.",
)
@click.option("--force", is_flag=True, help="With --drop: also one that training rests on.")
@JSON
@guarded
def snapshots(
    folder: str,
    overrides: tuple[str, ...],
    out: str | None,
    verify: bool,
    pin: tuple[str, ...],
    unpin: tuple[str, ...],
    drop: tuple[str, ...],
    force: bool,
    as_json: bool,
) -> None:
    """Lists the snapshots of an output folder: complete, damaged and set aside, and what started from them.

    DIR is the schedule's folder, or the output folder itself. A snapshot counts as complete when its manifest is as it was
    written and its files have the right sizes; --verify reads the files too. --pin and --unpin work beside a run, --drop does not.
    """
    from stagerun.cli.looking import find_target, list_snapshots, refuse_damaged, snapshots_json, snapshots_text
    from stagerun.cli.nearby import elsewhere
    from stagerun.cli.tending import Wishes, tend

    target = find_target(folder, overrides, out)
    if pin or unpin or drop or force:
        tell("\n".join(tend(target, Wishes(pin, unpin, drop, force))))
    found = list_snapshots(target.out, verify, target.schedule)
    text = snapshots_json(target.out, found) if as_json else snapshots_text(target.out, found)
    show(text + (elsewhere(target) if not found and not as_json else ""))
    if verify:
        refuse_damaged(target.out, found)
