"""A folder per class, with images in it at any depth: classes and images in torchvision's ImageFolder order.

Class folders sorted by name are labels 0, 1, ...; within a class, folders sorted by path, files sorted by name. Hidden
files and folders are left out. Links to files and folders are followed, but for those that lead back to where they are.
What has an image's name and is not a folder is an item, also a link that leads nowhere, or a pipe: reading it says what it is.
Files of other names are not items, nor is what lies beside the class folders; `Files.ignored` has them.
"""

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stagerun.base.errors import DataError
from stagerun.base.text import count
from stagerun.tools.data.sources.format import Format, Place, Sign, SourceOptions
from stagerun.tools.data.sources.items import (
    IMAGE_SUFFIXES,
    Item,
    Names,
    Source,
    can_not_open,
    is_image,
    read_with_state,
    signature,
)
from stagerun.tools.data.sources.tar import open_tar
from stagerun.tools.data.sources.truth import check_classes, classes_and_labels


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


def _open(path: str, options: SourceOptions) -> Source:
    return open_folder(path, options.synsets) if os.path.isdir(path) else open_tar(path, options)


def _has_folders(place: Place) -> bool:
    if any(entry.is_dir() and not entry.name.startswith(".") for entry in Path(place.path).iterdir()):
        return True
    if any(is_image(name) for name in place.names):
        raise DataError(
            f"{place.path}: images without class folders",
            "give a list with their labels, or --ground-truth if they are a validation set",
        )
    return False


FORMAT = Format(
    name="folder",
    about="a folder per class, as torchvision's ImageFolder, or a tar of such folders",
    open=_open,
    reads=("synsets",),
    folder=Sign("class folders of images", _has_folders),
)
