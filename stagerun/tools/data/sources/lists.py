"""A text of `path label` lines, as Caffe's convert_imageset reads it.

The label is the last word, all before it the path, so file names may hold spaces. Paths are relative to a root folder; labels count
from 0. Blank lines mean nothing.
"""

import os
from pathlib import Path

import numpy as np

from stagerun.base.errors import DataError
from stagerun.data.importing.items import Files
from stagerun.tools.data.sources.archive import LARGEST_LABEL, read_text
from stagerun.tools.data.sources.format import Format, Place, Sign, SourceOptions
from stagerun.tools.data.sources.truth import Mistakes, lines, shown


def _is_list(place: Place) -> bool:
    if not place.start or b"\0" in place.start:
        return False
    if place.start[:1] in b"[{<%" or place.path.endswith((".json", ".xml", ".py")):
        raise DataError(f"{place.path}: a text, but not a list of images", "a line of a list is `path label`")
    return True


def open_list(path: str, options: SourceOptions) -> Files:
    """RecipeError with the first 20 mistakes in the list, each with its place; DataError if there is nothing in it,
    or none of its files is there."""
    text = read_text(path)
    names: list[str] = []
    labels: list[int] = []
    mistakes = Mistakes(path)
    for number, line in lines(text):
        cut = max(line.rfind(" "), line.rfind("\t"))
        name, label = line[: max(cut, 0)].strip(" \t"), line[cut + 1 :]
        if not name:
            mistakes.add(number, line, 0, "a line needs a path and a label", "`path label`")
        elif not _is_label(label):
            message = f"`{shown(label)}` is not a label: a whole number from 0 to {LARGEST_LABEL}"
            mistakes.add(number, line, cut + 1, message, "a line is `path label`")
        else:
            names.append(name)
            labels.append(int(label))
    mistakes.stop()
    if not names:
        raise DataError(f"{path}: there are no images in it", "a line is `path label`")
    folder = options.root if options.root is not None else str(Path(path).parent)
    if not os.path.isdir(folder):
        raise DataError(f"{folder}: no such folder", "give the folder that the list's paths start from (--root)")
    _require_one(path, folder, names)
    return Files("list", folder, (), tuple(names), np.array(labels, np.int32))


def _require_one(path: str, folder: str, names: list[str]) -> None:
    """DataError if none of the files is there: then the folder is wrong. Asks for the first ones alone where it is right."""
    if any(os.path.lexists(os.path.join(folder, name)) for name in names):
        return
    which = "its file isn't there" if len(names) == 1 else f"none of its {len(names)} files is there"
    hint = f"give the folder that the list's paths start from as --root DIR; now that is {folder}"
    if os.path.isabs(names[0]):
        hint = "its paths begin with `/`, where --root means nothing: leave the `/` out, and give their folder as --root DIR"
    raise DataError(f"{path}: {which}: no {shown(os.path.join(folder, names[0]))}", hint)


def _is_label(label: str) -> bool:
    digits = label.lstrip("0") or "0"
    return (
        label.isascii() and label.isdigit() and len(digits) <= len(str(LARGEST_LABEL)) and int(digits) <= LARGEST_LABEL
    )


FORMAT = Format(
    name="list",
    about="a text of `path label` lines, as Caffe's convert_imageset",
    open=open_list,
    reads=("root",),
    file=Sign("a list of `path label`", _is_list),
)
