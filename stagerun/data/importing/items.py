"""What every source of images has in common: its items, how it is asked, and reading whole files; and the one that a run reads."""

import errno
import hashlib
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from stagerun.base.errors import DataError, StorageError
from stagerun.system.image_folder import Listed


@dataclass(frozen=True, slots=True)
class Item:
    """One image. `name` is its relative path, POSIX, as Caffe's convert_imageset puts it into the key.

    Bytes of a path that are not UTF-8 are in `name` as os.fsdecode makes them; os.fsencode gives them back.
    """

    name: str
    label: int
    several: tuple[int, ...] | None = None  # the numbers of its classes, in place of the label


@dataclass(frozen=True, slots=True, eq=False)
class Pixels:
    """A picture of a format that holds pixels, not files: uint8[height, width, 3] B, G, R, or [height, width, 1]."""

    array: NDArray[np.uint8]


class Source(Protocol):
    """A set of labelled images. Immutable once it is open; every method may be called by many threads at once."""

    @property
    def kind(self) -> str:
        """The name of its format."""

    @property
    def classes(self) -> tuple[str, ...]:
        """The names by label; () where no one knows them."""

    @property
    def signature(self) -> str:
        """Hex digest over everything that decides the items and their order; another one means another source."""

    @property
    def ignored(self) -> tuple[str, ...]:
        """Relative paths of the files that are not items because of their names, or lie beside the class folders; hidden ones left out.

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


def signature(*parts: object) -> str:
    """Hex sha256 over the parts, none of which runs into its neighbour. Arrays count by content."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.tobytes() if isinstance(part, np.ndarray) else part
        data = data if isinstance(data, bytes) else str(data).encode(errors="surrogateescape")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def digest_of_names(names: Iterable[str]) -> bytes:
    """For `signature`, of many strings."""
    packed = [name.encode(errors="surrogateescape") for name in names]
    ends = np.cumsum([0, *map(len, packed)], dtype=np.int64)
    return hashlib.sha256(b"".join(packed) + ends.tobytes()).digest()


def regular(path: str, flags: int) -> int:
    """For `open(..., opener=regular)`. DataError unless it is a file, linked to or not; OSError."""
    # Opening a pipe waits for a writer, and is started again after a signal, unless it is asked not to wait. A file doesn't mind.
    fd = os.open(path, flags | os.O_NONBLOCK)
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return fd
    os.close(fd)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    kind = "pipe" if stat.S_ISFIFO(mode) else "device"
    raise DataError(f"{path}: is not a regular file, but a {kind}", "give a file, or leave it out")


LARGEST_FILE = 1 << 28  # bytes of one image's file; what is larger isn't an image, and would fill memory

_HERE_ONLY = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG)


def read_whole(path: str, largest: int = LARGEST_FILE) -> bytes:
    """A file's bytes. DataError if this file can't be read or is larger than `largest`, StorageError if the disk fails."""
    try:
        data = bytes_of(path, largest)
    except OSError as error:
        refuse(path, error)
    if data is None:
        raise DataError(f"{path}: larger than {largest >> 20} MiB", "is it one image?")
    return data


def bytes_of(path: str, largest: int) -> bytes | None:
    """None if they are more than `largest`. OSError, DataError."""
    # Unbuffered: Python then takes as much memory as the file is long. Asked for so many bytes, it takes that many first.
    with open(path, "rb", buffering=0, opener=regular) as stream:
        data = stream.readall() if os.fstat(stream.fileno()).st_size <= largest else None
    return data if data is None or len(data) <= largest else None


def refuse(path: str, error: OSError) -> NoReturn:
    """DataError if this file alone can't be read, StorageError if the disk fails."""
    if error.errno in _HERE_ONLY:
        raise DataError(f"{path}: can't be read: {error.strerror}", "check the file, or leave it out") from None
    raise StorageError(f"{path}: can't be read: {error.strerror}", "check the disk; the same command goes on") from None


# -- Images that are files: a folder per class, in torchvision's ImageFolder order (`system.image_folder`), or of a list.


@dataclass(frozen=True, slots=True, eq=False)
class Files:
    """Images that are files below `root`."""

    kind: str
    root: str
    classes: tuple[str, ...]
    names: tuple[str, ...]  # paths relative to root
    labels: NDArray[np.int32]
    ignored: tuple[str, ...] = ()  # as `Source` has them, in the order of the names

    @property
    def signature(self) -> str:
        """Over the names, not the files: asking a shared file system for a million sizes takes minutes."""
        return signature(
            self.kind, os.path.realpath(self.root), digest_of_names(self.names), self.labels, *self.classes
        )

    def __len__(self) -> int:
        return len(self.names)

    def item(self, i: int) -> Item:
        return Item(self.names[i], int(self.labels[i]))

    def read(self, i: int) -> bytes:
        return read_whole(os.path.join(self.root, self.names[i]))


def folder_files(found: Listed) -> Files:
    """The images of class folders, whose labels are the places of their folders."""
    labels = np.repeat(np.arange(len(found.counts), dtype=np.int32), found.counts)
    return Files("folder", found.root, found.classes, found.names, labels, found.ignored)
