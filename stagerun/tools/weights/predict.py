"""`stagerun predict`: picture files through a snapshot's network, taken in as `data import` takes them."""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from stagerun.base.errors import DataError, StagerunError, UsageError
from stagerun.base.text import count
from stagerun.command.ending import show, tell
from stagerun.command.options import argument, command, option
from stagerun.command.shared import Json, TrustCode
from stagerun.data import datum
from stagerun.data.importing.items import Files
from stagerun.data.records import LmdbSource
from stagerun.system.image_folder import IMAGE_SUFFIXES, files_below, is_image
from stagerun.system.imports import with_imports
from stagerun.tools.data.images import ImportOptions, ImportWork
from stagerun.tools.data.pictures import ListRecords, ResizeOptions, class_names, classes_of
from stagerun.tools.weights.selection import (
    Ema,
    ForwardBatch,
    OutOfName,
    OwnThreads,
    Views,
    choose_members,
    ensemble_of,
)

if TYPE_CHECKING:
    from stagerun.tools.weights.stored import Stored


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictOptions:
    images: tuple[str, ...] = argument("FOLDER|IMAGE...")
    top: int = option("--top K", "Answers per picture.", type=click.IntRange(1), default=5)
    classes: str | None = option(
        "--classes FILE", "Names of the classes, one per line, by label.  [default: the LMDBs']"
    )
    resize: ResizeOptions
    views: Views = "one"
    device_batch: ForwardBatch = None
    threads: OwnThreads = None
    ema: Ema = False
    trust_code: TrustCode = False
    as_json: Json = False


@command()
def predict(snapshot: str = argument("SNAPSHOT"), out: OutOfName = None, *, options: PredictOptions) -> None:
    """Shows what a snapshot's network says about pictures: names of classes and probabilities.

    SNAPSHOT is a snapshot's directory, or its name with --out, or that of a stage or an ensemble. A FOLDER stands for every picture in it,
    at any depth. Files become records as by `data import`, and are cropped and normalised as in the stage's evaluations: a network that was
    trained on images resized by `data import` needs the same --resize options here, and the same --background.
    """
    predict_images(choose_members(snapshot, out), options, snapshot)


def predict_images(folders: Sequence[Path], options: PredictOptions, name: str) -> None:
    """A line for each picture as soon as it is known: the mean of what the networks say. A picture that can't be used is named; the exit code is
    then that of DataError. `name`: of an ensemble, where there are several."""
    paths, resize = _paths(options.images), options.resize.checked()
    import torch

    from stagerun.engine import evaluate
    from stagerun.engine.device import choose_device
    from stagerun.system.world import World, default_threads
    from stagerun.tools.weights.scoring import Wanted, classifier
    from stagerun.tools.weights.stored import Trust, open_snapshot

    torch.set_num_threads(options.threads or default_threads(1))
    members = [_not_rectangular(open_snapshot(folder, Trust(options.trust_code))) for folder in folders]
    wanted = Wanted(views=evaluate.Views(options.views), ema=options.ema)
    stored = replace(members[0], schedule=with_imports(members[0].schedule, folders[0].resolve().parent.parent))
    names = _class_names(stored, options.classes)
    networks = [classifier(member, wanted, choose_device(World())) for member in members]
    batch = options.device_batch or stored.stage.solver.test_batch_size
    found: list[dict[str, Any]] = []
    bad: list[str] = []
    for images, records in _records(stored, paths, resize, batch, bad):
        for image, shares in zip(images, np.mean([ask(records).numpy() for ask in networks], axis=0), strict=True):
            order = np.argsort(-shares, kind="stable")[: options.top].tolist()
            classes = [names[label] if label < len(names) else "" for label in order]
            rows = list(zip(order, classes, shares[order].tolist(), strict=True))
            answers = [{"label": label, "name": called, "probability": share} for label, called, share in rows]
            found.append({"image": image, "answers": answers})
            if not options.as_json:
                said = (f"{called or f'class {label}'} {100 * share:.2f} %" for label, called, share in rows)
                show("  ".join([image, *said]))
    if options.as_json:
        averaged = name if len(members) > 1 else ensemble_of(folders[0])
        of = {"ensemble": averaged} if averaged else {}
        snapshot = " ".join(member.ref.name for member in members)
        show(json.dumps({**of, "snapshot": snapshot, "predictions": found, "failed": bad}, indent=1))
    if bad:
        raise DataError(
            f"{count(len(bad), 'picture')} can't be used; see above", "leave out what the network can't take"
        )


def _paths(given: Sequence[str]) -> list[str]:
    """The files, and those of folders at any depth that are named as images. DataError with all that is missing."""
    paths: list[str] = []
    missing = []
    for name in given:
        if os.path.isdir(name):
            below = [path.removeprefix("./") for path in files_below(name, ".")]
            found = [os.path.join(name, path) for path in below if is_image(path.rpartition("/")[2])]
            if not found:
                missing.append(f"{name}: no images in it")
            paths += found
        elif os.path.exists(name):
            paths.append(name)
        else:
            missing.append(f"{name}: no such file or folder")
    if missing:
        raise DataError("\n".join(missing), f"give picture files, or folders of them ({', '.join(IMAGE_SUFFIXES)})")
    return paths


def _not_rectangular(stored: "Stored") -> "Stored":
    """Rectangles belong to batches of images of like shape: single pictures are cropped to the square in their place."""
    solver = stored.stage.solver
    if not solver.test_transform.rectangular:
        return stored
    tell("note: the stage's evaluations are `rectangular`; single pictures are cropped to squares of crop_size")
    solver = replace(solver, test_transform=replace(solver.test_transform, rectangular=False))
    return replace(stored, stage=replace(stored.stage, solver=solver))


def _class_names(stored: "Stored", file: str | None) -> Sequence[str]:
    """By label: those of a file, else those of the recipe's LMDBs where they are here; () if they are not known."""
    if file is not None:
        given, classes = class_names(file), stored.stage.model.num_classes
        if len(given) < classes:
            text = f"{file} has {count(len(given), 'name')}, and the network has {classes} classes"
            raise UsageError(text, "one name per line, the first one for label 0")
        return given
    for records in _own_records(stored):
        if names := classes_of(records):
            return names
    tell("note: the names of the classes are not known here; --classes FILE gives them")
    return ()


def _own_records(stored: "Stored") -> Iterator[LmdbSource]:
    data = stored.stage.data
    for path in map(stored.schedule.lmdb, (*data.val, data.train)):
        if os.path.exists(path):
            try:
                yield LmdbSource(path)
            except StagerunError:  # only asked for what would be good to know
                continue


def _records(
    stored: "Stored", paths: Sequence[str], resize: ImportOptions, batch: int, bad: list[str]
) -> Iterator[tuple[list[str], ListRecords]]:
    """The pictures as records, `batch` at a time; of one size where the network's evaluation doesn't crop. Bad ones are
    reported and added to `bad`."""
    files = Files("folder", "", (), tuple(paths), np.zeros(len(paths), np.int32))
    work = ImportWork(files, paths[0], resize)
    channels = stored.stage.model.channels
    cropped = stored.stage.solver.test_transform.crop_size is not None
    own = next(_own_records(stored), None)
    size = None if cropped or own is None else _size(own.get(0)[1], channels)
    images: list[str] = []
    values: list[bytes] = []
    for i, path in enumerate(paths):
        made = work.make(i)
        try:
            if made.record is None:
                raise DataError(made.notes[0].text)
            found = _size(made.record, channels)
        except DataError as error:
            bad.append(f"{path}: {error.message}")
            tell(bad[-1])
            continue
        size = size or found
        if not cropped and found != size:
            raise DataError(
                f"{path}: {found[0]} x {found[1]} pixels (height x width), and the network was evaluated on {size[0]} x {size[1]}: "
                "its transform neither crops nor resizes",
                f"--resize-height {size[0]} --resize-width {size[1]}, as `data import` has them",
            )
        images.append(path)
        values.append(made.record)
        if len(images) == batch:
            yield images, ListRecords(values, "the pictures")
            images, values = [], []
    if images:
        yield images, ListRecords(values, "the pictures")


def _size(record: bytes, channels: int) -> tuple[int, int]:
    """(height, width). DataError if a network of so many channels can't take it."""
    picture = datum.picture_of(datum.parse(record), channels)
    return picture.height, picture.width
