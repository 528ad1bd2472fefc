"""`stagerun data show`: from an LMDB or a stage to a contact sheet."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click

from stagerun.base.errors import DataError, UsageError, listing, nearest
from stagerun.base.recipe import ChannelOrder, Schedule, Solver, Source, Stage
from stagerun.base.snapshots import Inventory
from stagerun.base.text import count, first
from stagerun.command.ending import show
from stagerun.command.options import command, flag, option
from stagerun.command.shared import Folder, Overrides, output_folder
from stagerun.data.importing.first_use import have
from stagerun.data.index import printable
from stagerun.data.jpeg import Rectangle
from stagerun.data.loader import Loader
from stagerun.data.loaders import evaluation_loader, training_loader
from stagerun.data.python_transform import PythonTransform
from stagerun.data.records import LmdbSource
from stagerun.language import load, require_folders
from stagerun.language.resolve import SCHEDULE_FILE
from stagerun.plan import make_plan
from stagerun.system.files import write_output
from stagerun.system.imports import is_there, with_imports
from stagerun.tools.data import contact_sheet
from stagerun.tools.data.contact_sheet import Tile
from stagerun.tools.data.pictures import classes_of, label_text, stored_tile
from stagerun.tools.data.progress import Shown

_MOST_MISTAKES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowOptions:
    folder: Folder
    overrides: Overrides = ()
    stage: str | None = option("--stage NAME", "Show what this stage's network gets: cropped, mirrored, coloured ...")
    val: bool = flag("--val", "The validation set; with --stage, as it is evaluated.")
    number: int = option("--number N", "How many pictures.", type=click.IntRange(1, 10_000), default=32)
    first: int = option(
        "--first K", "Begin with record K; with --stage, with its image K.", type=click.IntRange(0, 2**40), default=0
    )
    size: int = option(
        "--size PIXELS", "Of the square that each picture is fitted into.", type=click.IntRange(64, 2048), default=160
    )
    output: str = option("--output FILE", "The PNG.", type=click.Path(dir_okay=False), default="sheet.png")


@dataclass(frozen=True, slots=True)
class Show:
    """What goes on the sheet."""

    heading: tuple[str, ...]
    tiles: Sequence[Tile]


@command("show")
def show_images(options: ShowOptions) -> None:
    """Makes a PNG of many images, each with its key and its label, with the class's name where the side file has it.

    DIR is an LMDB's folder, or a schedule's: then of the images it trains on. Without --stage they are shown as they are stored. With
    --stage they are those that the stage trains on, in its order, with what it draws for each of them, as the network gets them; two things
    differ, since a picture can't show them: cutout has the colour of mean_value, which is 0 for the network, and mixup, cutmix and
    label_smoothing are left out.

    `python` in transform_param is imported and called, as in training.

    A record that can't be used has the reason in its place; the exit code is then 65.
    """
    if contact_sheet.pixels_of(options.number, 3, options.size) > contact_sheet.MOST_PIXELS:
        raise UsageError(
            f"a sheet of {options.number} pictures of {options.size} pixels is too large", "lower --number or --size"
        )
    path = Path(options.output)
    if not os.path.isdir(path.parent):
        raise UsageError(f"there is no folder {path.parent}", "make it, or give another file with --output")
    found = shown_of(options)
    write_output(path, contact_sheet.png(contact_sheet.sheet(found.tiles, found.heading, options.size)))
    show("\n".join((*found.heading, f"wrote {path}: {count(len(found.tiles), 'picture')}")))
    wrong = [tile.wrong for tile in found.tiles if tile.wrong]
    if len(wrong) == 1:
        raise DataError(wrong[0])
    if wrong:
        raise DataError("\n  ".join([f"{len(wrong)} images can't be used:", *first(wrong, _MOST_MISTAKES)]))


def shown_of(options: ShowOptions) -> Show:
    """What goes on the sheet. RecipeError, UsageError, DataError."""
    if not _is_schedule(options.folder):
        for name, given in (("--stage", options.stage), ("--val", options.val), ("--set", options.overrides)):
            if given:
                message = f"{options.folder} is not a schedule's folder, and {name} is for one"
                raise UsageError(message, f"leave {name} out")
        return _stored(LmdbSource(options.folder), options)
    schedule = load(options.folder, options.overrides)
    names, stage = [stage.name for stage in schedule.stages], options.stage
    if stage is not None and stage not in names:
        raise UsageError(f"no stage is named `{stage}`", nearest(stage, names) or f"the stages are {listing(names)}")
    data = schedule.data if stage is None else schedule.stage(stage).data
    source = data.train if not options.val else data.val[0] if data.val else None
    if source is None:
        raise UsageError("the schedule has no data.val", "leave --val out, or write `val { source: ... }` under `data`")
    records = LmdbSource(_lmdb(schedule, source), source.images)
    return _stored(records, options) if stage is None else _staged(schedule, schedule.stage(stage), records, options)


def _lmdb(schedule: Schedule, source: Source) -> str:
    """Where the images are read: of a folder the LMDB that `run` has without --out, which is made now where there is none."""
    require_folders(schedule)
    schedule = with_imports(schedule, output_folder(schedule.name, None))
    made = schedule.imports.get(source.path)
    if made is not None and not is_there(made):
        with Shown("import") as shown:
            have(
                source.path, made, schedule.data, lambda: False, lambda done: shown.progress(done.done, done.total)
            ).close()
    return schedule.lmdb(source)


def _choose(options: ShowOptions, images: int, noun: str, endless: bool = False) -> tuple[range, str]:
    """Which of `images` to show, and the words for it. `endless`: they come round again, so that any number is one of them."""
    if options.first >= images and not endless:
        message = f"--first {options.first}: there are {images} {noun}, numbered from 0"
        raise UsageError(message, f"give at most {images - 1}")
    end = options.first + options.number
    if not endless:
        end = min(end, images)
    words = f"{noun} {options.first} to {end - 1}" + ("" if endless else f" of {images:,}")
    return range(options.first, end), words


def _stored(records: LmdbSource, options: ShowOptions) -> Show:
    """The records as they are."""
    chosen, words = _choose(options, len(records), "records")
    classes = classes_of(records)
    tiles = [stored_tile(records, i, classes) for i in chosen]
    return Show((f"{records.name}: {words}",), tiles)


def _staged(schedule: Schedule, stage: Stage, records: LmdbSource, options: ShowOptions) -> Show:
    """Images as the stage's network gets them."""
    solver, start, train = stage.solver, 0, not options.val
    transform = solver.transform if train else solver.test_transform
    chosen, words = _choose(options, len(records), "images", endless=train)
    if train:
        start = next(s.position for s in make_plan(schedule, Inventory()).stages if s.stage.name == stage.name)
        heading = f"{schedule.name}, stage {stage.name}, training: {words}, counted from its start"
    else:
        heading = f"{schedule.name}, stage {stage.name}, evaluation: {words}"
    loader = _loader(schedule, stage, records, train, start)
    classes = classes_of(records)
    zero = transform.mean_value or (0.0,)  # the colour (B, G, R, or one number) that is 0 for the network
    if transform.channel_order is ChannelOrder.RGB:
        zero = zero[::-1]
    tiles = [_staged_tile(records, loader, start + i, classes, zero) for i in chosen]
    headings = (heading, _approximations(solver) if train else "")
    return Show(tuple(filter(None, headings)), tiles)


def _loader(schedule: Schedule, stage: Stage, records: LmdbSource, train: bool, start: int) -> Loader:
    solver = stage.solver
    if not train:
        return evaluation_loader(records, stage)
    augment = None
    if solver.transform.changes_colours:
        from stagerun.engine.augment import make_augment  # imports torch

        augment = make_augment(solver.transform)
    name = solver.transform.python
    python = PythonTransform(name, schedule.python) if name is not None else None
    unlabelled = replace(stage.data, train=replace(stage.data.train, labels=None))  # what the LMDB says is shown
    stage = replace(stage, data=unlabelled)
    return training_loader(records, schedule, stage, python=python, augment=augment, start=start)


def _staged_tile(
    records: LmdbSource, loader: Loader, position: int, classes: Sequence[str], zero: Sequence[float]
) -> Tile:
    try:
        job = loader.plan(position, 1)
        key = printable(records.key(job.indices[0]))
    except DataError as error:  # without crop_size it looks at the image
        return Tile(None, (f"position {position}",), error.message)
    try:
        loader.fill(job, 0, 1)
    except DataError as error:
        return Tile(None, (key,), error.message)
    batch = job.made
    image = contact_sheet.as_trained(
        batch.images[0],
        None if batch.cutout is None else Rectangle(*batch.cutout[0].tolist()),
        zero,
    )
    return Tile(image.copy(), (key, label_text(int(batch.labels[0]), classes)))


def _approximations(solver: Solver) -> str:
    """What the sheet shows otherwise than the network sees it in training, or ''."""
    left_out = [name for name in ("mixup_alpha", "cutmix_alpha", "label_smoothing") if getattr(solver, name)]
    said = ["cutout has the colour that is 0 for the network"] * bool(solver.transform.cutout_size)
    said += [f"not shown: {', '.join(left_out)}"] * bool(left_out)
    return "; ".join(said)


def _is_schedule(folder: str) -> bool:
    """Whether it is a schedule's folder, else an LMDB's. DataError if it is missing, UsageError if it is neither."""
    path, hint = Path(folder), "give the folder of a schedule, or that of an LMDB"
    if os.path.exists(path / SCHEDULE_FILE):
        return True
    if os.path.exists(path / "data.mdb"):
        return False
    if not os.path.lexists(path):
        raise DataError(f"{folder}: no such folder", hint)
    if not os.path.isdir(path):
        raise UsageError(f"{folder}: is not a folder", hint)
    text = f"{folder} is neither a schedule's folder (it has no {SCHEDULE_FILE}) nor an LMDB's (no data.mdb)"
    raise UsageError(text, hint)
