"""What `import caffe` does: reads, checks what it made before it writes it, and shows the plan."""

import io
import os
import re
import sys
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass

import click
from google.protobuf.message import DecodeError

from stagerun.base.errors import ExitCode, StagerunError, UsageError
from stagerun.base.snapshots import Inventory
from stagerun.command.ending import show, tell
from stagerun.command.options import argument, command, flag, option
from stagerun.language import load
from stagerun.language.folder import refuse_existing, write_folder
from stagerun.language.proto import caffe_pb2
from stagerun.language.resolve import first_record
from stagerun.plan import make_plan
from stagerun.plan.render import render_text
from stagerun.system.image_sets import first_value
from stagerun.system.lmdb_file import check_file
from stagerun.tools.caffe.convert import Wanted, convert
from stagerun.tools.caffe.disk import CaffeFolder
from stagerun.tools.caffe.write import check_lines, folder_lines, left_text, text_of_lines


@dataclass(frozen=True, slots=True)
class CaffeOptions:
    """What `Wanted` says, as it is written on the command line."""

    workers: int | None = option(
        "--workers N",
        "Processes that Caffe ran in, whose batches add up.  [default: as `mpirun -n` and `-gpu` in those lines say, else 1]",
        type=click.IntRange(1),
    )
    overlap: bool = flag(
        "--overlap",
        "Writes the rates of SURFsara's and Intel's usual build for several nodes, which applies the gradient of an iteration in the "
        "next one, with its rate.",
    )
    root: str | None = option(
        "--root DIR",
        "Where Caffe is started, so where the paths in its files begin.  [default: looked for from FOLDER upward]",
    )
    images: int | None = option(
        "--images N", "Training images.  [default: counted where they are]", type=click.IntRange(1)
    )
    val_images: int | None = option(
        "--val-images N", "Images of the evaluation.  [default: likewise]", type=click.IntRange(1)
    )
    no_nets: bool = flag(
        "--no-nets",
        "Imports the solver files alone, where their nets are lost. What nets say is asked for in schedule.prototxt. Not with --workers, "
        "--overlap or --root.",
    )


@command()
def caffe(
    folder: str = argument("FOLDER"),
    out: str = option("--out DIR", "The new schedule's folder: solvers/NAME.", default=MISSING),
    order: str | None = option(
        "--order STAGE,STAGE...",
        "The solver files in their order, each trained from the end of the one before: `init,cyc1,collapse` or file names.  "
        "[default: as the `caffe train` lines in FOLDER's README or script say]",
    ),
    *,
    options: CaffeOptions,
) -> None:
    """Makes a schedule's folder of a folder of Caffe's: BVLC's, Intel's or SURFsara's.

    Solvers become stages with the same learning rate, batch, weight decay, momentum and transform; their nets are copied beside and
    trained as they are. Which solvers, in which order, and what each starts from, say the `caffe train` lines of a README or script in
    FOLDER (`--weights PREFIX_iter_N.caffemodel`, `--snapshot PREFIX_iter_N.solverstate`), or --order; then those lines still say how many
    workers there were, and where in the stage before each starts. Nothing in FOLDER is run or changed.

    Mistakes stop it, all at once, each with its place: a net that isn't there, a field that no Caffe has, weights with the wrong ending or
    that no stage makes, a layer that is none of an image classifier's. What stagerun has no word for is listed, and stands in the head of
    schedule.prototxt too. What can't be known (the number of images and their channels, a mean image, the GPUs of `-gpu all`) is asked in
    the files: DIR is written, `stagerun check` finds it, and the exit code is 64. Where the nets are lost, --no-nets imports the solvers.
    """
    given = asdict(options)
    root = given.pop("root")
    stages = tuple(word.strip() for word in order.split(",")) if order is not None else ()
    wanted = Wanted(order=stages, nets=not given.pop("no_nets"), **given)
    if not wanted.nets:
        for name, value in (("--workers", wanted.workers), ("--overlap", wanted.overlap or None), ("--root", root)):
            if value is not None:
                raise UsageError(f"`{name}` with `--no-nets`", "leave it out: it is about nets, which are not read")
    refuse_existing(out)
    converted = convert(CaffeFolder(folder, root, _count), wanted)
    out = os.path.normpath(out)
    files = folder_lines(converted, _name(out), folder)
    asked = check_lines(files, converted.written, converted.found, os.path.abspath(out), out)
    texts = {name: text_of_lines(lines) for name, lines in files.items()}
    write_folder(out, texts | {net.name: net.text for net in converted.written})
    if left := left_text(converted.found):
        show(left + "\n")
    if asked:
        tell("\n\n".join(problem.render() for problem in asked))
        tell(f"\n{out} is written; fill in or mend the above there, then `stagerun check {out}`")
        sys.exit(ExitCode.RECIPE)
    show(render_text(make_plan(load(out), Inventory())))
    show(f"\n{out}: written; read it, then `stagerun plan {out}`")


def _name(out: str) -> str:
    """The folder's name, as far as a schedule may have it."""
    return (
        re.sub(r"[^A-Za-z0-9_.-]", "_", os.path.basename(os.path.abspath(out)), flags=re.ASCII).lstrip(".") or "caffe"
    )


def _count(path: str) -> tuple[int, int | None] | None:
    """Records of an LMDB, and the channels of the first one; None where they are unknown; `run` will say why."""
    with suppress(StagerunError):
        number, first = check_file(path), first_record(path)
        return number, first.channels or _channels_of_image(path) if first is not None else None
    return None


def _channels_of_image(path: str) -> int | None:
    """The channels of the first record of an LMDB, an encoded image, whose header says them; None where it can't be read."""
    from PIL import Image

    with suppress(DecodeError, OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        datum = caffe_pb2.Datum.FromString(first_value(path))
        with Image.open(io.BytesIO(datum.data)) as image:
            return 1 if image.mode in ("1", "L", "I", "I;16") else 3
    return None
