"""Sources of labelled images, the files of class folders among them, and the rule that makes one Datum of each image.

Encoded images keep their bytes if `odd` keeps them; formats of pixels are stored as pixels, as Caffe's converters do.
"""

import errno
import hashlib
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stagerun.base import order
from stagerun.base.errors import DataError, StorageError, UsageError
from stagerun.data.datum import SEVERAL, Image, parse, raw_datum
from stagerun.data.importing import odd
from stagerun.data.importing.engine import Made
from stagerun.data.importing.partial import Note
from stagerun.data.index import Statistics, look
from stagerun.data.jpeg import BadImage
from stagerun.language.proto import caffe_pb2
from stagerun.system.image_folder import Listed


@dataclass(frozen=True, slots=True)
class Item:
    """An image. `name` is its relative path, POSIX, as in the keys of Caffe's convert_imageset.

    os.fsdecode makes it of a path that is not UTF-8; os.fsencode returns the path.
    """

    name: str
    label: int
    several: tuple[int, ...] | None = None  # the numbers of its classes, in place of the label


@dataclass(frozen=True, slots=True, eq=False)
class Pixels:
    """A picture of a format of pixels, not files: uint8[height, width, 3] B, G, R, or [height, width, 1]."""

    array: Image


class Source(Protocol):
    """A set of labelled images, immutable. Many threads may call it at once."""

    @property
    def kind(self) -> str:
        """The name of its format."""

    @property
    def classes(self) -> tuple[str, ...]:
        """The names by label; () if unknown."""

    @property
    def signature(self) -> str:
        """Hex digest over everything that decides the items and their order."""

    @property
    def ignored(self) -> tuple[str, ...]:
        """Relative paths of files that are not items because of their names, or outside of the class folders; without hidden ones. Not in
        the signature. () in the other formats."""

    def __len__(self) -> int: ...

    def item(self, i: int) -> Item:
        """Return item i. DataError as in `read`, in formats with the label in the record (TFRecord)."""

    def read(self, i: int) -> bytes | Pixels:
        """Return the file's bytes, or its pixels. DataError if this image is unreadable; StorageError if the disk fails."""


def signature(*parts: object) -> str:
    """Return the hex sha256 over the delimited parts. Arrays count by content."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.tobytes() if isinstance(part, np.ndarray) else part
        data = data if isinstance(data, bytes) else str(data).encode(errors="surrogateescape")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def digest_of_names(names: Iterable[str]) -> bytes:
    """Return a digest of many strings, for `signature`."""
    packed = [name.encode(errors="surrogateescape") for name in names]
    ends = np.cumsum([0, *map(len, packed)], dtype=np.int64)
    return hashlib.sha256(b"".join(packed) + ends.tobytes()).digest()


def regular(path: str, flags: int) -> int:
    """Open for `open(..., opener=regular)`. DataError unless it is a file or a link to one; OSError."""
    # Without O_NONBLOCK, opening a pipe waits for a writer, and is restarted after a signal. A file ignores the flag.
    fd = os.open(path, flags | os.O_NONBLOCK)
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return fd
    os.close(fd)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    kind = "pipe" if stat.S_ISFIFO(mode) else "device"
    raise DataError(f"{path}: is not a regular file, but a {kind}", "give a file, or leave it out")


LARGEST_FILE = 1 << 28  # bytes of an image's file; a larger one isn't an image, and would fill memory

_HERE_ONLY = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG)


def read_whole(path: str, largest: int = LARGEST_FILE) -> bytes:
    """Return a file's bytes. DataError if it can't be read or is larger than `largest`, StorageError if the disk fails."""
    try:
        data = bytes_of(path, largest)
    except OSError as error:
        refuse(path, error)
    if data is None:
        raise DataError(f"{path}: larger than {largest >> 20} MiB", "is it one image?")
    return data


def bytes_of(path: str, largest: int) -> bytes | None:
    """Return a file's bytes; None if they are more than `largest`. OSError, DataError."""
    # Unbuffered, readall takes as much memory as the file is long; read(largest) would allocate `largest` first.
    with open(path, "rb", buffering=0, opener=regular) as stream:
        data = stream.readall() if os.fstat(stream.fileno()).st_size <= largest else None
    return data if data is None or len(data) <= largest else None


def refuse(path: str, error: OSError) -> NoReturn:
    """Raise DataError if only this file is unreadable, StorageError if the disk fails."""
    if error.errno in _HERE_ONLY:
        raise DataError(f"{path}: can't be read: {error.strerror}", "check the file, or leave it out") from None
    raise StorageError(f"{path}: can't be read: {error.strerror}", "check the disk; the same command resumes") from None


# -- Images in files: a folder per class, in torchvision's ImageFolder order (`system.image_folder`), or a list.


@dataclass(frozen=True, slots=True, eq=False)
class Files:
    """Images in files below `root`."""

    kind: str
    root: str
    classes: tuple[str, ...]
    names: tuple[str, ...]  # paths relative to root
    labels: NDArray[np.int32]
    ignored: tuple[str, ...] = ()  # in the order of the names

    @property
    def signature(self) -> str:
        """Digest of the names, not the files: a million sizes take minutes on a shared file system."""
        return signature(
            self.kind, os.path.realpath(self.root), digest_of_names(self.names), self.labels, *self.classes
        )

    def __len__(self) -> int:
        return len(self.names)

    def item(self, i: int) -> Item:
        return Item(self.names[i], int(self.labels[i]))

    def read(self, i: int) -> bytes:
        return read_whole(os.path.join(self.root, self.names[i]))


def folder_files(listed: Listed) -> Files:
    """Return the images of class folders, labelled by the order of the folders."""
    labels = np.repeat(np.arange(len(listed.counts), dtype=np.int32), listed.counts)
    return Files("folder", listed.root, listed.classes, listed.names, labels, listed.ignored)


# -- One image becomes one Datum.

# Changes with the rules here and in `odd`, which decide the records.
VERSION = 3
LONGEST_KEY = 511  # LMDB's limit, bytes
_MOST = 10**8  # keys have eight digits


# A Datum without label, its decoded image (None: decode the Datum), and names of oddities.
Stored: TypeAlias = tuple[caffe_pb2.Datum, Image | None, tuple[str, ...]]


class PlainImport:
    """The `Work` of a run's import. Position p is image p of the order; an image that is left out keeps its number."""

    def __init__(self, source: Source, path: str) -> None:
        """Order the images. DataError, UsageError."""
        if not len(source):
            raise DataError(f"{path}: it has no images", "check the path")
        if len(source) > _MOST:
            raise UsageError(f"{path}: {len(source)} images, and keys have eight digits", "import it in parts")
        self._source = source
        self._order: NDArray[np.int64] = order.EveryRecord(1, len(source), True).at(0, len(source))
        self.title = f"stagerun data import: {source.kind} {path}"
        self.classes, self.ignored = source.classes, source.ignored
        self.statistics: Statistics | None = None
        self.prepared_from = ""
        self.identity: Mapping[str, Any] = {
            "version": VERSION,
            "format": source.kind,
            "source": source.signature,
            "images": len(source),
            "shuffle": "seed 1",
            "pixels": "encoded",
            "size": "as it is",
            "quality": "as it is",
            "background": "white",
        }

    def __len__(self) -> int:
        return len(self._order)

    def make(self, position: int) -> Made:
        i = int(self._order[position])
        name = f"image {i} of the source"
        try:
            item = self._source.item(i)
            name = item.name
            key = b"%08d_" % position + name.encode(errors="surrogateescape")
            return self._make(key, item, self._source.read(i))
        except MemoryError:
            # Leaving the image out would make the result depend on the machine.
            raise UsageError(f"{name}: not enough memory to decode it", "use fewer --threads") from None
        except DataError as error:
            reason = error.reason if isinstance(error, BadImage) else "can't be read"
            return Made(b"", None, notes=(Note(name, reason, error.message, bad=True),))

    def _make(self, key: bytes, item: Item, content: bytes | Pixels) -> Made:
        if len(key) > LONGEST_KEY:
            raise BadImage("name too long", f"its key would have {len(key)} bytes, LMDB's have at most {LONGEST_KEY}")
        if item.several is None and not 0 <= item.label < 2**31:
            raise BadImage("bad label", f"the label is {item.label}; labels count from 0")
        datum, decoded, oddities = self.stored(item.name, content)
        if item.several is None:
            datum.label = item.label
        else:
            datum.label = SEVERAL
            datum.float_data.extend(item.several)
        record = datum.SerializeToString()
        notes = tuple(Note(item.name, oddity) for oddity in oddities)
        return Made(key, record, item.label, look(parse(record), True, decoded), notes)

    def stored(self, name: str, content: bytes | Pixels) -> Stored:
        """Convert an image. BadImage."""
        if isinstance(content, Pixels):
            return raw_datum(content.array, 0), content.array, ()
        judged = odd.judge(content, name)
        return caffe_pb2.Datum(data=judged.data, encoded=True), judged.image, judged.oddities
