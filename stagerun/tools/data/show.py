"""`stagerun data show`: a contact sheet of an LMDB's records, or of what a stage's network gets."""

import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont, ImageOps

from stagerun.base import recipe
from stagerun.base.errors import DataError, UsageError, listing, nearest
from stagerun.command.ending import show
from stagerun.command.options import command, flag, option
from stagerun.command.shared import Folder, Overrides
from stagerun.data import datum, loaders
from stagerun.data.importing import have
from stagerun.data.loader import PythonTransform
from stagerun.data.records import LmdbSource
from stagerun.system.files import write_output
from stagerun.system.image_sets import is_there, with_imports
from stagerun.tools.data.records import Shown, classes_of
from stagerun.tools.output import find_target, plan_of

Tile = tuple[str, int, NDArray[np.uint8] | str]  # key, label, the picture in B, G, R or grey; or what is wrong with it


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowOptions:
    folder: Folder
    overrides: Overrides = ()
    stage: str | None = option("--stage NAME", "The stage of a schedule.  [default: the first]")
    val: bool = flag("--val", "The validation set, as the stage is evaluated on it.")
    number: int = option("--number N", "The number of pictures.", type=click.IntRange(1, 500), default=32)
    first: int = option(
        "--first K", "Begin with record K, or the stage's image K.", type=click.IntRange(0, 2**40), default=0
    )
    size: int = option("--size PIXELS", "The square of each picture.", type=click.IntRange(64, 512), default=160)
    output: str = option("--output FILE", "The PNG.", type=click.Path(dir_okay=False), default="sheet.png")


@command("show")
def show_images(options: ShowOptions) -> None:
    """Makes a PNG of many images, each with its key and its label, with the class's name if the side file has it.

    DIR is an LMDB's folder: its records are shown as they are stored. Or DIR is a schedule's folder: then it shows the images that a stage
    trains on, in its order and with its random numbers, as its network gets them, with two exceptions: cutout is black, and not the mean;
    mixup, cutmix and label_smoothing are left out. `python` in transform_param is imported and called.

    A record that can't be used has the reason in its place; the exit code is then 65.
    """
    if not (Path(options.folder) / "data.mdb").exists():
        target = find_target(options.folder, options.overrides, None)
        if target.schedule is None:
            raise UsageError(f"{options.folder} is an output folder", "give the schedule's folder, or an LMDB's")
        records, images = _staged(target.schedule, target.out, options)
    elif options.stage or options.val or options.overrides:
        raise UsageError(f"{options.folder} is an LMDB; --stage, --val and --set are for schedules", "leave them out")
    else:
        records = LmdbSource(options.folder)
        images = _stored(records, _chosen(options, records))
    tiles = list(images)
    write_output(Path(options.output), _png(tiles, classes_of(records), options.size))
    show(f"wrote {options.output}: {len(tiles)} of {len(records)} images in {records.name}")
    if mistakes := [picture for _, _, picture in tiles if isinstance(picture, str)]:
        raise DataError("\n  ".join([f"{len(mistakes)} of them can't be used:", *mistakes[:5]]))


def _chosen(options: ShowOptions, records: LmdbSource) -> range:
    return range(min(options.first, len(records) - 1), min(options.first + options.number, len(records)))


def _stored(records: LmdbSource, chosen: range) -> Iterator[Tile]:
    for i in chosen:
        key = records.key(i).decode(errors="backslashreplace")
        try:
            fields = datum.parse(records.get(i)[1])
            channels = 3 if fields.encoded or fields.channels not in (1, 3) else fields.channels
            yield key, fields.label, datum.picture_of(fields, channels).decode(None, 1)
        except DataError as error:
            yield key, -1, f"{records.name}: record `{key}`: {error.message}"


def _staged(schedule: recipe.Schedule, out: Path, options: ShowOptions) -> tuple[LmdbSource, Iterator[Tile]]:
    names = [stage.name for stage in schedule.stages]
    if options.stage is not None and options.stage not in names:
        hint = nearest(options.stage, names) or f"the stages are {listing(names)}"
        raise UsageError(f"no stage is named `{options.stage}`", hint)
    stage = schedule.stage(options.stage or names[0])
    if options.val and not stage.data.val:
        raise UsageError("the schedule has no data.val", "leave --val out, or write `val { source: ... }` under `data`")
    records = _opened(schedule, out, stage.data.val[0] if options.val else stage.data.train)
    if options.val:
        loader, positions = loaders.evaluation_loader(records, stage), _chosen(options, records)
    else:
        transform, stages = stage.solver.transform, plan_of(schedule, out).stages
        start = next(one.position for one in stages if one.stage.name == stage.name)
        positions = range(start + options.first, start + options.first + options.number)
        augment = None
        if transform.changes_colours:
            from stagerun.engine.augment import make_augment  # imports torch

            augment = make_augment(transform)
        python = PythonTransform(transform.python, schedule.python) if transform.python is not None else None
        train = replace(stage.data.train, labels=None)  # the LMDB's labels are shown
        unlabelled = replace(stage, data=replace(stage.data, train=train))
        loader = loaders.training_loader(records, schedule, unlabelled, python=python, augment=augment, start=start)

    def images() -> Iterator[Tile]:
        for position in positions:
            key = f"position {position}"
            try:
                job = loader.plan(position, 1)  # without crop_size it decodes the image
                key = records.key(job.indices[0]).decode(errors="backslashreplace")
                loader.fill(job, 0, 1)
            except DataError as error:
                yield key, -1, error.message
                continue
            image = job.made.images[0].copy()
            if job.made.cutout is not None:
                top, left, height, width = job.made.cutout[0].tolist()
                image[top : top + height, left : left + width] = 0
            yield key, int(job.made.labels[0]), image

    return records, images()


def _opened(schedule: recipe.Schedule, out: Path, source: recipe.Source) -> LmdbSource:
    """Return the records of a source, which are imported now if it is a folder of images."""
    schedule = with_imports(schedule, out)
    target = schedule.imports.get(source.path)
    if target is not None and not is_there(target):
        with Shown("import") as shown:
            have(source.path, target, schedule.data, lambda: False, lambda p: shown.progress(p.done, p.total))
    return LmdbSource(schedule.lmdb(source), source.images)


_LINE, _GAP = 16, 8  # pixels


def _png(tiles: Sequence[Tile], classes: Sequence[str], box: int) -> bytes:
    """Return the sheet, about half as wide again as high: each picture at the lower left of a square of `box` pixels, above its lines."""
    columns = math.ceil(math.sqrt(1.5 * len(tiles)))
    step, high, letters, font = box + _GAP, box + 2 * _LINE + _GAP, box // 7, ImageFont.load_default(13)
    paper = Image.new("RGB", (columns * step + _GAP, -(-len(tiles) // columns) * high + _GAP), "white")
    draw = ImageDraw.Draw(paper)
    for i, (key, label, picture) in enumerate(tiles):
        left, top = _GAP + i % columns * step, _GAP + i // columns * high
        if isinstance(picture, str):
            draw.text((left, top), "unusable", "darkred", font)
        else:
            image = Image.fromarray(picture[:, :, ::-1] if picture.shape[2] == 3 else picture[:, :, 0])
            image = ImageOps.contain(image, (box, box), Image.Resampling.BOX)  # enlarges without smoothing
            paper.paste(image, (left, top + box - image.height))
            name = f"{label} {classes[label]}" if 0 <= label < len(classes) else f"label {label}"
            draw.text((left, top + box + _LINE), name[:letters], "black", font)
        draw.text((left, top + box), key[-letters:], "black", font)  # keys differ at their end
    file = io.BytesIO()
    paper.save(file, "PNG")
    return file.getvalue()
