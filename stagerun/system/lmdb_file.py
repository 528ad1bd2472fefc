"""Reads an LMDB's file, data.mdb, with plain reads: its integrity and the positions of its records. Without numpy, for `plan`.

Nothing is mapped, and every number is checked before its use: a damaged file or an unreadable page is an error and not a SIGBUS.

The layout is that of LMDB 0.9 on a 64-bit little-endian machine (LMDB/lmdb: libraries/liblmdb/mdb.c, MDB_meta, MDB_page, MDB_node). The
file starts with two meta pages, of which the one with the larger transaction counts. A page starts with its number, a filler, flags, and the
two ends of its free space; then the offsets of its nodes, two bytes each. A node is: size of the value (or number of the child page),
flags, size of the key, key, value. A value that doesn't fit is replaced by the number of its first overflow page, behind whose header it is
stored in one piece.
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
_LONGEST_KEY = 511  # LMDB's default limits
_DEEPEST = 32
_ENDS = 1 << 20

# Hints by the origin of the LMDB's name.
BY_COMMAND = "give the folder of an LMDB, in which its data.mdb is"
BY_SCHEDULE = "check `source` under `data` in schedule.prototxt"


def data_file(path: str, hint: str = BY_COMMAND) -> Path:
    """Return the file data.mdb of an LMDB's folder. DataError, with the hint, if either is missing."""
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
    """Turn errors of reading a file of an LMDB into PermissionDenied or DataError."""
    try:
        yield
    except PermissionError:
        raise PermissionDenied(f"{file}: may not be read", "ask its owner for read permission") from None
    except OSError as error:
        raise DataError(f"{file}: can't be read: {error.strerror}", hint) from None


def check_file(path: str) -> int:
    """Return the number of records of the LMDB in folder `path`, from its meta pages. DataError unless it is complete."""
    return LmdbFile(path).meta.entries


@dataclass(frozen=True, slots=True)
class Meta:
    """The newest meta page."""

    page_size: int
    flags: int  # of the tree of records
    depth: int  # its levels
    entries: int  # records
    root: int  # number of its page
    last_page: int
    transaction: int  # the newest one; each commit adds 1


class Record(NamedTuple):
    """The position of a value in the file."""

    offset: int
    length: int
    key: bytes


class LmdbFile:
    """The data.mdb of an LMDB's folder `path`, open as long as this object exists, even after its removal. `size` in bytes and `changed`, the
    time of change in nanoseconds, were read before `meta`."""

    def __init__(self, path: str, hint: str = BY_COMMAND) -> None:
        """Open the file. DataError unless it exists and is complete, PermissionDenied. `hint`: for a missing one."""
        self.path, self.file = path, data_file(path, hint)
        with reading(self.file):
            self.fd = os.open(self.file, os.O_RDONLY | os.O_NONBLOCK)  # a FIFO would block
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
        """Return whether there was a commit since the file was opened. OSError."""
        changed = os.fstat(self.fd).st_mtime_ns
        if changed == self.changed:
            return False
        meta = self._newest()
        if meta is None or meta.transaction != self.meta.transaction:
            return True
        self.changed = changed
        return False

    def ends(self) -> bytes:
        """Return the first and the last MB. The first two pages change with every commit. OSError."""
        return os.pread(self.fd, _ENDS, 0) + os.pread(self.fd, _ENDS, max(0, self.size - _ENDS))

    def records(self) -> Iterator[Record]:
        """Yield all records in key order, a million in a second or two. DataError for a damaged file, or one with duplicate keys or named
        databases, which Caffe's lack."""
        count = 0
        for number in self._leaves():
            page, offsets = self._page(number, _LEAF)
            taken = _PAGE.size + 2 * len(offsets)
            for at in offsets:
                record, end = self._record(number, page, at)
                # Nodes that share bytes could make thousands of keys as long as a page.
                taken += end - at
                if taken > len(page):
                    raise self._damaged("the records of a page overlap")
                yield record
            count += len(offsets)
            if count > self.meta.entries:
                raise self._damaged(f"its header says {self.meta.entries} records, but there are more")
        if count != self.meta.entries:
            raise self._damaged(f"its header says {self.meta.entries} records, but there are {count}")

    def record_at(self, position: float) -> Record:
        """Return the record at `position`, 0 (the first) to 1 (the last), by the shape of the tree: one read per level. Errors as in
        `records`."""
        number = self._root()
        for level in range(self.meta.depth):
            is_leaf = level == self.meta.depth - 1
            page, offsets = self._page(number, _LEAF if is_leaf else _BRANCH)
            position *= len(offsets)
            node = min(int(position), len(offsets) - 1)
            position -= node
            if not is_leaf:
                number = _child(page, offsets[node])
        return self._record(number, page, offsets[node])[0]

    def value(self, record: Record, most: int) -> bytes:
        """Return the value, or its first `most` bytes. OSError."""
        return os.pread(self.fd, min(record.length, most), record.offset)

    def _newest(self) -> Meta | None:
        """Return the newer meta page; None unless both are valid."""
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
        """Return the number of the root's page. DataError for a tree of another kind, or of too many levels."""
        if self.meta.flags:
            raise DataError(
                f"{self.file}: is an LMDB of another kind (duplicate or integer keys)",
                "stagerun reads LMDBs as Caffe has",
            )
        if not 1 <= self.meta.depth <= _DEEPEST:
            raise self._damaged(f"its tree has {self.meta.depth} levels")
        return self.meta.root

    def _leaves(self) -> list[int]:
        """Return the numbers of the leaf pages in key order, level by level to the depth in the header."""
        if self.meta.root == _NO_PAGE:
            return []
        level = [self._root()]
        for _ in range(self.meta.depth - 1):
            pages = (self._page(number, _BRANCH) for number in level)
            level = [_child(page, at) for page, offsets in pages for at in offsets]
            if len(set(level)) < len(level):  # without this a few pages could name billions
                raise self._damaged("its tree names a page twice")
        return level

    def _page(self, number: int, kind: int) -> tuple[bytes, tuple[int, ...]]:
        """Return a page of that kind, and the offsets of its nodes."""
        if not 2 <= number <= self.meta.last_page:
            raise self._damaged(f"page {number} doesn't exist")
        size = self.meta.page_size
        with reading(self.file):
            page = os.pread(self.fd, size, number * size)
        if len(page) < size:
            raise self._damaged(f"ends within page {number}")
        page_number, page_kind, lower = _PAGE.unpack_from(page)
        if (page_number, page_kind) != (number, kind):
            raise self._damaged(f"page {number} is not what its tree says")
        count = (lower - _PAGE.size) // 2
        if not 1 <= count <= (size - _PAGE.size) // (2 + _NODE.size):
            raise self._damaged("the number of nodes of a page is 0 or too large")
        offsets = struct.unpack_from(f"<{count}H", page, _PAGE.size)
        if min(offsets) < lower or max(offsets) > size - _NODE.size:
            raise self._damaged("a node is outside its page")
        return page, offsets

    def _record(self, number: int, page: bytes, at: int) -> tuple[Record, int]:
        """Return the record of the node at `at` of a leaf, and the node's end."""
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
                raise self._damaged("a record is in a page that doesn't exist")
            offset = first * len(page) + _PAGE.size
        if offset + length > self.size:
            raise self._damaged("a record reaches over the end of the file")
        return Record(offset, length, page[key:value]), end

    def _damaged(self, why: str) -> DataError:
        return DataError(f"{self.file}: is damaged: {why}", "copy it again from an intact copy, or make it again")


def _child(page: bytes, at: int) -> int:
    low, high, _ = _NODE.unpack_from(page, at)
    return int(low | high << 32)
