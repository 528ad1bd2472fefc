"""`stagerun data ...`: images in, out, and looked at."""

from collections.abc import Callable
from typing import Any

import click

from stagerun.cli.commands_data_scratch import stage, unstage
from stagerun.cli.commands_data_show import show
from stagerun.cli.ending import guarded

THREADS = click.option(
    "--threads", type=click.IntRange(1), metavar="N", help="Threads.  [default: one per processor of this process]"
)
MAX_BAD = click.option(
    "--max-bad",
    type=click.IntRange(0),
    metavar="N",
    default=0,
    show_default=True,
    help="Images that can't be used are left out and listed; above so many nothing is made.",
)
RESTART = click.option("--restart", is_flag=True, help="Begin anew, whatever an interrupted command has made.")
# Those of stagerun.tools.data.sources, which `stagerun check` must not wait for.
FORMATS = ("folder", "list", "imagenet", "cifar", "idx", "tfrecord", "recordio")
SPLITS = ("train", "val", "test")
JSON = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")


class InOrder(click.Group):
    """Its commands are listed in the order of their use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(cls=InOrder)
def data() -> None:
    """Makes, checks and shows the LMDBs that a schedule reads.

    Lines like `libpng warning: ...` or `Corrupt JPEG data: ...` are said by the libraries that decode. They name no image and need
    no answer: stagerun says itself which images can't be used.
    """


def source_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """What can't be told from SOURCE; the names of `SourceOptions`."""
    for decorate in (
        click.option("--labels", metavar="FILE", help="idx: the labels, where their name isn't that of the images."),
        click.option(
            "--split",
            type=click.Choice(SPLITS),
            help="cifar, idx, imagenet, tfrecord: which part, where SOURCE holds several.  [default: train]",
        ),
        click.option("--synsets", metavar="FILE", help="imagenet: the classes in the order of their labels."),
        click.option("--ground-truth", metavar="FILE", help="imagenet: the labels of the validation images."),
        click.option("--root", metavar="DIR", help="list: where its paths begin.  [default: the list's folder]"),
        click.option("--format", type=click.Choice(FORMATS), help="Of SOURCE.  [default: by its content]"),
    ):
        command = decorate(command)
    return command


def resize_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for name, help_text in (
        ("--resize-width", "... and this width."),
        ("--resize-height", "Resize: to exactly this height ..."),
        ("--resize-shorter", "Resize: the shorter side to N pixels."),
    ):
        command = click.option(name, type=click.IntRange(1), metavar="N", help=help_text)(command)
    text = "What shows where an image is transparent: a colour's name as in CSS, or #rrggbb.  [default: white]"
    return click.option("--background", metavar="COLOUR", help=text)(command)


@click.command("import", short_help="Makes an LMDB from folders, lists, archives, CIFAR, IDX, TFRecord or RecordIO.")
@click.argument("source", metavar="SOURCE")
@click.argument("out", metavar="OUT")
@source_options
@click.option(
    "--raw", is_flag=True, help="Store pixels (channels x height x width, B, G, R) in place of encoded images."
)
@resize_options
@click.option(
    "--quality",
    type=click.IntRange(1, 100),
    metavar="Q",
    help="Encode every image anew, as JPEG of this quality.  [default: only those that are resized, with 95]",
)
@click.option("--seed", type=click.IntRange(0, 2**64 - 1), metavar="N", help="Of the shuffle.  [default: 1]")
@click.option("--no-shuffle", is_flag=True, help="Keep the source's order.")
@click.option(
    "--limit", type=click.IntRange(1), metavar="N", help="Only the first N images after the shuffle, as a trial."
)
@MAX_BAD
@THREADS
@RESTART
@guarded
def import_command(**given: Any) -> None:
    """Makes an LMDB of Caffe's Datum records from a set of labelled images.

    SOURCE is a folder of class folders, a list of `path label` lines as of Caffe's convert_imageset, ImageNet's own archives
    (never unpacked), CIFAR in its binary version, IDX files (MNIST), TFRecord shards or MXNet's RecordIO. OUT is a new folder,
    which Caffe reads too: keys are as convert_imageset makes them, 00000000_RELATIVE/PATH.JPEG, numbered after one shuffle of
    all images, so that every stretch of the LMDB holds a mixture of classes.

    In class folders, at any depth, files named .jpg .jpeg .jpe .jfif .png .ppm .bmp .pgm .tif .tiff .webp .gif are taken, in small
    or capital letters; others are counted and listed, but for hidden ones.

    JPEGs and PNGs of 8 bits keep their bytes unless they are resized. Resizing uses area interpolation to shrink and linear to
    grow. What is odd is taken by rule, counted, and listed in OUT/stagerun-import.txt: CMYK becomes JPEG in B, G, R; palettes,
    16 bits, alpha channels (composited on white, or --background), GIF, BMP, TIFF, WebP and PPM become PNG of 8 bits; EXIF rotation
    is not applied, as in Caffe. What can't be used is left out: empty, cut off, damaged, not an image, above 100 million pixels. CIFAR and IDX are
    stored as pixels.

    Interrupted, by whatever means, the same command goes on where it was, and the result is the same.
    """
    from stagerun.cli.data_making import import_images

    import_images(**given)


@click.command(short_help="Arranges the JPEGs of an LMDB anew, losslessly, so that they decode faster.")
@click.argument("source", metavar="DIR")
@click.argument("out", metavar="OUT")
@THREADS
@RESTART
@guarded
def prepare(source: str, out: str, threads: int | None, restart: bool) -> None:
    """Makes a copy OUT of the LMDB in folder DIR, whose JPEGs decode faster, with the same pixels, bit for bit.

    They become baseline JPEGs with a restart marker every 4 blocks, or as near to that as divides a row; so a training's random
    crop is decoded without the rest. OUT is an ordinary LMDB that Caffe reads too, about as large as DIR. Every image is decoded
    before and after and compared. PNGs, raw pixels and CMYK are copied as they are.

    Interrupted, by whatever means, the same command goes on where it was.
    """
    from stagerun.cli.data_making import prepare_lmdb

    prepare_lmdb(source, out, threads, restart)


@click.command(short_help="Makes the side file of an LMDB that Caffe wrote.")
@click.argument("folder", metavar="DIR")
@click.option("--classes", metavar="FILE", help="Names of the classes, one per line, by label.")
@click.option("--no-mean", is_flag=True, help="Decode no image; the mean pixel stays unknown.")
@click.option("--force", is_flag=True, help="Make it again if it is there.")
@click.option(
    "--max-bad",
    type=click.IntRange(0),
    metavar="N",
    default=0,
    show_default=True,
    help="Records that can't be used are listed; above so many no side file is made.",
)
@THREADS
@guarded
def index(folder: str, classes: str | None, no_mean: bool, force: bool, max_bad: int, threads: int | None) -> None:
    """Makes DIR/stagerun-index.safetensors: what is known about each record of the LMDB in folder DIR.

    That is place, length, digest, label and image size of each record, the names of the classes, the mean pixel and a
    fingerprint of the whole. With it a run starts sooner, and `stagerun data verify` finds every changed byte. Every record is
    read once, and every image decoded. `stagerun data import` and `prepare` make it by themselves.

    A record that can't be used is named, and exit code 65 says that there is one; with --max-bad the side file is made all the
    same, and knows it as unusable.
    """
    from stagerun.cli.data_looking import make_index

    make_index(folder, classes, not no_mean, force, max_bad, threads)


@click.command(short_help="Counts, sizes, classes, and how fast it can be read here.")
@click.argument("folder", metavar="DIR")
@click.option("--classes", is_flag=True, help="Every class with its number of images.")
@JSON
@guarded
def info(folder: str, classes: bool, as_json: bool) -> None:
    """Shows what is in the LMDB in folder DIR, and how it can be decoded on this machine.

    Without a side file, sizes and kinds are those of 500 records, evenly spread, and the classes are unknown.
    """
    from stagerun.cli.data_looking import show_info

    show_info(folder, classes, as_json)


@click.command(short_help="Every byte against its digest.")
@click.argument("folder", metavar="DIR")
@click.option("--decode", is_flag=True, help="Decode every image, too.")
@THREADS
@JSON
@guarded
def verify(folder: str, decode: bool, threads: int | None, as_json: bool) -> None:
    """Reads the LMDB in folder DIR and names every record that is damaged; exit code 65 if there is one.

    Every digest, place, label and size is compared with the side file. Without a side file the records are only parsed.
    """
    from stagerun.cli.data_looking import verify_lmdb

    verify_lmdb(folder, decode, threads, as_json)


COMMANDS: tuple[click.Command, ...] = (import_command, index, info, verify, prepare, show, stage, unstage)
for command in COMMANDS:
    data.add_command(command)
