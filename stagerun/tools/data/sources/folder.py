"""A folder per class, with images in it at any depth: classes and images in torchvision's ImageFolder order.

Class folders sorted by name are labels 0, 1, ...; within a class, folders sorted by path, files sorted by name. Hidden
files and folders are left out. Links to files and folders are followed, but for those that lead back to where they are.
What has an image's name and is not a folder is an item, also a link that leads nowhere, or a pipe: reading it says what it is.
Files of other names are not items, nor is what lies beside the class folders; `Files.ignored` has them.

Or a text of `path label` lines, as Caffe's convert_imageset reads it: the label is the last word, all before it the path, so file
names may hold spaces. Paths are relative to a root folder; labels count from 0. Blank lines mean nothing.
"""

import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stagerun.base.errors import DataError, UsageError
from stagerun.base.text import count
from stagerun.tools.data.sources.items import (
    IMAGE_SUFFIXES,
    LARGEST_LABEL,
    SPLITS,
    Item,
    Names,
    can_not_open,
    read_text,
    read_with_state,
    signature,
)
from stagerun.tools.data.sources.truth import Mistakes, lines, read_synsets, shown


@dataclass(frozen=True, slots=True, eq=False)
class Files:
    """Images that are files below `root`."""

    kind: str
    root: str
    classes: tuple[str, ...]
    names: Names  # paths relative to root
    labels: NDArray[np.int32]
    ignored: tuple[str, ...] = ()  # as `Source` has them, in the order of the names

    @property
    def signature(self) -> str:
        """Over the names, not the files: asking a shared file system for a million sizes takes minutes. Whoever goes on
        with what was interrupted compares some of the states that `read_with_state` gave."""
        return signature(self.kind, os.path.realpath(self.root), self.names, self.labels, *self.classes)

    def __len__(self) -> int:
        return len(self.names)

    def item(self, i: int) -> Item:
        return Item(self.names[i], int(self.labels[i]))

    def read(self, i: int) -> bytes:
        return self.read_with_state(i)[0]

    def read_with_state(self, i: int) -> tuple[bytes, int]:
        """What is read, and which state of the file it is: the signature doesn't say that."""
        return read_with_state(self.path(i))

    def path(self, i: int) -> str:
        return os.path.join(self.root, self.names[i])


def is_image(name: str) -> bool:
    return name.lower().endswith(IMAGE_SUFFIXES) and not name.startswith(".")


def open_folder(root: str, synsets: str | None = None) -> Files:
    """DataError if there are no class folders, one of them has no images, or more files lie beside them than images in them; UsageError if
    they are `train` and `val`.

    With a synsets file, labels are as there, and the classes are all of its.
    """
    try:
        folders = sorted(entry.name for entry in os.scandir(root) if is_folder(entry) and entry.name[0] != ".")
        check_classes(root, folders)
        names: list[str] = []
        ignored: list[str] = []
        counts = []
        for name in folders:
            before = len(names)
            for path in files_below(root, name):
                (names if is_image(path.rpartition("/")[2]) else ignored).append(path)
            counts.append(len(names) - before)
        beside = sorted(entry.name for entry in os.scandir(root) if not is_folder(entry) and entry.name[0] != ".")
    except OSError as error:
        can_not_open(error.filename or root, error)
    if empty := [name for name, images in zip(folders, counts, strict=True) if images == 0]:
        shown = ", ".join(empty[:5]) + (f" and {len(empty) - 5} more" if len(empty) > 5 else "")
        raise DataError(
            f"{root}: no images in the class folder{'s' if len(empty) > 1 else ''} {shown}",
            f"remove what is not a class; images end in {', '.join(IMAGE_SUFFIXES)}",
        )
    if len(beside) > len(names):
        shown = ", ".join(beside[:3]) + ", ..." * (len(beside) > 3)
        raise DataError(
            f"{root}: {count(len(beside), 'file')} lie beside the class folders ({shown}), and {count(len(names), 'image')} in them",
            "put the images of each class into a folder of its own, or give a list of `path label` lines; move other files elsewhere",
        )
    classes, labels = classes_and_labels(root, folders, synsets)
    labels_of = np.repeat(np.array(labels, np.int32), counts)
    return Files("folder", root, classes, Names(names), labels_of, (*beside, *ignored))


def check_classes(root: str, classes: list[str]) -> None:
    if not classes:
        raise DataError(f"{root}: no class folders in it", "give a folder with one folder of images per class")
    if {name.lower() for name in classes} <= {*SPLITS, "validation"}:
        raise UsageError(
            f"{root}: its folders are {', '.join(classes)}, which are not classes",
            f"give one of them: {os.path.join(root, classes[0])}",
        )


def classes_and_labels(place: str, found: list[str], synsets: str | None) -> tuple[tuple[str, ...], list[int]]:
    """(the classes, the label of each of the classes found): sorted, or as the synsets file has them."""
    if synsets is None:
        return tuple(found), list(range(len(found)))
    known = read_synsets(synsets)
    if strange := [name for name in found if name not in known.labels]:
        raise DataError(f"{place}: the class {strange[0]} is not in {synsets}", "is it the file of another set?")
    return known.classes, [known.labels[name] for name in found]


def files_below(root: str, folder: str) -> Iterator[str]:
    """Paths relative to root, POSIX, of all that is not a folder and not hidden. OSError if a folder can't be read."""
    for place in sorted(_folders(root, folder, ())):
        entries = os.scandir(os.path.join(root, place))
        yield from (
            f"{place}/{name}" for name in sorted(e.name for e in entries if e.name[0] != "." and not is_folder(e))
        )


def is_folder(entry: "os.DirEntry[str]") -> bool:
    """Or a link to one. OSError if that can't be known."""
    try:
        return entry.is_dir()
    except OSError as error:
        # A link to itself, or through a file: as one to a name that isn't there, for which `is_dir` says False by itself.
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENAMETOOLONG):
            return False
        raise


def _folders(root: str, folder: str, above: tuple[tuple[int, int], ...]) -> Iterator[str]:
    """The folder and all below it; `above` are those that it is in, by device and inode: a link to one is a loop."""
    found = os.stat(os.path.join(root, folder))
    here = (found.st_dev, found.st_ino)
    if here in above:
        return
    yield folder
    for entry in os.scandir(os.path.join(root, folder)):
        if entry.name[0] != "." and is_folder(entry):
            yield from _folders(root, f"{folder}/{entry.name}", (*above, here))


def flat_images(folder: str) -> list[str]:
    """What has an image's name in a folder itself, sorted."""
    try:
        return sorted(entry.name for entry in os.scandir(folder) if is_image(entry.name) and not is_folder(entry))
    except OSError as error:
        can_not_open(folder, error)


def has_folders(folder: str) -> bool:
    return any(entry.is_dir() and not entry.name.startswith(".") for entry in Path(folder).iterdir())


def open_list(path: str, root: str | None) -> Files:
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
        elif problem := _mistake(label):
            mistakes.add(number, line, cut + 1, *problem)
        else:
            names.append(name)
            labels.append(int(label))
    mistakes.stop()
    if not names:
        raise DataError(f"{path}: there are no images in it", "a line is `path label`")
    folder = root if root is not None else str(Path(path).parent)
    if not os.path.isdir(folder):
        raise DataError(f"{folder}: no such folder", "give the folder that the list's paths start from (--root)")
    _require_one(path, folder, names)
    return Files("list", folder, (), Names(names), np.array(labels, np.int32))


def _require_one(path: str, folder: str, names: list[str]) -> None:
    """DataError if none of the files is there: then the folder is wrong. Asks for the first ones alone where it is right."""
    if not all(_is_missing(os.path.join(folder, name)) for name in names):
        return
    first = os.path.join(folder, names[0])
    hint = f"give the folder that the list's paths start from as --root DIR; now that is {folder}"
    if os.path.isabs(names[0]):
        hint = "its paths begin with `/`, where --root means nothing: leave the `/` out, and give their folder as --root DIR"
    which = "its file isn't there" if len(names) == 1 else f"none of its {len(names)} files is there"
    raise DataError(f"{path}: {which}: no {shown(first)}", hint)


def _is_missing(path: str) -> bool:
    """Not where it merely can't be read: that is said of each one."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def _mistake(label: str) -> tuple[str, str] | None:
    """Message and hint."""
    if re.fullmatch(r"[0-9]+", label):
        if len(label.lstrip("0")) <= len(str(LARGEST_LABEL)) and int(label) <= LARGEST_LABEL:
            return None
        return f"the label {shown(label)} is larger than {LARGEST_LABEL}", "labels count from 0"
    if re.fullmatch(r"-[0-9]+", label):
        return f"the label {shown(label)} is below 0", "labels count from 0"
    if re.fullmatch(r"[0-9]*\.[0-9]*|[0-9]+e[0-9]+", label, re.IGNORECASE):
        return f"the label {shown(label)} is not a whole number", "labels are 0, 1, 2, ..."
    return f"`{shown(label)}` is not a label", "a line is `path label`, the label a number from 0"
