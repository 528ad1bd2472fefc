"""`stagerun import ...`: schedules written for another program."""

from typing import Any

import click

from stagerun.cli.ending import guarded


@click.group("import")
def import_group() -> None:
    """Makes a schedule's folder of another program's files. (Images become LMDBs with `stagerun data import`.)"""


@click.command(short_help="Makes a schedule of Caffe's solver files and nets.")
@click.argument("folder", metavar="FOLDER")
@click.option("--out", metavar="DIR", required=True, help="The new schedule's folder: solvers/NAME.")
@click.option(
    "--order",
    metavar="STAGE,STAGE...",
    help="The solver files in their order, each trained from the end of the one before: `init,cyc1,collapse` or file names.  "
    "[default: as the `caffe train` lines in FOLDER's README or script say]",
)
@click.option(
    "--workers",
    type=click.IntRange(1),
    metavar="N",
    help="Processes that Caffe ran in, whose batches add up.  [default: as `mpirun -n` and `-gpu` in those lines say, else 1; "
    "where they leave it open, as `-gpu all`, batch_size is asked for]",
)
@click.option(
    "--root",
    metavar="DIR",
    help="Where Caffe is started, so where the paths in its files begin.  [default: looked for from FOLDER upward]",
)
@click.option(
    "--model", metavar="NAME", help="stagerun's network that stands for the net.  [default: where it is sure]"
)
@click.option(
    "--images", type=click.IntRange(1), metavar="N", help="Training images.  [default: counted where they are]"
)
@click.option(
    "--val-images", type=click.IntRange(1), metavar="N", help="Images of the evaluation.  [default: likewise]"
)
@click.option(
    "--no-nets",
    is_flag=True,
    help="Imports the solver files alone, where their nets are lost. What nets say is told by the options below, --model, "
    "--images and --val-images, and asked for in schedule.prototxt where it isn't. Not with --workers or --root.",
)
@click.option(
    "--batch-size", type=click.IntRange(1), metavar="N", help="With --no-nets: images of one update, of all workers."
)
@click.option(
    "--device-batch-size",
    type=click.IntRange(1),
    metavar="N",
    help="With --no-nets: those that a device takes at once: a worker's batch_size in Caffe.",
)
@click.option("--classes", type=click.IntRange(1), metavar="N", help="With --no-nets: classes of the network.")
@click.option("--train-source", metavar="LMDB", help="With --no-nets: the training images.")
@click.option("--val-source", metavar="LMDB", help="With --no-nets: those of the evaluation.")
@guarded
def caffe(folder: str, out: str, order: str | None, root: str | None, no_nets: bool, **told: Any) -> None:
    """Makes a schedule's folder of a folder of Caffe's: BVLC's, Intel's or SURFsara's.

    Solvers become stages with the same learning rate, batch, weight decay, momentum, transform and multipliers. Which solvers,
    in which order, and what each starts from, say the `caffe train` lines of a README or script in FOLDER (`--weights
    PREFIX_iter_N.caffemodel`, `--snapshot PREFIX_iter_N.solverstate`), or --order; then those lines still say how many workers
    there were, and where in the stage before each starts. Nothing in FOLDER is run or changed.

    Mistakes stop it, all at once, each with its place: a net that isn't there, a field that no Caffe has, weights with the wrong
    ending or that no stage makes. What stagerun has no word for is listed, and stands in the head of schedule.prototxt too. What
    can't be known (the network, the number of images, a mean image, the GPUs of `-gpu all`) is asked in the files: DIR is
    written, `stagerun check` finds it, and the exit code is 64. Where the nets are lost, --no-nets imports the solvers.
    """
    from stagerun.caffe_import.convert import Wanted
    from stagerun.cli.importing import import_caffe

    stages = tuple(word.strip() for word in order.split(",")) if order is not None else ()
    import_caffe(folder, out, root, Wanted(order=stages, nets=not no_nets, **told))


import_group.add_command(caffe)
