"""How often a network answers each class with each other one: counts, and their table."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stagerun.base.text import columns

_MOST_IN_TEXT = 12  # classes of a matrix that a terminal shows
_MOST_ROWS = 40  # classes of a table; of more, those with the lowest accuracy
_SHOWN_ROWS = 20


@dataclass(frozen=True, slots=True, eq=False)
class Confusion:
    """`counts`: int64 [label, answer], the images of a class by the network's first answer. `names` by label, or ''."""

    counts: NDArray[np.int64]
    names: tuple[str, ...]

    def images(self, label: int) -> int:
        return int(self.counts[label].sum())

    def top1(self, label: int) -> float | None:
        """Share 0..1; None for a class without images."""
        images = self.images(label)
        return int(self.counts[label, label]) / images if images else None

    def named(self, label: int) -> str:
        return f"{label} {self.names[label]}".rstrip()

    def rows(self) -> list[dict[str, Any]]:
        """One JSON object for each class. `answers` has the images by answer, without those that no image got."""
        return [
            {
                "label": label,
                "name": self.names[label],
                "images": self.images(label),
                "top1": self.top1(label),
                "answers": {str(answer): int(row[answer]) for answer in np.flatnonzero(row)},
            }
            for label, row in enumerate(self.counts)
        ]


def confusion_of(
    labels: NDArray[np.int64], answers: NDArray[np.int64], classes: int, names: Sequence[str]
) -> Confusion:
    """`labels`, `answers`: int64 [images], 0 .. classes-1. `names` by label, as many as are known."""
    counts = np.bincount(labels * classes + answers, minlength=classes * classes).reshape(classes, classes)
    known = [*names, *[""] * classes][:classes]
    return Confusion(counts.astype(np.int64), tuple(known))


def lines(found: Confusion) -> list[str]:
    """The accuracy of each class with its commonest mistakes, and the whole matrix of few classes."""
    classes = len(found.counts)
    labels = list(range(classes))
    if classes > _MOST_ROWS:
        accuracy = {label: top1 for label in labels if (top1 := found.top1(label)) is not None}
        labels = sorted(accuracy, key=lambda label: accuracy[label])[:_SHOWN_ROWS]
    table = columns([("  class", "images", "top-1", "taken for"), *(_row(found, label) for label in labels)])
    if classes > _MOST_ROWS:
        table.append(f"  the {len(labels)} classes with the lowest top-1 of {classes}")
    if classes <= _MOST_IN_TEXT:
        width = len(str(found.counts.max()))
        matrix = [("label", range(classes)), *enumerate(found.counts)]
        rows = [[f"  {label}", *(str(n).rjust(width) for n in row)] for label, row in matrix]
        table += ["", "  images by label (rows) and answer (columns):", *columns(rows)]
    return table


def _row(found: Confusion, label: int) -> tuple[str, str, str, str]:
    top1, images, row = found.top1(label), found.images(label), found.counts[label]
    wrong = sorted((answer for answer in np.flatnonzero(row) if answer != label), key=lambda answer: -row[answer])
    taken_for = ", ".join(f"{found.names[n] or f'class {n}'} {100 * row[n] / images:.1f} %" for n in wrong[:3])
    return f"  {found.named(label)}", str(images), "-" if top1 is None else f"{100 * top1:.2f} %", taken_for
