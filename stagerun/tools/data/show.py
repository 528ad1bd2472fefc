"""`stagerun data show`: from an LMDB or a stage to a contact sheet."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click

from stagerun.base import order
from stagerun.base.errors import DataError, UsageError, listing, nearest
from stagerun.base.recipe import ChannelOrder, OnBadRecord, Schedule, Solver, Source, Stage
from stagerun.base.snapshots import Inventory
from stagerun.base.text import count
from stagerun.command.ending import show, tell
from stagerun.command.options import command, flag, option
from stagerun.command.progress import Shown
from stagerun.command.shared import Folder, Overrides, output_folder
from stagerun.data.bad_records import Bad, BadRecords, allowed, check
from stagerun.data.importing.first_use import have
from stagerun.data.importing.report import transparency_of
from stagerun.data.jpeg import Rectangle
from stagerun.data.lmdb_offsets import printable
from stagerun.data.loader import Loader
from stagerun.data.loaders import evaluation_loader, training_loader
from stagerun.data.python_transform import PythonTransform
from stagerun.data.records import LmdbSource
from stagerun.language import load, require_folders
from stagerun.plan import make_plan
from stagerun.system.files import write_output
from stagerun.system.imports import is_there, with_imports
from stagerun.tools.data import contact_sheet
from stagerun.tools.data.contact_sheet import Tile
from stagerun.tools.data.pictures import classes_of, label_text, stored_tile
from stagerun.train.output import is_schedule

_MOST_MISTAKES = 5
_MOST_POSITIONS = 2**62  # a position is an int64


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowOptions:
    folder: Folder
    overrides: Overrides = ()
    stage: str | None = option("--stage NAME", "Show what this stage's network gets: cropped, mirrored, coloured ...")
    val: bool = flag("--val", "The validation set; with --stage, as it is evaluated.")
    number: int = option("--number N", "How many pictures.", type=click.IntRange(1, 10_000), default=32)
    first: int | None = option(
        "--first K", "Begin with record K; with --stage, with its image K.  [default: 0]", type=click.IntRange(0)
    )
    random: int | None = option("--random SEED", "Some of all, drawn by this seed.", type=click.IntRange(0, 2**64 - 1))
    size: int = option(
        "--size PIXELS", "Of the square that each picture is fitted into.", type=click.IntRange(64, 2048), default=160
    )
    output: str = option("--output FILE", "The PNG.", type=click.Path(dir_okay=False), default="sheet.png")


@dataclass(frozen=True, slots=True)
class Show:
    """What goes on the sheet, and the bad records in whose place others are shown, of which a run tolerates `allowed`."""

    heading: tuple[str, ...]
    tiles: Sequence[Tile]
    replaced: Sequence[Bad] = ()
    allowed: int = 0


@command("show")
def show_images(options: ShowOptions) -> None:
    """Makes a PNG of many images, each with its key and its label, with the class's name where the side file has it.

    DIR is an LMDB's folder, or a schedule's: then of the images it trains on. Without --stage they are shown as they are stored.
    With --stage they are those that the stage trains on, in its order, with what it draws for each of them, as the network gets
    them; three things differ, since a picture can't show them: lighting is rounded and clipped to 0 .. 255, cutout has the
    colour of mean_value, which is 0 for the network, and mixup, cutmix and label_smoothing are left out.

    `python` in transform_param is imported and called, as in training.

    A record that can't be used has the reason in its place; the exit code is then 65. With --stage and `on_bad_record: REPLACE`
    it is the record that is trained on in its place, and the bad one is named; the exit code is 65 where a run would end.
    """
    if options.first is not None and options.random is not None:
        raise UsageError("--first and --random exclude each other", "give one")
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
    if len(found.replaced) <= found.allowed:
        for bad in found.replaced:
            tell(f"note: another record is shown in the place of a bad one, as in training: {bad.text}")
    wrong = [tile.wrong for tile in found.tiles if tile.wrong]
    if len(wrong) == 1:
        raise DataError(wrong[0])
    if wrong:
        more = [f"and {len(wrong) - _MOST_MISTAKES} more"] * (len(wrong) > _MOST_MISTAKES)
        raise DataError("\n  ".join([f"{len(wrong)} images can't be used:", *wrong[:_MOST_MISTAKES], *more]))
    check(found.replaced, found.allowed)


def shown_of(options: ShowOptions) -> Show:
    """What goes on the sheet. RecipeError, UsageError, DataError."""
    if not is_schedule(options.folder):
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


def _choose(
    options: ShowOptions, images: int, noun: str, start: int = 0, endless: bool = False
) -> tuple[list[int], str]:
    """Which of `images` to show, counted from `start`, and the words for it. `endless`: they come round again, so that any
    number is one of them."""
    first = options.first or 0
    if start + first + max(options.number, images) > _MOST_POSITIONS:
        raise UsageError(
            f"{noun} are numbered up to 2**62 from the beginning of training, and these begin at {start + first}",
            "give a smaller --first, or stages of fewer iterations",
        )
    if options.random is not None:
        number = min(options.number, images)
        chosen = order.indices(options.random, images, 0, number, True).tolist()
        return chosen, f"{number} of {images:,} {noun}, drawn by seed {options.random}"
    if first >= images and not endless:
        raise UsageError(f"--first {first}: there are {images} {noun}, numbered from 0", f"give at most {images - 1}")
    end = first + options.number if endless else min(first + options.number, images)
    return list(range(first, end)), f"{noun} {first} to {end - 1}" + ("" if endless else f" of {images:,}")


def _stored(records: LmdbSource, options: ShowOptions) -> Show:
    """The records as they are."""
    chosen, words = _choose(options, len(records), "records")
    classes = classes_of(records)
    tiles = [stored_tile(records, i, classes) for i in chosen]
    headings = (f"{records.name}: {words}", transparency_of(records.name))
    return Show(tuple(filter(None, headings)), tiles)


def _staged(schedule: Schedule, stage: Stage, records: LmdbSource, options: ShowOptions) -> Show:
    """Images as the stage's network gets them."""
    solver, train = stage.solver, not options.val
    transform = solver.transform if train else solver.test_transform
    if train:
        start = next(s.position for s in make_plan(schedule, Inventory()).stages if s.stage.name == stage.name)
        chosen, words = _choose(options, len(records), "images", start, endless=True)
        heading = f"{schedule.name}, stage {stage.name}, training: {words}, counted from its start"
    else:
        start = 0
        chosen, words = _choose(options, len(records), "images")
        heading = f"{schedule.name}, stage {stage.name}, evaluation: {words}"
    bad = BadRecords(len(records)) if train and schedule.data.on_bad_record is OnBadRecord.REPLACE else None
    loader = _loader(schedule, stage, records, train, bad, start)
    classes = classes_of(records)
    zero = transform.mean_value or (0.0,)  # the colour (B, G, R, or one number) that is 0 for the network
    if transform.channel_order is ChannelOrder.RGB:
        zero = zero[::-1]
    tiles = [_staged_tile(records, loader, start + i, classes, zero) for i in chosen]
    replaced = bad.all() if bad is not None else []
    headings = (heading, _approximations(solver) if train else "", transparency_of(records.name))
    return Show(tuple(filter(None, headings)), tiles, replaced, allowed(len(records)))


def _loader(
    schedule: Schedule, stage: Stage, records: LmdbSource, train: bool, bad: BadRecords | None, start: int
) -> Loader:
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
    return training_loader(records, schedule, stage, python=python, augment=augment, bad=bad, start=start)


def _staged_tile(
    records: LmdbSource, loader: Loader, position: int, classes: Sequence[str], zero: Sequence[float]
) -> Tile:
    try:
        job = loader.plan(position, 1)
    except DataError as error:  # without crop_size it looks at the image
        return Tile(None, (f"position {position}",), error.message)
    wanted = job.indices[0]
    key = printable(records.key(wanted))
    try:
        job.fill(0, 1)
    except DataError as error:
        return Tile(None, (key,), error.message)
    batch, taken = job.batch(), job.indices[0]
    image = contact_sheet.as_trained(
        batch.images[0],
        None if batch.lighting is None else batch.lighting[0],
        None if batch.cutout is None else Rectangle(*batch.cutout[0].tolist()),
        zero,
    )
    label = label_text(int(batch.labels[0]), classes)
    if taken != wanted:
        return Tile(image.copy(), (printable(records.key(taken)), label, f"for {key}, which is bad"))
    return Tile(image.copy(), (key, label))


def _approximations(solver: Solver) -> str:
    """What the sheet shows otherwise than the network sees it in training, or ''."""
    left_out = [name for name in ("mixup_alpha", "cutmix_alpha", "label_smoothing") if getattr(solver, name)]
    said = ["lighting is rounded and clipped to 0 .. 255"] * bool(solver.transform.lighting_std)
    said += ["cutout has the colour that is 0 for the network"] * bool(solver.transform.cutout_size)
    said += [f"not shown: {', '.join(left_out)}"] * bool(left_out)
    return "; ".join(said)
