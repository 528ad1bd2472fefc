"""A pair of IDX files, images and labels: MNIST, Fashion-MNIST, EMNIST, KMNIST, QMNIST; gzipped or not; held in memory."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stagerun.errors import DataError, UsageError
from stagerun.tools.data.idx import read_idx
from stagerun.tools.data.sources.items import Item, Pixels, SourceOptions, signature

_IMAGES = re.compile(r"(?P<set>.*?)(?P<split>train|t10k|test)-images[-.]idx3-ubyte(\.gz)?")
_TRAIN, _TEST = ("train",), ("t10k", "test")


@dataclass(frozen=True, slots=True, eq=False)
class IdxPair:
    kind = "idx"
    ignored = ()
    classes = ()
    name: str
    pictures: NDArray[np.uint8]  # [n, height, width]
    labels: NDArray[np.uint8]

    @property
    def signature(self) -> str:
        return signature(self.kind, self.name, *self.pictures.shape, self.pictures, self.labels)

    def __len__(self) -> int:
        return len(self.labels)

    def item(self, i: int) -> Item:
        return Item(f"{self.name}/{i:05d}", int(self.labels[i]))

    def read(self, i: int) -> Pixels:
        return Pixels(self.pictures[i][:, :, None])


def is_idx(names: list[str]) -> bool:
    return any(_IMAGES.fullmatch(name) for name in names)


def open_idx(path: str, options: SourceOptions) -> IdxPair:
    """`path` is the folder of a pair, or the file of images. DataError if one is missing or damaged."""
    if os.path.isdir(path):
        images = _images_in(path, options.part)
    else:
        options.refuse_split(f"{path} is one file of images")
        images = path
    pictures = read_idx(images)
    if pictures.ndim != 3:
        raise DataError(f"{images}: holds {pictures.shape}, which are no pictures", "give the file of images")
    labels = options.labels or _labels_of(images)
    classes = read_idx(labels)
    if classes.ndim != 1 or len(pictures) != len(classes) or 0 in pictures.shape:
        raise DataError(
            f"{images} holds {pictures.shape}, {labels} holds {classes.shape}: not images and their labels",
            "give the file of images, and with --labels that of its labels",
        )
    return IdxPair(Path(images).name.removesuffix(".gz"), pictures, classes)


def _images_in(folder: str, split: str) -> str:
    found = [match for name in sorted(os.listdir(folder)) if (match := _IMAGES.fullmatch(name))]
    found = [match for match in found if match["split"] in (_TRAIN if split == "train" else _TEST)]
    if len({(match["set"], match["split"]) for match in found}) > 1:
        raise UsageError(
            f"{folder}: several sets in it: {', '.join(match[0] for match in found)}", "give the file of images itself"
        )
    if not found:
        name = "train-images-idx3-ubyte" if split == "train" else "t10k-images-idx3-ubyte"
        raise DataError(f"{folder}: no {name} or {name}.gz in it", "check the folder, or give the file of images")
    return os.path.join(folder, found[0][0])  # where both are there, the one without .gz


def _labels_of(images: str) -> str:
    folder, name = os.path.split(images)
    wanted = name.replace("images", "labels").replace("idx3", "idx1").removesuffix(".gz")
    for candidate in (wanted, wanted + ".gz"):
        if wanted not in (name, name.removesuffix(".gz")) and os.path.isfile(file := os.path.join(folder, candidate)):
            return file
    raise DataError(f"{images}: its labels are not beside it, as {wanted} or {wanted}.gz", "name them with --labels")
