"""`stagerun check`, `plan` and `help`: what a login node answers in a fraction of a second."""

import click

from stagerun import units
from stagerun.cli.ending import guarded, show, tell
from stagerun.cli.options import (
    Duration,
    FiniteRange,
    at_least,
    choice_options,
    missing_data,
    output_folder,
    output_options,
    picture_options,
    plot_options,
    schedule_options,
)
from stagerun.errors import UsageError


class Bandwidth(click.ParamType):  # generic in a newer click alone
    """`10Gbit/s`, in bytes per second."""

    name = "rate"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            return value if isinstance(value, float) else units.bandwidth(str(value))
        except ValueError:
            self.fail(f"{value!r} is no speed of a link: write 10Gbit/s, 100Mbit/s or 1.2GB/s.", param, ctx)


class Latency(click.ParamType):
    """`50us`, in seconds."""

    name = "time"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            return value if isinstance(value, float) else units.short_seconds(str(value))
        except ValueError:
            self.fail(f"{value!r} is no latency: write 50us or 0.2ms.", param, ctx)


# Images per second that somebody may mean: one in a quarter of an hour, and more than all machines together train.
SLOWEST, FASTEST = 1e-3, 10**9


@click.command()
@schedule_options
@click.option("--lint", is_flag=True, help="Also what is legal and looks wrong; `stagerun help lint` lists it.")
@guarded
def check(folder: str, overrides: tuple[str, ...], lint: bool) -> None:
    """Finds every mistake in a schedule's files at once, in a fraction of a second. Trains nothing."""
    from stagerun.spec import digest, load, look_at_classes
    from stagerun.text import count

    schedule = load(folder, overrides)
    tell("\n".join(f"note: {line}" for line in missing_data(schedule.data)))
    if lint:
        from stagerun.cli.linting import require_nothing_found

        require_nothing_found(schedule)
    show(
        f"{schedule.name}: {count(len(schedule.stages), 'stage')}, "
        f"{count(sum(s.solver.max_iter for s in schedule.stages), 'iteration')}, no mistakes{', no findings' * lint}, "
        f"digest {digest(schedule)[:12]}"
    )
    if (problem := look_at_classes(schedule)) is not None:
        tell(f"note: `run` will refuse this:\n{problem.render()}")


@click.command()
@schedule_options
@output_options
@choice_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@click.option(
    "--images-per-second",
    type=FiniteRange(SLOWEST, FASTEST),
    metavar="N",
    help="Speed of training of the whole job, for the hours; with --workers, of one worker alone.  [default: as the last run or "
    "rehearsal here]",
)
@click.option("--workers", type=int, metavar="N", help="Predict the speed of N workers over --link.")
@click.option(
    "--link",
    type=Bandwidth(),
    metavar="RATE",
    help="With --workers: what an all-reduce reaches on each host's link, about 0.8 of its nominal rate: 8Gbit/s, say.",
)
@click.option("--latency", type=Latency(), metavar="TIME", help="With --link: of one message, 50us, say.  [default: 0]")
@click.option(
    "--budget", "allocation", type=Duration(), metavar="TIME", help="Where an allocation of 4h, 90m or 2d would end."
)
@click.option("--csv", "csv_file", metavar="FILE", help="Write one row per iteration: lr, momentum, weight decay.")
@plot_options
@guarded
def plan(
    folder: str,
    overrides: tuple[str, ...],
    out: str | None,
    redo: tuple[str, ...],
    keep: tuple[str, ...],
    only: tuple[str, ...],
    until: str | None,
    as_json: bool,
    images_per_second: float | None,
    workers: int | None,
    link: float | None,
    latency: float | None,
    allocation: float | None,
    csv_file: str | None,
    plot_file: str | None,
    x: str | None,
    scale: str | None,
    watched: bool,
) -> None:
    """Shows what `run` would do: stages, epochs, learning rate, joints, and what is done already.

    Works where the data is not.
    """
    at_least(1, workers=workers)
    from stagerun.cli.planning import place_remark, remarks, results_remark, write_csv
    from stagerun.cli.predicting import job_of
    from stagerun.cli.timing import beside
    from stagerun.data.fingerprint import with_sets
    from stagerun.plan import make_plan
    from stagerun.plan.render import render_json, render_text
    from stagerun.spec import load
    from stagerun.store import LocalDisk, inventory

    picture = None
    if plot_file is not None or x or scale or watched:
        from stagerun.cli.plotting import asked, plot, watch

        others = {"--json": as_json, "--csv": csv_file, "--budget": allocation, "--redo": redo, "--keep": keep}
        others |= {"--only": only, "--until": until}
        picture = asked(
            file=plot_file,
            x=x,
            scale=scale,
            watched=watched,
            folder=folder,
            overrides=overrides,
            out=out,
            images_per_second=images_per_second,
            others=others,
        )
        if watched:
            return watch(picture)
    schedule = load(folder, overrides)
    target = output_folder(schedule.name, out)
    found = inventory(LocalDisk(), target, looking=True)
    if found.snapshots:  # else there is nothing to compare the images with
        schedule = with_sets(schedule)
    planned = make_plan(schedule, found, redo, keep, only, until)
    job = job_of(planned, target, workers, link, latency, images_per_second)
    if csv_file is not None:
        write_csv(planned, csv_file)
    notes = [
        *remarks(planned, found.damaged, found.forbidden),
        *results_remark(planned, target),
        *place_remark(target, several_hosts=link is not None),
    ]
    more = beside(planned, target, images_per_second, allocation, job)
    show(render_json(planned, notes, more.record) if as_json else render_text(planned, notes, more.blocks))
    if picture is not None:
        plot(picture, schedule)


@click.command()
@click.argument("folder", metavar="[NAME]", required=False)
@click.option(
    "--from",
    "base",
    metavar="SCHEDULE",
    default="fashion_collapse",
    show_default=True,
    help="One of the gallery, or a folder.",
)
@click.option("--train", metavar="LMDB", help="The training images.")
@click.option("--val", metavar="LMDB", help="The images to evaluate with.")
@click.option("--list", "as_list", is_flag=True, help="Show the gallery.")
@guarded
def new(folder: str | None, base: str, train: str | None, val: str | None, as_list: bool) -> None:
    """Makes the folder NAME: the stages of a schedule of the gallery, made to fit your own images.

    Number of images, classes, mean, deviation, channels and paths are read from the LMDBs that `stagerun data import` has made.
    Lengths are in epochs. A crop of padded images becomes their size; every other crop, batch and learning rate stays.
    """
    from stagerun.cli.new_schedule import list_text, new_schedule

    if as_list:
        show(list_text())
        return
    missing = [
        what for what, given in (("NAME", folder), ("--train LMDB", train), ("--val LMDB", val)) if given is None
    ]
    if folder is None or train is None or val is None:
        raise UsageError(
            f"{' and '.join(missing)}: missing", "`stagerun data import` makes an LMDB of a folder of images"
        )
    new_schedule(folder, base, train, val)


@click.command()
@schedule_options
@click.argument("name", metavar="[NAME]", required=False)
@guarded
def explain(folder: str, overrides: tuple[str, ...], name: str | None) -> None:
    """Shows where a setting came from: its value, the line it stands in, what it replaced, and the manual's word on it.

    NAME is STAGE.FIELD (`cyc2.max_iter`, `init.transform_param.mirror`, `cyc2.from`), STAGE for all its fields, FIELD for that
    field of every stage, or a field of the schedule (`seed`, `data.train.images`); ENSEMBLE.FIELD and ENSEMBLE likewise. Without
    it: the stages, and what can be asked.
    """
    from stagerun.cli.explaining import explain_text

    show(explain_text(folder, name, overrides))


@click.command()
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@picture_options
@guarded
def diff(a: str, b: str, as_json: bool, plot_file: str | None, x: str | None, scale: str | None) -> None:
    """Shows in what two schedules differ: by stage and field, with the places, and where their learning rates part.

    A and B are each a schedule's folder, the output folder of a run (what its stages were trained from), or a snapshot's.
    What differs and changes no training (paths, intervals) is shown apart, --plot draws both learning rates. The exit code is 0
    whether they differ or not; --json has `same`.
    """
    from stagerun.cli.diffing import compare, diff_json, diff_text, overlay

    picture = None
    if plot_file is not None or x or scale:
        from stagerun.cli.plotting import asked, draw_once

        picture = asked(file=plot_file, x=x, scale=scale, others={"--json": as_json})
    found = compare(a, b)
    show(diff_json(found) if as_json else diff_text(found))
    if picture is not None:
        draw_once(overlay(found), picture)


@click.command("help")
@click.argument("words", metavar="[FIELD|TOPIC]", nargs=-1)
@click.pass_context
@guarded
def help_command(ctx: click.Context, words: tuple[str, ...]) -> None:
    """Prints the manual of a field, a message or an enum of the solver files, or of a topic (`own images`, `resume`, `freeze`); of
    `lint`, what it looks for; of nothing, an overview."""
    from stagerun.spec.manual import help_text

    name = " ".join(words)
    if name == "lint":
        from stagerun.plan.lint import rules_text

        show(rules_text())
        return
    try:
        show(help_text(name))
    except UsageError as error:
        command = _command(ctx.find_root(), name)
        if not command:
            raise
        raise UsageError(error.message, f"for the command, `stagerun {command} --help`") from error


def _command(ctx: click.Context, name: str) -> str:
    """`import caffe`, for `caffe`; '' if there is no such command."""
    group = ctx.command
    if not isinstance(group, click.Group):
        return ""
    for known in group.list_commands(ctx):
        if known == name:
            return name
        command = group.get_command(ctx, known)
        if command is not None and (inner := _command(click.Context(command, ctx), name)):
            return f"{known} {inner}"
    return ""
