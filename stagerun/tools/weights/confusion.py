"""How often a network answers each class with each other one: counts, their table and their picture."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stagerun.base.text import columns, csv_text
from stagerun.drawing.colours import CURVES, INK, RULE, SOFT
from stagerun.drawing.svg import document, element, text, wide

_MOST_NAMED = 60  # classes whose names fit beside a picture
_MOST_NUMBERED = 20  # classes whose shares can be read in it
_MOST_IN_TEXT = 12  # classes of a matrix that a terminal shows
_MOST_ROWS = 40  # classes of a table; of more, those with the lowest accuracy
_SHOWN_ROWS = 20
_SHADES = 20


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


def as_csv(found: Confusion) -> str:
    """A row for each label: label, name, images, top1, and the images by answer."""
    head = ["label", "name", "images", "top1", *(found.named(label) for label in range(len(found.counts)))]
    rows = ([n, found.names[n], found.images(n), found.top1(n), *row] for n, row in enumerate(found.counts))
    return csv_text([head, *rows])


def picture(found: Confusion, title: str) -> bytes:
    """An SVG: the share of each label's images by answer. Cells of one shade are one path."""
    classes = len(found.counts)
    shares = 100 * found.counts / np.maximum(found.counts.sum(1), 1)[:, None]
    names = [found.named(label) if classes <= _MOST_NAMED else "" for label in range(classes)]
    edge = 50 + max(wide(name, 11) for name in names)
    side = max(28 * classes if classes <= _MOST_NAMED else 700, 200)
    cell = side / classes
    shades: dict[int, list[str]] = {}
    numbers = []
    for label, answer in zip(*np.nonzero(found.counts), strict=True):
        share, x, y = float(shares[label, answer]), edge + answer * cell, edge + label * cell
        box = f"M{x:.2f},{y:.2f}h{cell:.2f}v{cell:.2f}h-{cell:.2f}z"
        shades.setdefault(max(1, round(share / 100 * _SHADES)), []).append(box)
        if classes <= _MOST_NUMBERED:
            said = f"{share:.0f}" if share >= 1 else "<1"
            numbers.append(text(said, x + cell / 2, y + cell / 2 + 4, 10, "#ffffff" if share > 55 else INK, "middle"))
    drawn = [text(title, 20, 22, 13)]
    for shade, boxes in sorted(shades.items()):
        drawn.append(element("path", d="".join(boxes), fill=CURVES[0], fill_opacity=str(shade / _SHADES)))
    drawn += [element("rect", x=edge, y=edge, width=side, height=side, fill="none", stroke=RULE), *numbers]
    for place, name in enumerate(names):
        middle = (place + 0.5) * cell
        drawn += [text(name, edge - 5, edge + middle + 4, anchor="end")] if name else []
        drawn += [text(name, edge + middle + 4, edge - 5, turned=True)] if name else []
    drawn += [text("answer", edge + side / 2, edge + side + 18, fill=SOFT, anchor="middle")]
    drawn += [text("label", 16, edge + side / 2, fill=SOFT, anchor="middle", turned=True)]
    return document(title, edge + side + 20, edge + side + 30, *drawn)
