"""`stagerun predict`: what trained networks answer for pictures. Torch is imported once the arguments hold."""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from stagerun.base.errors import DataError, StagerunError
from stagerun.base.text import count
from stagerun.command.ending import show, tell
from stagerun.command.options import argument, command, option
from stagerun.command.shared import Json
from stagerun.data import datum
from stagerun.data.importing.images import Files
from stagerun.system.image_folder import is_image
from stagerun.tools.data.images import ImportOptions, ImportWork, ResizeOptions
from stagerun.tools.data.records import ListRecords, class_names, classes_of
from stagerun.tools.weights import Forward, Where, choose_one

if TYPE_CHECKING:
    from stagerun.tools.weights.snapshot import Stored


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictOptions:
    images: tuple[str, ...] = argument("FOLDER|IMAGE...")
    where: Where
    top: int = option("--top K", "Answers per picture.", type=click.IntRange(1), default=5)
    classes: str | None = option(
        "--classes FILE", "Names of the classes, one per line, by label.  [default: the validation LMDB's]"
    )
    resize: ResizeOptions
    forward: Forward
    as_json: Json = False


@command()
def predict(snapshot: str = argument("SNAPSHOT|DIR"), *, options: PredictOptions) -> None:
    """Shows what a snapshot's network answers for pictures: names of classes and probabilities.

    SNAPSHOT is a snapshot's directory, or with --out the name of a snapshot, of a stage (`trunk`; `trunk@best`, `trunk@ema`) or of an
    ensemble; DIR is a schedule's folder or an output folder, with a stage or an ensemble in --stage. A FOLDER stands for every picture
    in it, at any depth. Files become records as by `data import`, and are cropped (to squares) and normalised as in the stage's
    evaluations: a network that was trained on images resized by `data import` needs the same --resize options here, and the same
    --background. A picture that can't be used is named, and the exit code is 65.
    """
    forward = replace(options.forward, ema=options.forward.ema or options.where.means_ema(snapshot))
    chosen, schedule = choose_one(snapshot, options.where)
    paths, resize = _paths(options.images), options.resize.checked()

    from stagerun.tools.weights.scoring import Network
    from stagerun.tools.weights.snapshot import open_chosen

    members = [_with_squares(one) for one in open_chosen(chosen, schedule, options.forward.trust_code)]
    first, network = members[0], Network(members, forward, chosen.rule)
    names = _names(first, options.classes)
    predictions: list[dict[str, Any]] = []
    bad: list[str] = []
    pictures = _records(first.stage.model.channels, paths, resize, bad)
    while batch := list(islice(pictures, options.forward.device_batch or first.stage.solver.test_batch_size)):
        records = ListRecords([record for _, record in batch], "the pictures")
        shares = network.probabilities(records).numpy()
        for (image, _), row in zip(batch, shares, strict=True):
            best = np.argsort(-row, kind="stable")[: options.top].tolist()
            answers = [{"label": n, "name": names.get(n, ""), "probability": float(row[n])} for n in best]
            predictions.append({"image": image, "answers": answers})
            if not options.as_json:
                words = (f"{names.get(n) or f'class {n}'} {100 * row[n]:.2f} %" for n in best)
                show("  ".join([image, *words]))
    if options.as_json:
        head = {"snapshots": [member.ref.name for member in members]}
        show(json.dumps({**head, "predictions": predictions, "failed": bad}, indent=1))
    if bad:
        raise DataError(f"{count(len(bad), 'picture')} can't be used; see above", "leave them out")


def _paths(words: Sequence[str]) -> list[str]:
    """Return the named files, and the images of named folders at any depth. DataError for a folder without."""
    paths: list[str] = []
    for word in words:
        images = [word]
        if os.path.isdir(word):
            images = sorted(str(path) for path in Path(word).rglob("*") if is_image(path.name))
        if not images:
            raise DataError(f"{word}: no images in it", "name picture files, or folders of them")
        paths += images
    return paths


def _with_squares(stored: "Stored") -> "Stored":
    """Return a snapshot that crops squares: rectangles belong to batches of images of like shape."""
    solver = stored.stage.solver
    solver = replace(solver, test_transform=replace(solver.test_transform, rectangular=False))
    return replace(stored, stage=replace(stored.stage, solver=solver))


def _names(stored: "Stored", file: str | None) -> dict[int, str]:
    """Return the names of classes from a file, or from the validation LMDB if it is on this machine."""
    from stagerun.tools.weights.scoring import sets_of

    names: Sequence[str] = ()
    if file is not None:
        names = class_names(file)
    else:
        with suppress(StagerunError):
            names = classes_of(next(sets_of(stored))[1])
    if not names:
        tell("note: the names of the classes are not on this machine; --classes FILE names them")
    return dict(enumerate(names))


def _records(channels: int, paths: Sequence[str], resize: ResizeOptions, bad: list[str]) -> Iterator[tuple[str, bytes]]:
    """Yield the path and the record of each picture; `bad` gets the others, with the reason."""
    files = Files("folder", "", (), tuple(paths), np.zeros(len(paths), np.int32))
    work = ImportWork(files, paths[0], ImportOptions(resize=resize, no_shuffle=True))
    for i, path in enumerate(paths):
        made = work.make(i)
        try:
            text = "" if made.record else made.notes[0].text
            datum.picture_of(datum.parse(made.record or b""), channels)
        except DataError as error:
            bad.append(f"{path}: {text or error.message}")
            tell(bad[-1])
        else:
            yield path, made.record or b""
