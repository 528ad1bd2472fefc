"""The file of an LMDB, data.mdb, read with plain reads: whether it is there and whole, and where its records lie. Without numpy: `plan` asks.

Nothing is mapped, and every number read from the file is checked before it is used: a damaged file, or a page that can't be read, is an
error and no SIGBUS.

The layout is that of LMDB 0.9 on a 64-bit little-endian machine (LMDB/lmdb: libraries/liblmdb/mdb.c, MDB_meta, MDB_page, MDB_node). The
file starts with two meta pages, of which the one with the larger transaction counts. A page starts with its number, a filler, flags, and the
two ends of its free space; then the places of its nodes, two bytes each. A node is: size of the value (or number of the child page),
flags, size of the key, key, value. A value that doesn't fit has the number of its first overflow page instead, behind whose header it lies
in one piece.
"""

import os
import struct
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from stagerun.base.errors import DataError, PermissionDenied
from stagerun.system.image_folder import is_class_folder

# After 16 bytes of page header: magic, version, address, map size; the record of the free list, whose first field is the page size; the
# record of the data: flags, depth, entries, root; last page, transaction.
_META = struct.Struct("<16x II QQ I44x 4xHH24xQQ QQ")
_MAGIC, _VERSION = 0xBEEFC0DE, 1
_PAGE_SIZES = {1 << n for n in range(8, 17)}
_PAGE = struct.Struct("<Q2xHH2x")  # number, flags, lower end of the free space
_NODE = struct.Struct(
    "<IHH"
)  # size of the value, or a child's number but for its highest bits; flags, or these bits; size of the key
_BRANCH, _LEAF = 0x01, 0x02
_BIG = 0x01  # a node's flag: the value is in overflow pages
_NO_PAGE = 2**64 - 1
_LONGEST_KEY = 511  # LMDB's own limits, as it is built everywhere
_DEEPEST = 32
_ENDS = 1 << 20

# Where the LMDB was named by ...
BY_COMMAND = "give the folder of an LMDB, in which its data.mdb is"
BY_SCHEDULE = "check `source` under `data` in schedule.prototxt"


def data_file(path: str, hint: str = BY_COMMAND) -> Path:
    """The file data.mdb of an LMDB's folder. DataError, with the hint, if either is missing."""
    folder = Path(path)
    with reading(path, hint):  # a name that is too long, or a file server that doesn't answer
        if folder.is_file():
            raise DataError(f"{path}: is a file, not the folder of an LMDB", "give the folder that holds data.mdb")
        if not folder.is_dir():
            raise DataError(f"{path}: no such folder", hint)
        if hint in (BY_COMMAND, BY_SCHEDULE) and is_class_folder(path):
            hint = f"a run imports it when it first uses it; elsewhere make an LMDB: stagerun data import {path} LMDB"
            raise DataError(f"{path}: not an LMDB, but a folder of class folders", hint)
        if not (folder / "data.mdb").is_file():
            raise DataError(f"{path}: not an LMDB: it holds no data.mdb", hint)
    return folder / "data.mdb"


@contextmanager
def reading(file: Path | str, hint: str = "check the disk or the file server") -> Iterator[None]:
    """Errors of reading a file of an LMDB: PermissionDenied, DataError."""
    try:
        yield
    except PermissionError:
        raise PermissionDenied(f"{file}: may not be read", "ask its owner for read permission") from None
    except OSError as error:
        raise DataError(f"{file}: can't be read: {error.strerror}", hint) from None


def check_file(path: str) -> int:
    """Number of records of the LMDB in folder `path`, from its meta pages. DataError unless it is whole."""
    return LmdbFile(path).meta.entries


@dataclass(frozen=True, slots=True)
class Meta:
    """What the file says of itself."""

    page_size: int
    flags: int  # of the tree of records
    depth: int  # its levels
    entries: int  # records
    root: int  # number of its page
    last_page: int
    transaction: int  # the newest one; each commit adds 1


class Record(NamedTuple):
    """Where the value lies in the file."""

    offset: int
    length: int
    key: bytes


class LmdbFile:
    """The data.mdb of an LMDB's folder `path`, open for reading as long as it is referred to, also when it is removed. `size`, in bytes, and
    `changed`, its time of change in nanoseconds, are those of before `meta` was read."""

    def __init__(self, path: str, hint: str = BY_COMMAND) -> None:
        """DataError unless it is there and whole, PermissionDenied. `hint`: what to do if it isn't there."""
        self.path, self.file = path, data_file(path, hint)
        with reading(self.file):
            self.fd = os.open(self.file, os.O_RDONLY | os.O_NONBLOCK)  # else a FIFO waits for a writer
            weakref.finalize(self, os.close, self.fd)
            state = os.fstat(self.fd)
            meta = self._newest()
        if meta is None:
            raise DataError(f"{self.file}: not an LMDB of a 64-bit machine", "make it again, or copy it again")
        self.meta, self.size, self.changed = meta, state.st_size, state.st_mtime_ns
        needed = (meta.last_page + 1) * meta.page_size
        if self.size < needed:
            raise DataError(
                f"{self.file}: is cut off: {self.size} bytes, where its header says {needed}",
                "its copy or its making was interrupted; copy or make it again",
            )

    def is_changed(self) -> bool:
        """Whether something was committed since it was opened. OSError."""
        changed = os.fstat(self.fd).st_mtime_ns
        if changed == self.changed:
            return False
        meta = self._newest()
        if meta is None or meta.transaction != self.meta.transaction:
            return True
        self.changed = changed
        return False

    def ends(self) -> bytes:
        """The first and the last MB. The first two pages change with every commit. OSError."""
        return os.pread(self.fd, _ENDS, 0) + os.pread(self.fd, _ENDS, max(0, self.size - _ENDS))

    def records(self) -> Iterator[Record]:
        """All records in key order: a second or two for a million. DataError if the file isn't Caffe's (duplicate keys, named databases), or is
        damaged."""
        found = 0
        for number in self._leaves():
            page, places = self._page(number, _LEAF)
            taken = _PAGE.size + 2 * len(places)
            for at in places:
                record, end = self._record(number, page, at)
                # Where nodes share bytes, one page makes thousands of keys that are as long as the page.
                taken += end - at
                if taken > len(page):
                    raise self._damaged("the records of a page overlap")
                yield record
            found += len(places)
            if found > self.meta.entries:
                raise self._damaged(f"its header says {self.meta.entries} records, but there are more")
        if found != self.meta.entries:
            raise self._damaged(f"its header says {self.meta.entries} records, but there are {found}")

    def record_at(self, place: float) -> Record:
        """The record at `place`, 0 (the first) to 1 (the last), by the shape of the tree: a read for each of its levels. Errors as of
        `records`."""
        number = self._root()
        for level in range(self.meta.depth):
            is_leaf = level == self.meta.depth - 1
            page, places = self._page(number, _LEAF if is_leaf else _BRANCH)
            place *= len(places)
            node = min(int(place), len(places) - 1)
            place -= node
            if not is_leaf:
                number = _child(page, places[node])
        return self._record(number, page, places[node])[0]

    def value(self, record: Record, most: int) -> bytes:
        """The value, or the first `most` bytes of it. OSError."""
        return os.pread(self.fd, min(record.length, most), record.offset)

    def _newest(self) -> Meta | None:
        """The newer meta page; None if one isn't one."""
        metas: list[Meta] = []
        at = 0
        while len(metas) < 2:
            header = os.pread(self.fd, _META.size, at)
            if len(header) < _META.size:
                return None
            magic, version, _, _, at, *rest = _META.unpack(header)
            if magic != _MAGIC or version != _VERSION or at not in _PAGE_SIZES:
                return None
            metas.append(Meta(at, *rest))
        return max(metas, key=lambda meta: meta.transaction)

    def _root(self) -> int:
        """The number of the root's page. DataError for a tree of another kind, or of too many levels."""
        if self.meta.flags:
            raise DataError(
                f"{self.file}: is an LMDB of another kind (duplicate or integer keys)",
                "stagerun reads LMDBs as Caffe has",
            )
        if not 1 <= self.meta.depth <= _DEEPEST:
            raise self._damaged(f"its tree has {self.meta.depth} levels")
        return self.meta.root

    def _leaves(self) -> list[int]:
        """Numbers of the leaf pages in key order: the tree level by level, as many levels as its header says."""
        if self.meta.root == _NO_PAGE:
            return []
        level = [self._root()]
        for _ in range(self.meta.depth - 1):
            pages = (self._page(number, _BRANCH) for number in level)
            level = [_child(page, at) for page, places in pages for at in places]
            if len(set(level)) < len(level):  # without this a few pages could name billions
                raise self._damaged("its tree names a page twice")
        return level

    def _page(self, number: int, kind: int) -> tuple[bytes, tuple[int, ...]]:
        """A page of that kind, and where its nodes begin in it."""
        if not 2 <= number <= self.meta.last_page:
            raise self._damaged(f"there is no page {number}")
        size = self.meta.page_size
        with reading(self.file):
            page = os.pread(self.fd, size, number * size)
        if len(page) < size:
            raise self._damaged(f"ends within page {number}")
        own, found, lower = _PAGE.unpack_from(page)
        if (own, found) != (number, kind):
            raise self._damaged(f"page {number} is not what its tree says")
        count = (lower - _PAGE.size) // 2
        if not 1 <= count <= (size - _PAGE.size) // (2 + _NODE.size):
            raise self._damaged("a page says that it has more nodes than it has room for, or none")
        places = struct.unpack_from(f"<{count}H", page, _PAGE.size)
        if min(places) < lower or max(places) > size - _NODE.size:
            raise self._damaged("a node lies outside its page")
        return page, places

    def _record(self, number: int, page: bytes, at: int) -> tuple[Record, int]:
        """The record of the node at `at` of a leaf, and where the node ends."""
        length, flags, key_size = _NODE.unpack_from(page, at)
        key = at + _NODE.size
        value = key + key_size
        if key_size > _LONGEST_KEY:
            raise self._damaged(f"a key has {key_size} bytes, and LMDB allows {_LONGEST_KEY}")
        if flags & ~_BIG:
            raise DataError(
                f"{self.file}: holds named databases or duplicate keys",
                "stagerun reads LMDBs as Caffe has, with one record a key",
            )
        end = value + (8 if flags else length)
        if end > len(page):
            raise self._damaged("a record reaches over the end of its page")
        offset = number * len(page) + value
        if flags:
            first = int.from_bytes(page[value:end], "little")
            if not 2 <= first <= self.meta.last_page:
                raise self._damaged("a record is said to be in a page that doesn't exist")
            offset = first * len(page) + _PAGE.size
        if offset + length > self.size:
            raise self._damaged("a record reaches over the end of the file")
        return Record(offset, length, page[key:value]), end

    def _damaged(self, why: str) -> DataError:
        return DataError(f"{self.file}: is damaged: {why}", "copy it again from where it was whole, or make it again")


def _child(page: bytes, at: int) -> int:
    low, high, _ = _NODE.unpack_from(page, at)
    return int(low | high << 32)
