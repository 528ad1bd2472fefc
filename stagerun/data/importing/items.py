"""What every source of images has in common: its items, how it is asked; and reading, whole files or pieces of archives."""

import errno
import gzip
import hashlib
import os
import stat
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from stagerun.base.errors import DataError, StorageError
from stagerun.system.host import open_files
from stagerun.system.image_folder import can_not_open

LARGEST_LABEL = 2**31 - 1  # Datum.label is an int32


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


def regular(path: str, flags: int) -> int:
    """For `open(..., opener=regular)`. DataError unless it is a file, linked to or not; OSError."""
    # Opening a pipe waits for a writer, and is started again after a signal, unless it is asked not to wait. A file doesn't mind.
    fd = os.open(path, flags | os.O_NONBLOCK)
    try:
        mode = os.fstat(fd).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if not stat.S_ISREG(mode):
            kind = "pipe" if stat.S_ISFIFO(mode) else "device"
            raise DataError(f"{path}: is not a regular file, but a {kind}", "give a file, or leave it out")
    except BaseException:
        os.close(fd)
        raise
    return fd


@contextmanager
def unzipped(path: str) -> Iterator[tuple[BinaryIO | gzip.GzipFile, bool]]:
    """The content of a file that may be gzipped, and whether it is. OSError, EOFError, zlib.error, DataError."""
    with open(path, "rb", opener=regular) as file:
        zipped = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        with gzip.open(file) if zipped else file as stream:
            yield stream, zipped


LARGEST_FILE = 1 << 28  # bytes of one image's file; what is larger isn't an image, and would fill memory
LARGEST_TEXT = 1 << 30
DAMAGED = "it is damaged or cut off; get it again"
_OTHER_FILES = 256

_HERE_ONLY = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG)


def read_whole(path: str, largest: int = LARGEST_FILE) -> bytes:
    """A file's bytes. DataError if this file can't be read or is larger than `largest`, StorageError if the disk fails."""
    try:
        data = _bytes(path, largest)
    except OSError as error:
        _one_file(path, error)
    if data is None:
        raise DataError(f"{path}: larger than {largest >> 20} MiB", "is it one image?")
    return data


def _bytes(path: str, largest: int) -> bytes | None:
    """None if they are more than `largest`. OSError, DataError."""
    # Unbuffered: Python then takes as much memory as the file is long. Asked for so many bytes, it takes that many first.
    with open(path, "rb", buffering=0, opener=regular) as stream:
        data = stream.readall() if os.fstat(stream.fileno()).st_size <= largest else None
    return data if data is None or len(data) <= largest else None


def read_text(path: str) -> str:
    """A text file that the user named; bytes that are not UTF-8 are surrogates, as in file names."""
    try:
        data = _bytes(path, LARGEST_TEXT)
    except OSError as error:
        can_not_open(path, error)
    if data is None:
        raise DataError(f"{path}: larger than {LARGEST_TEXT >> 20} MiB", "is it a list?")
    if b"\0" in data:
        raise DataError(f"{path}: holds NUL bytes, so it is not text", "give the text file")
    return data.decode(errors="surrogateescape").removeprefix("\N{BYTE ORDER MARK}")


def _one_file(path: str, error: OSError) -> NoReturn:
    if error.errno in _HERE_ONLY:
        raise DataError(f"{path}: can't be read: {error.strerror}", "check the file, or leave it out") from None
    raise StorageError(f"{path}: can't be read: {error.strerror}", "check the disk; the same command goes on") from None


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
            _one_file(self.path, error)
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
    names: Names
    labels: NDArray[np.int32]
    places: NDArray[np.int64]  # [n, 2]: offset, bytes

    @property
    def signature(self) -> str:
        return signature(self.kind, self.archive.state, self.names, self.labels, self.places, *self.classes)

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
    names: Names
    labels: NDArray[np.uint8]
    pictures: NDArray[np.uint8]  # [n, height, width, 1 or 3], B, G, R

    def __len__(self) -> int:
        return len(self.labels)

    def item(self, i: int) -> Item:
        return Item(self.names[i], int(self.labels[i]))

    def read(self, i: int) -> Pixels:
        return Pixels(self.pictures[i])
