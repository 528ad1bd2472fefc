"""What `import caffe` does: reads, writes, and shows the plan, or what is still to be filled in."""

import os
import re
import sys
from dataclasses import MISSING

import click

from stagerun.base.errors import ExitCode, RecipeError
from stagerun.base.snapshots import Inventory
from stagerun.caffe.importer.convert import convert
from stagerun.caffe.importer.folder import CaffeFolder
from stagerun.caffe.importer.write import about_of, files_of, left_out
from stagerun.command.ending import show, tell
from stagerun.command.options import argument, command, flag, option
from stagerun.language import load
from stagerun.language.disk import refuse_existing, write_folder
from stagerun.language.tree import quoted
from stagerun.plan import make_plan
from stagerun.plan.render import render_text


@command()
def caffe(
    folder: str = argument("FOLDER"),
    out: str = option("--out DIR", "The new schedule's folder: solvers/NAME.", default=MISSING),
    order: str | None = option(
        "--order STAGE,STAGE...",
        "The solver files in their order, each trained from the end of the one before: `init,cyc1,collapse` or file names.  "
        "[default: as the `caffe train` lines in FOLDER's README or script say]",
    ),
    workers: int | None = option(
        "--workers N",
        "Processes that Caffe ran in, whose batches add up.  [default: as `mpirun -n` and `-gpu` in those lines say, else 1]",
        type=click.IntRange(1),
    ),
    overlap: bool = flag(
        "--overlap",
        "Writes the rates of SURFsara's and Intel's usual build for several nodes, which applies the gradient of an iteration in the "
        "next one, with its rate.",
    ),
    images: int | None = option(
        "--images N", "Training images.  [default: counted where they are]", type=click.IntRange(1)
    ),
    val_images: int | None = option(
        "--val-images N", "Images of the evaluation.  [default: likewise]", type=click.IntRange(1)
    ),
) -> None:
    """Makes a schedule's folder of a folder of Caffe's: BVLC's, Intel's or SURFsara's.

    Solvers become stages with the same learning rate, batch, weight decay, momentum and transform; their nets are copied beside and
    trained as they are. Which solvers, in which order, and what each starts from, say the `caffe train` lines of a README or script in
    FOLDER (`--weights PREFIX_iter_N.caffemodel`, `--snapshot PREFIX_iter_N.solverstate`), or --order; then those lines still say how many
    workers there were, and where in the stage before each starts. Nothing in FOLDER is run or changed.

    Mistakes stop it, all at once, each with its place: a net that isn't there, a field that no Caffe has, weights with the wrong ending or
    that no stage makes, a layer that is none of an image classifier's. What stagerun has no word for is listed, and stands in the head of
    schedule.prototxt too. What can't be known (the number of images and their channels, a mean image, the GPUs of `-gpu all`) is asked in
    the files: DIR is written, `stagerun check` finds it, and the exit code is 64. So is a value in them that can't be trained.
    """
    words = [word.strip() for word in order.split(",")] if order is not None else []
    refuse_existing(out)
    stages, settings, head, lost = convert(CaffeFolder(folder), words, workers, overlap, (images, val_images))
    out, left = os.path.normpath(out), left_out(lost)
    name = os.path.basename(os.path.abspath(out))
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", name, flags=re.ASCII).lstrip(".") or "caffe"
    head["seed"] = f"name: {quoted(name)}\n{head['seed']}"
    write_folder(out, files_of(stages, settings, head, about_of(stages, left, folder)))
    if left:
        show(left + "\n")
    try:
        plan = make_plan(load(out), Inventory())
    except RecipeError as error:
        tell("\n\n".join(problem.render() for problem in error.problems))
        tell(f"\n{out} is written; fill in or mend the above there, then `stagerun check {out}`")
        sys.exit(ExitCode.RECIPE)
    show(render_text(plan))
    show(f"\n{out}: written; read it, then `stagerun plan {out}`")
