"""Trained networks in one process: they score validation images, and answer any pictures."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from stagerun.base.errors import DataError, UsageError
from stagerun.base.recipe import EnsembleRule, Source
from stagerun.base.wings import ignored_in
from stagerun.comm import SoloComm
from stagerun.data.loaders import CROPS, evaluation_loader
from stagerun.data.records import LmdbSource, Records
from stagerun.engine.evaluate import Averaged, Classifier, Measure, Score, Views, best_of, score, together
from stagerun.engine.images import Batch
from stagerun.engine.losses import cross_entropy, evaluation_loss, is_binary, probabilities
from stagerun.system.lmdb_file import data_file
from stagerun.tools.weights import Forward
from stagerun.tools.weights.snapshot import Stored, load_network
from stagerun.train.images import default_loader_threads
from stagerun.train.labels import label_table, with_labels
from stagerun.train.stage_loop import normalise_for

_NAME_DATA = "name the folder of an LMDB with --data; `stagerun data import` makes one of images"


class Network:
    """The networks of one snapshot, or of an ensemble's members, on a device, with the images of the first one's evaluations, and the
    answer by `rule`. UsageError, ResumeRefused."""

    def __init__(self, members: Sequence[Stored], forward: Forward, rule: EnsembleRule) -> None:
        size, first = min(one.stage.solver.test_batch_size for one in members), members[0].stage
        self._stage = replace(first, solver=replace(first.solver, test_batch_size=size))
        self._device, self._size, self._rule = forward.device(), forward.device_batch or size, rule
        views = Views(forward.views)

        def classifier(stored: Stored) -> Classifier:
            model, solver = load_network(stored, self._device, forward.ema), stored.stage.solver
            if views is not Views.ONE:
                model = Averaged(model, CROPS if views is Views.TEN_CROP else 1, is_binary(solver))
            normalise = normalise_for(stored.stage, solver.test_transform, self._device)
            return Classifier(model, normalise, solver.precision)

        self._members = [classifier(stored) for stored in members]
        threads, five = default_loader_threads(self._device.type, torch.get_num_threads()), views is Views.TEN_CROP
        self._loader = partial(evaluation_loader, stage=self._stage, threads=threads, five_crops=five)

    def score(self, records: LmdbSource, val: Source | None, per_class: bool) -> tuple[Score, Tensor]:
        """Return top-1, top-5 and loss over every image. Without views, and with as many threads, these are the numbers of `run`, but for
        rounding where the stage has `compile`: one evaluation is not worth compiling for.

        With `per_class` also the images by label and first answer, int64 [classes, classes], unless images have several labels, as `val` says.
        UsageError, DataError, PermissionDenied.
        """
        stage, classes, normalise = self._stage, self._stage.model.num_classes, self._members[0].normalise
        alone = len(self._members) == 1
        answers = self._members[0] if alone else together(self._members, self._rule)
        ignored, several = ignored_in(stage), val is not None and val.labels is not None
        loader = self._loader(records, numbered=several)
        table: Tensor | None = None
        if val is not None and several:
            table = label_table(records, val, classes, self._device, SoloComm())
        passes = self._passes(len(records))
        loader.preflight()
        counts = torch.zeros(classes * classes if per_class else 0, dtype=torch.int64, device=self._device)

        def answer(batch: Batch) -> Tensor:
            logits = answers(batch)
            if per_class and table is None:
                labels, first = normalise.labels(batch.labels), best_of(logits)[:, 0]
                if ignored.accuracy is not None:
                    counted = labels != ignored.accuracy
                    labels, first = labels[counted], first[counted]
                counts.add_(torch.bincount(labels * classes + first, minlength=len(counts)))
            return logits

        # As in `run`, whose ensembles have cross entropy.
        measure = Measure(normalise, evaluation_loss(stage.solver) if alone else cross_entropy, ignored)
        with _memory_explained(), loader.stream(passes) as batches:
            numbered = enumerate(batches if table is None else with_labels(iter(batches), table))
            result = score(answer, numbered, len(passes), measure, SoloComm(), lambda: False)
        assert result is not None  # it is None after a stop
        return result, counts.reshape(-1, classes).cpu()

    @torch.no_grad()
    def probabilities(self, records: Records) -> Tensor:
        """Return float64 [N, classes] on the CPU, of as many records as fit in a forward pass. UsageError, DataError."""
        loader = self._loader(records)
        with _memory_explained():
            batch = loader.batch(0, len(records))
            logits = torch.stack([member(batch).double() for member in self._members])
            if self._rule is EnsembleRule.MEAN_LOGIT:
                logits = logits.mean(0, keepdim=True)
            return torch.stack([probabilities(self._stage.solver, each) for each in logits]).mean(0).cpu()

    def _passes(self, images: int) -> list[tuple[int, int]]:
        """Return (first, count) of the forward passes. Rectangles have one shape within test_batch_size images: UsageError for a larger
        --device-batch."""
        solver, size, alike = self._stage.solver, self._size, images
        if solver.test_transform.rectangular:
            alike = solver.test_batch_size
            if size > alike:
                text = f"the evaluation is `rectangular`, and only test_batch_size, {alike}, images have one shape"
                raise UsageError(f"--device-batch {size}: {text}", f"choose at most {alike}, or leave it out")
        passes = []
        for begin in range(0, images, alike):
            end = min(begin + alike, images)
            passes += [(first, min(size, end - first)) for first in range(begin, end, size)]
        return passes


@contextmanager
def _memory_explained() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UsageError("out of memory on the GPU", "choose a smaller --device-batch") from error


def sets_of(stored: Stored, data: str | None = None) -> Iterator[tuple[Source | None, LmdbSource]]:
    """Open the images of each validation set, or of `data` instead. UsageError, DataError, PermissionDenied."""
    vals = stored.stage.data.val
    if data is not None:
        if any(val.labels for val in vals):
            text = "--data: the images of this snapshot have several labels each, and those of another LMDB are missing"
            raise UsageError(text, "name the folder of a schedule whose `val` has that LMDB and its `labels`")
        data_file(data, _NAME_DATA)
        yield None, LmdbSource(data)
        return
    if not vals:
        raise UsageError(f"the recipe of snapshot {stored.ref.name} has no validation images (data.val)", _NAME_DATA)
    for val in vals:
        path = stored.schedule.lmdb(val)
        data_file(path, _NAME_DATA)
        records = LmdbSource(path)
        if len(records) != val.images:
            raise DataError(
                f"{path}: holds {len(records)} records, but the recipe says images: {val.images}",
                f"if these are the images to evaluate on, say so: --data {path}",
            )
        yield val, records
