"""Evaluate one snapshot in one process, on its validation images or any pictures: `stagerun eval` and `predict`."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from stagerun.base.errors import DataError, UsageError
from stagerun.base.nets import ignored_in
from stagerun.base.recipe import Schedule, Solver, Source
from stagerun.comm import SoloComm
from stagerun.data.loader import Loader
from stagerun.data.loaders import CROPS, evaluation_loader
from stagerun.data.records import LmdbSource, Records
from stagerun.engine.evaluate import Averaged, Classifier, Measure, Score, Views
from stagerun.engine.evaluate import score as score_of
from stagerun.engine.images import Batch
from stagerun.engine.losses import evaluation_loss, is_binary, probabilities
from stagerun.system.lmdb_file import data_file
from stagerun.tools.weights.stored import Stored, load_network
from stagerun.train.images import default_loader_threads
from stagerun.train.labels import label_table, with_labels
from stagerun.train.stage_loop import normalise_for

DATA_HINT = "name the folder of an LMDB with --data"

# The labels of a batch, int64 [N], and its logits [N, classes].
Answered = Callable[[Tensor, Tensor], None]

# Shown while it goes on: batches done come out of it as they went in.
Watch = Callable[[Iterable[Batch], int], Iterable[Batch]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """How to evaluate. `data` is the folder of an LMDB in place of the recipe's; `batch` images per forward pass in place of
    its test_batch_size; a `rectangular` transform still crops test_batch_size images together."""

    views: Views = Views.ONE
    data: str | None = None
    val: int = 0  # which of the recipe's validation sets
    batch: int | None = None
    ema: bool = False
    most: int | None = None  # images, from the first


def use_schedule(stored: Stored, schedule: Schedule, stage: str) -> Stored:
    """Return the snapshot with the validation images and test transform that `stage` has in `schedule` now; it may have been renamed. A
    snapshot's identity has neither."""
    now = schedule.stage(stage)
    solver = replace(
        stored.stage.solver, test_transform=now.solver.test_transform, test_batch_size=now.solver.test_batch_size
    )
    data = replace(stored.stage.data, val=now.data.val)
    return replace(stored, stage=replace(stored.stage, solver=solver, data=data, identity=now.identity))


def score(
    stored: Stored, wanted: Wanted, device: torch.device, watch: Watch, answered: Answered | None = None
) -> Score:
    """Return top-1, top-5 and loss over every image. Without views, and with as many threads, those that `run` gave the snapshot,
    but for rounding where the stage has `compile`: one evaluation is not worth compiling for.

    `answered` sees each batch's answers. UsageError, DataError, ResumeRefused, PermissionDenied.
    """
    solver, ignored, val = stored.stage.solver, ignored_in(stored.stage), _val(stored, wanted)
    loader = _loader(stored, _records(stored, wanted), wanted, device)
    table: Tensor | None = None
    if val is not None and val.labels is not None:
        if wanted.data is not None:
            text = "the images of this snapshot have several labels each, and those of another LMDB are not known"
            hint = "name the folder of a schedule whose `val` has that LMDB and its `labels`"
            raise UsageError(f"--data: {text}", hint)
        table = label_table(loader.records, val, stored.stage.model.num_classes, device, SoloComm())
    images = min(wanted.most or len(loader.records), len(loader.records))
    asked = _cut(images, wanted.batch or solver.test_batch_size, solver)
    loader.preflight()
    network = _network(stored, wanted, device)
    measure = Measure(network.normalise, evaluation_loss(solver), ignored)

    def seen(batch: Batch) -> Tensor:
        logits = found = network(batch)
        if answered is not None and table is None:
            labels = network.normalise.labels(batch.labels)
            if ignored.accuracy is not None:
                counts = labels != ignored.accuracy
                labels, found = labels[counts], logits[counts]
            answered(labels, found)
        return logits

    with _memory_explained(max(n for _, n in asked)), loader.stream(asked) as batches:
        watched = watch(batches, len(asked))
        numbered = enumerate(watched if table is None else with_labels(iter(watched), table))
        found = score_of(seen, numbered, len(asked), measure, SoloComm(), lambda: False)
    assert found is not None  # no one asked it to stop
    return found


def classifier(stored: Stored, wanted: Wanted, device: torch.device) -> Callable[[Records], Tensor]:
    """Return the network as a function of records, at most as many as fit in a forward pass: float64 [N, classes], probabilities on the CPU.

    The records are cropped and normalised as in the stage's evaluation. ResumeRefused; the function raises UsageError, DataError.
    """
    network = _network(stored, wanted, device)

    @torch.no_grad()
    def classify(records: Records) -> Tensor:
        with _memory_explained(len(records)):
            batch = _loader(stored, records, wanted, device).batch(0, len(records))
            return probabilities(stored.stage.solver, network(batch).double()).cpu()

    return classify


def _network(stored: Stored, wanted: Wanted, device: torch.device) -> Classifier:
    solver = stored.stage.solver
    model: nn.Module = load_network(stored, device, wanted.ema)
    if wanted.views is not Views.ONE:
        model = Averaged(model, CROPS if wanted.views is Views.TEN_CROP else 1, is_binary(solver))
    normalise = normalise_for(stored.stage, solver.test_transform, device)
    return Classifier(model, normalise, solver.precision)


@contextmanager
def _memory_explained(images: int) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        text = f"out of memory on the GPU with {images} images at a time"
        raise UsageError(text, "give a smaller --device-batch") from error


def _cut(images: int, size: int, solver: Solver) -> list[tuple[int, int]]:
    """Return (first, count) of the forward passes, of at most `size` images, each of one shape if they are rectangular: UsageError where
    so many are not."""
    alike = images
    if solver.test_transform.rectangular:
        alike = solver.test_batch_size
        if size > alike:
            text = (
                f"the evaluation is `rectangular`, and no more than test_batch_size, {alike}, images are of one shape"
            )
            raise UsageError(f"--device-batch {size}: {text}", f"give at most {alike}, or leave it out")
    asked = []
    for begin in range(0, images, alike):
        end = min(begin + alike, images)
        asked += [(first, min(size, end - first)) for first in range(begin, end, size)]
    return asked


def _val(stored: Stored, wanted: Wanted) -> Source | None:
    """The recipe's validation set, if any."""
    return next(iter(stored.stage.data.val[wanted.val :]), None)


def _loader(stored: Stored, records: Records, wanted: Wanted, device: torch.device) -> Loader:
    val, five_crops = _val(stored, wanted), wanted.views is Views.TEN_CROP
    numbered = val is not None and val.labels is not None
    threads = default_loader_threads(device.type, torch.get_num_threads())
    return evaluation_loader(records, stored.stage, threads=threads, numbered=numbered, five_crops=five_crops)


def _records(stored: Stored, wanted: Wanted) -> LmdbSource:
    val, name = _val(stored, wanted), stored.ref.name
    path = wanted.data if wanted.data is not None else stored.schedule.lmdb(val) if val is not None else None
    if path is None:
        raise UsageError(f"the recipe of snapshot {name} has no validation images (data.val)", DATA_HINT)
    data_file(path, DATA_HINT)
    records = LmdbSource(path)
    if wanted.data is None and val is not None and len(records) != val.images:
        raise DataError(
            f"{path}: holds {len(records)} records, but the recipe says images: {val.images}",
            f"if these are the images to evaluate on, say so: --data {path}",
        )
    return records
