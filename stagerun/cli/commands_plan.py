"""`stagerun check`, `plan` and `help`: what a login node answers in a fraction of a second."""

import click

from stagerun.cli.ending import guarded
from stagerun.cli.options import output_folder, output_options, schedule_options


@click.command()
@schedule_options
@guarded
def check(folder: str, overrides: tuple[str, ...]) -> None:
    """Finds every mistake in a schedule's files at once, in a fraction of a second. Trains nothing."""
    from stagerun.spec import digest, load

    schedule = load(folder, overrides)
    click.echo(
        f"{schedule.name}: {len(schedule.stages)} stages, "
        f"{sum(s.solver.max_iter for s in schedule.stages)} iterations, no mistakes, digest {digest(schedule)[:12]}"
    )


@click.command()
@schedule_options
@output_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@click.option("--csv", "csv_file", metavar="FILE", help="Write one row per iteration: lr, momentum, weight decay.")
@guarded
def plan(
    folder: str,
    overrides: tuple[str, ...],
    out: str | None,
    redo: tuple[str, ...],
    keep: tuple[str, ...],
    as_json: bool,
    csv_file: str | None,
) -> None:
    """Shows what `run` would do: stages, epochs, learning rate, joints, and what is done already.

    Works where the data is not.
    """
    from stagerun.cli.planning import remarks, write_csv
    from stagerun.plan import make_plan
    from stagerun.plan.render import render_json, render_text
    from stagerun.spec import load
    from stagerun.store import LocalDisk, inventory

    schedule = load(folder, overrides)
    target = output_folder(schedule.name, out)
    found = inventory(LocalDisk(), target)
    planned = make_plan(schedule, found, redo, keep)
    if csv_file is not None:
        write_csv(planned, csv_file)
    notes = remarks(planned, target, found.damaged)
    click.echo(render_json(planned, notes) if as_json else render_text(planned, notes))


@click.command("help")
@click.argument("name", metavar="[FIELD]", default="")
@guarded
def help_command(name: str) -> None:
    """Prints the manual of a field, a message or an enum of the solver files; of nothing, an overview."""
    from stagerun.spec.manual import help_text

    click.echo(help_text(name))
