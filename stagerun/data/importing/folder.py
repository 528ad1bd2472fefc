"""Images that are files: a folder per class, in torchvision's ImageFolder order (`system.image_folder`), or of a list."""

import os
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stagerun.data.importing.items import Item, Names, read_whole, signature
from stagerun.system.image_folder import Listed


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
        """Over the names, not the files: asking a shared file system for a million sizes takes minutes."""
        return signature(self.kind, os.path.realpath(self.root), self.names, self.labels, *self.classes)

    def __len__(self) -> int:
        return len(self.names)

    def item(self, i: int) -> Item:
        return Item(self.names[i], int(self.labels[i]))

    def read(self, i: int) -> bytes:
        return read_whole(os.path.join(self.root, self.names[i]))


@dataclass(frozen=True, slots=True, eq=False)
class LabelledFiles(Files):
    """Files with any number of labels each: those of image i are `values[ends[i - 1] : ends[i]]`."""

    values: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    ends: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def signature(self) -> str:
        return signature(self.kind, os.path.realpath(self.root), self.names, self.values, self.ends, *self.classes)

    def item(self, i: int) -> Item:
        begin = int(self.ends[i - 1]) if i else 0
        return Item(self.names[i], -1, tuple(self.values[begin : self.ends[i]].tolist()))


def folder_files(found: Listed) -> Files:
    """The images of class folders, whose labels are the places of their folders."""
    labels = np.repeat(np.arange(len(found.counts), dtype=np.int32), found.counts)
    return Files("folder", found.root, found.classes, Names(found.names), labels, found.ignored)
