"""What every source of images has in common: its items, its options, and how it is asked."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from stagerun.errors import UsageError

FORMATS = ("folder", "list", "imagenet", "cifar", "idx", "tfrecord", "recordio")
SPLITS = ("train", "val", "test")

# In any case of letters. Beside ImageFolder's there are the other two names of JPEGs, and GIF.
IMAGE_SUFFIXES = (
    ".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".gif",
)  # fmt: skip
LARGEST_LABEL = 2**31 - 1  # Datum.label is an int32


@dataclass(frozen=True, slots=True)
class Item:
    """One image. `name` is its relative path, POSIX, as Caffe's convert_imageset puts it into the key.

    Bytes of a path that are no UTF-8 are in `name` as os.fsdecode makes them; os.fsencode gives them back.
    """

    name: str
    label: int


@dataclass(frozen=True, slots=True, eq=False)
class Pixels:
    """A picture of a format that holds pixels, not files: uint8[height, width, 3] B, G, R, or [height, width, 1]."""

    array: NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """What can't be known from the path; None where the user didn't say."""

    format: str | None = None  # one of FORMATS; told from the path's content if None
    root: str | None = None  # list: the folder that its paths are relative to; the list's own folder if None
    ground_truth: str | None = None  # imagenet: the labels of a validation set
    synsets: str | None = None  # imagenet: the classes in the order of their labels; sorted synsets if None
    split: str | None = None  # one of SPLITS, where one path holds several; `train` if None
    labels: str | None = None  # idx: the file of labels, if its name isn't that of the images with `labels` in it

    @property
    def part(self) -> str:
        """The split, where there are several."""
        return self.split or "train"

    def refuse_split(self, reason: str) -> None:
        """UsageError if a split was asked for where there is only one: it would be taken for what it isn't."""
        if self.split is not None:
            raise UsageError(f"--split {self.split} means nothing here: {reason}", "leave it out")


class Source(Protocol):
    """A set of labelled images. Immutable once it is open; every method may be called by many threads at once."""

    @property
    def kind(self) -> str:
        """One of FORMATS."""

    @property
    def classes(self) -> tuple[str, ...]:
        """The names by label; () where no one knows them."""

    @property
    def signature(self) -> str:
        """Hex digest over everything that decides the items and their order; another one means another source."""

    @property
    def ignored(self) -> tuple[str, ...]:
        """Relative paths of the files that are no items because of their names, or lie beside the class folders; hidden ones left out.

        They decide nothing, so the signature knows nothing of them. () in the other formats.
        """

    def __len__(self) -> int: ...

    def item(self, i: int) -> Item:
        """DataError as in `read`, in the formats where the label stands in the record (TFRecord)."""

    def read(self, i: int) -> bytes | Pixels:
        """The file's own bytes, or its pixels.

        DataError, with its place, if this one can't be read; StorageError if the disk fails, which says nothing about
        the image.
        """


class Names:
    """Many strings, packed: 1.28 million take 50 MB, where a list of str takes 130."""

    __slots__ = ("_bytes", "_ends")

    def __init__(self, names: Iterable[str]) -> None:
        packed = bytearray()
        ends = [0]
        for name in names:
            packed += name.encode(errors="surrogateescape")
            ends.append(len(packed))
        self._bytes = bytes(packed)
        self._ends = np.array(ends, np.int64)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, i: int) -> str:
        if not 0 <= i < len(self):
            raise IndexError(i)
        return self._bytes[self._ends[i] : self._ends[i + 1]].decode(errors="surrogateescape")

    def digest(self) -> bytes:
        return hashlib.sha256(self._bytes + self._ends.tobytes()).digest()


def signature(*parts: object) -> str:
    """Hex sha256 over the parts, none of which runs into its neighbour. Arrays and Names count by content."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, Names):
            data = part.digest()
        elif isinstance(part, np.ndarray):
            data = part.tobytes()
        else:
            data = part if isinstance(part, bytes) else str(part).encode(errors="surrogateescape")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()
