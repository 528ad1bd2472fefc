"""Which training record is at which position, as a stage's `sampling` has it: the labels of the side file, and `order`."""

import numpy as np

from stagerun.base.errors import DataError
from stagerun.base.order import EveryRecord, Order, Sampled
from stagerun.base.recipe import Sampling, Schedule, Stage
from stagerun.base.shares import shares, weights_of
from stagerun.base.text import count, first
from stagerun.data.records import Records
from stagerun.language.nets import ignored_in


def order_of(records: Records, schedule: Schedule, stage: Stage) -> Order:
    """DataError where the classes of the records are not known, or are not those that are to be drawn."""
    solver = stage.solver
    if solver.sampling is Sampling.UNIFORM:
        return EveryRecord(solver.random_seed, len(records), schedule.data.shuffle)
    said = f"`sampling: {solver.sampling.value}`"
    if records.index is None:
        raise DataError(
            f"{records.name}: {said} needs the labels of all records, and there is no side file",
            f"make it with `stagerun data index {records.name}`",
        )
    labels, classes = records.index.labels, stage.model.num_classes
    ignored = ignored_in(stage).train
    if ignored is not None:  # such an image is of no class
        labels = np.where(labels == ignored, -1, labels)
    if int(labels.max(initial=-1)) >= classes:
        raise DataError(
            f"{records.name}: has label {labels.max()}, and `num_classes` is {classes}", "see `stagerun data verify`"
        )
    sizes = np.bincount(labels[labels >= 0], minlength=classes).tolist()
    weights = weights_of(solver, sizes)
    drawn = shares(weights, len(records))
    if never := [c for c in range(classes) if weights[c] and not drawn[c]]:
        raise DataError(
            f"{records.name}: {said} leaves less than one of {count(len(records), 'image')} in an epoch to {_named(never)}",
        )
    return Sampled(solver.random_seed, labels, drawn)


def _named(classes: list[int]) -> str:
    return f"class{'es' * (len(classes) > 1)} {', '.join(first([str(c) for c in classes], 5))}"
