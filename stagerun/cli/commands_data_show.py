"""`stagerun data show`: looking at images before they are trained on."""

import click

from stagerun.cli.ending import guarded
from stagerun.cli.options import schedule_options

MOST_TILES = 10_000


@click.command(short_help="A contact sheet of records, or of what a stage makes of them.")
@schedule_options
@click.option("--stage", metavar="NAME", help="Show what this stage's network gets: cropped, mirrored, coloured ...")
@click.option("--val", is_flag=True, help="The validation set; with --stage, as it is evaluated.")
@click.option(
    "--number",
    type=click.IntRange(1, MOST_TILES),
    metavar="N",
    default=32,
    show_default=True,
    help="How many pictures.",
)
@click.option(
    "--first",
    type=click.IntRange(0),
    metavar="K",
    help="Begin with record K; with --stage, with its image K.  [default: 0]",
)
@click.option(
    "--random", "drawn", type=click.IntRange(0, 2**64 - 1), metavar="SEED", help="Some of all, drawn by this seed."
)
@click.option(
    "--size",
    type=click.IntRange(64, 2048),
    metavar="PIXELS",
    default=160,
    show_default=True,
    help="Of the square that each picture is fitted into.",
)
@click.option(
    "--output", metavar="FILE", type=click.Path(dir_okay=False), default="sheet.png", show_default=True, help="The PNG."
)
@guarded
def show(
    folder: str,
    overrides: tuple[str, ...],
    stage: str | None,
    val: bool,
    number: int,
    first: int | None,
    drawn: int | None,
    size: int,
    output: str,
) -> None:
    """Makes a PNG of many images, each with its key and its label, with the class's name where the side file has it.

    DIR is an LMDB's folder, or a schedule's: then of the images it trains on. Without --stage they are shown as they are stored.
    With --stage they are those that the stage trains on, in its order, with what it draws for each of them, as the network gets
    them; three things differ, since a picture can't show them: lighting is rounded and clipped to 0 .. 255, cutout has the
    colour of mean_value, which is 0 for the network, and mixup, cutmix and label_smoothing are left out.

    A record that can't be used has the reason in its place; the exit code is then 65. With --stage and `on_bad_record: REPLACE`
    it is the record that is trained on in its place, and the bad one is named; the exit code is 65 where a run would end.
    """
    from stagerun.cli.showing import ShowOptions, show_images

    show_images(
        ShowOptions(
            folder=folder,
            overrides=overrides,
            stage=stage,
            val=val,
            number=number,
            first=first,
            random=drawn,
            box=size,
            output=output,
        )
    )
