"""What formats other than class folders are read with: archives in pieces, zipped files, texts, pictures in memory."""

import gzip
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from stagerun.base.errors import DataError
from stagerun.data.importing.items import (
    LARGEST_FILE,
    Item,
    Pixels,
    bytes_of,
    digest_of_names,
    refuse,
    regular,
    signature,
)
from stagerun.system.host import open_files
from stagerun.system.image_folder import can_not_open

LARGEST_LABEL = 2**31 - 1  # Datum.label is an int32
LARGEST_TEXT = 1 << 30
DAMAGED = "it is damaged or cut off; get it again"
_OTHER_FILES = 256


@contextmanager
def unzipped(path: str) -> Iterator[tuple[BinaryIO | gzip.GzipFile, bool]]:
    """The content of a file that may be gzipped, and whether it is. OSError, EOFError, zlib.error, DataError."""
    with open(path, "rb", opener=regular) as file:
        zipped = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        with gzip.open(file) if zipped else file as stream:
            yield stream, zipped


def read_text(path: str) -> str:
    """A text file that the user named; bytes that are not UTF-8 are surrogates, as in file names."""
    try:
        data = bytes_of(path, LARGEST_TEXT)
    except OSError as error:
        can_not_open(path, error)
    if data is None:
        raise DataError(f"{path}: larger than {LARGEST_TEXT >> 20} MiB", "is it a list?")
    if b"\0" in data:
        raise DataError(f"{path}: holds NUL bytes, so it is not text", "give the text file")
    return data.decode(errors="surrogateescape").removeprefix("\N{BYTE ORDER MARK}")


def keep_open(files: int) -> None:
    """So many may be open at once from now on, beside the others of this process, as far as the system lets it."""
    open_files(files + _OTHER_FILES)


@dataclass(frozen=True, slots=True)
class State:
    """Which file, and which state of it."""

    path: str  # the real one
    size: int
    changed: int  # ns


class Archive:
    """A large file that is read in pieces, by any number of threads. Closed when no one refers to it any more."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._fd = regular(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            can_not_open(path, error)
        weakref.finalize(self, os.close, self._fd)
        found = os.fstat(self._fd)
        self.size = found.st_size
        self.state = State(os.path.realpath(path), found.st_size, found.st_mtime_ns)

    @property
    def name(self) -> str:
        return Path(self.path).name

    def read(self, at: int, length: int, what: str = "") -> bytes:
        """Exactly `length` bytes from offset `at`. DataError if the file ends before, or `length` is too large for an image."""
        place = f"{self.path}: {what}" if what else f"{self.path} at byte {at}"
        if not 0 <= length <= LARGEST_FILE:
            raise DataError(f"{place}: {length} bytes, more than one image can have", "is the file damaged?")
        if at < 0 or at + length > self.size:
            raise DataError(
                f"{place}: wants bytes {at} to {at + length}, but the file ends at {self.size}",
                DAMAGED,
            )
        try:
            data = _pread(self._fd, at, length)
        except OSError as error:
            refuse(self.path, error)
        if len(data) < length:  # cut off while we read
            raise DataError(f"{place}: the file became shorter", "is something still writing it?")
        return data


def _pread(fd: int, at: int, length: int) -> bytes:
    """What there is of `length` bytes; one pread gives at most 2 GiB, and on some file systems less."""
    data = os.pread(fd, length, at)
    while len(data) < length and (more := os.pread(fd, length - len(data), at + len(data))):
        data += more
    return data


@dataclass(frozen=True, slots=True, eq=False)
class Archived:
    """Images that are pieces of one archive."""

    ignored = ()

    kind: str
    classes: tuple[str, ...]
    archive: Archive
    names: tuple[str, ...]
    labels: NDArray[np.int32]
    places: NDArray[np.int64]  # [n, 2]: offset, bytes

    @property
    def signature(self) -> str:
        return signature(
            self.kind, self.archive.state, digest_of_names(self.names), self.labels, self.places, *self.classes
        )

    def __len__(self) -> int:
        return len(self.names)

    def item(self, i: int) -> Item:
        return Item(self.names[i], int(self.labels[i]))

    def read(self, i: int) -> bytes:
        at, size = self.places[i]
        return self.archive.read(int(at), int(size), self.names[i])


@dataclass(frozen=True, slots=True, eq=False)
class InMemory:
    """Pictures of one size that are held in memory."""

    ignored = ()

    kind: str
    classes: tuple[str, ...]
    signature: str
    names: tuple[str, ...]
    labels: NDArray[np.uint8]
    pictures: NDArray[np.uint8]  # [n, height, width, 1 or 3], B, G, R

    def __len__(self) -> int:
        return len(self.labels)

    def item(self, i: int) -> Item:
        return Item(self.names[i], int(self.labels[i]))

    def read(self, i: int) -> Pixels:
        return Pixels(self.pictures[i])
