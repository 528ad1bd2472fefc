"""A CSV of images with several labels each, whose first line names the columns. The first column is the path.

Of two columns the second has an image's classes, with spaces, `;` or `|` between them: numbers from 0, or names. Of more columns each is
a class, and says 1 or 0. Paths are relative to a root folder. An image may have none of the classes.
"""

import csv
import io
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stagerun.base.errors import DataError
from stagerun.data.importing.items import Files, Item, digest_of_names, signature
from stagerun.system.image_folder import is_image
from stagerun.tools.data.sources.archive import read_text
from stagerun.tools.data.sources.format import Format, Sign, SourceOptions
from stagerun.tools.data.sources.truth import Mistakes, shown

LARGEST_CLASS = 1 << 24  # whole numbers up to it are exact in float_data
Wrong = Callable[[str, str], None]  # (cell, message)
_BETWEEN = re.compile(r"[ ;|\t]+")
_EXAMPLE = "a line is `cat.jpg,3 14`, or below `image,dog,cat` it is `cat.jpg,0,1`"


@dataclass(frozen=True, slots=True, eq=False)
class LabelledFiles(Files):
    """Files with any number of labels each: those of image i are `values[ends[i - 1] : ends[i]]`."""

    values: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    ends: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def signature(self) -> str:
        return signature(
            self.kind, os.path.realpath(self.root), digest_of_names(self.names), self.values, self.ends, *self.classes
        )

    def item(self, i: int) -> Item:
        begin = int(self.ends[i - 1]) if i else 0
        return Item(self.names[i], -1, tuple(self.values[begin : self.ends[i]].tolist()))


def open_csv(path: str, options: SourceOptions) -> LabelledFiles:
    """RecipeError with the first 20 mistakes, each with its place; DataError if there is nothing in it, or no folder for its paths."""
    text = read_text(path)
    written = text.split("\n")
    mistakes = Mistakes(path)
    rows = _rows(text, written, mistakes)
    if len(rows) < 2:
        raise DataError(f"{path}: there are no images in it", _EXAMPLE)
    (first, header), *rows = rows

    def wrong(number: int, cell: str, message: str, hint: str = _EXAMPLE) -> None:
        line = written[number - 1].rstrip("\r")
        mistakes.add(number, line, max(0, line.find(cell)), message, hint)

    if len(header) < 2 or is_image(header[0]):
        wrong(first, header[0], "the first line has to name the columns: the image, and its labels", _EXAMPLE)
        mistakes.stop()
    if len(header) > 2:
        _check_names(first, header, written[first - 1].rstrip("\r"), mistakes)
    read = _words if len(header) == 2 else _columns
    names: list[str] = []
    found: list[list[str]] = []
    lines: dict[str, int] = {}
    for number, row in rows:
        if len(row) != len(header):
            wrong(number, row[0], f"{len(row)} columns, and the first line names {len(header)}")
        elif not row[0]:
            wrong(number, "", "a line needs a path")
        elif row[0] in lines:
            wrong(number, row[0], f"`{shown(row[0])}` stands in line {lines[row[0]]}, too", "keep one of them")
        else:
            lines[row[0]] = number
            names.append(row[0])
            found.append(read(header, row, partial(wrong, number)))
    numbered = len(header) == 2 and all(word.isascii() and word.isdigit() for words in found for word in words)
    if numbered:
        for name, words in zip(names, found, strict=True):
            for word in words:
                if len(word) > len(str(LARGEST_CLASS)) or int(word) > LARGEST_CLASS:
                    wrong(lines[name], word, f"class {shown(word)} is larger than {LARGEST_CLASS}")
    mistakes.stop()
    classes = (
        () if numbered else tuple(header[1:] if len(header) > 2 else sorted({w for words in found for w in words}))
    )
    label = {name: str(n) for n, name in enumerate(classes)}
    values = [sorted({int(word if numbered else label[word]) for word in words}) for words in found]
    folder = options.root if options.root is not None else str(Path(path).parent)
    if not os.path.isdir(folder):
        raise DataError(f"{folder}: no such folder", "give the folder that the paths start from (--root)")
    ends = np.cumsum([len(one) for one in values], dtype=np.int64)
    flat = np.array([n for one in values for n in one], np.int32)
    none = np.zeros(len(names), np.int32)
    return LabelledFiles("csv", folder, classes, tuple(names), none, values=flat, ends=ends)


def _rows(text: str, written: Sequence[str], mistakes: Mistakes) -> list[tuple[int, list[str]]]:
    """(line where it begins, cells) of each row that isn't empty. RecipeError for one whose quotes don't end: no row after it is known."""
    rows: list[tuple[int, list[str]]] = []
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    begins = 1
    try:
        for row in reader:
            if any(cell.strip() for cell in row):
                rows.append((begins, [cell.strip() for cell in row]))
            begins = reader.line_num + 1
    except csv.Error as error:
        line = written[begins - 1].rstrip("\r")
        hint = 'a cell that begins with `"` has to end with one; inside it, write each `"` twice'
        mistakes.add(begins, line, max(0, line.find('"')), f"the row that begins here can't be read: {error}", hint)
        mistakes.stop()
    return rows


def _check_names(first: int, header: Sequence[str], line: str, mistakes: Mistakes) -> None:
    """Every column that is a class has a name of its own."""
    for n, name in enumerate(header[1:], start=2):
        if not name:
            mistakes.add(first, line, 0, f"column {n} has no name", "name its class, or remove the column")
        elif name in header[1 : n - 1]:
            at = max(0, line.rfind(name))
            mistakes.add(
                first, line, at, f"two columns are named `{shown(name)}`", "each is a class: rename one of them"
            )


def _words(header: list[str], row: list[str], wrong: Wrong) -> list[str]:
    return [word for word in _BETWEEN.split(row[1]) if word]


def _columns(header: list[str], row: list[str], wrong: Wrong) -> list[str]:
    for cell in row[1:]:
        if cell not in ("0", "1"):
            wrong(cell, f"`{shown(cell)}` is neither 0 nor 1")
    return [name for name, cell in zip(header[1:], row[1:], strict=True) if cell == "1"]


FORMAT = Format(
    name="csv",
    about='a .csv of paths and several labels each, for `labels: "float_data"`',
    open=open_csv,
    reads=("root",),
    file=Sign("a .csv of paths and labels", lambda place: place.path.lower().endswith(".csv")),
)
