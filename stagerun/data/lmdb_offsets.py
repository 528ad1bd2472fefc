"""Where each record of an LMDB lies in data.mdb, read from the file's own tree of pages.

Whoever has this list reads records with pread alone: from any thread, after a fork, only the bytes that are wanted, and a
page that can't be read is an error instead of a SIGBUS. Nothing is mapped here either, and every number read from the file
is checked before it is used, so that a damaged file ends in a DataError.

The layout is that of LMDB 0.9 on a 64-bit little-endian machine (LMDB/lmdb: libraries/liblmdb/mdb.c, MDB_page, MDB_node,
MDB_meta). A page starts with its number, a filler, flags, and the two ends of its free space; then the places of its nodes,
two bytes each. A node is: size of the value (or number of the child page), flags, size of the key, key, value. A value that
doesn't fit has the number of its first overflow page instead, behind whose header it lies in one piece.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stagerun.base.errors import DataError
from stagerun.system.lmdb_file import DEEPEST, Meta, data_file, open_file, reading

_PAGE_HEADER, _NODE_HEADER = 16, 8
_BRANCH, _LEAF = 0x01, 0x02
_BIG = 0x01  # a node's flag: the value is in overflow pages
_NO_PAGE = 2**64 - 1
_LONGEST_KEY = 511  # LMDB's own limit, too, as it is built everywhere
_PAGES_AT_ONCE = 512


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Table:
    """One row per record, in key order."""

    offsets: NDArray[np.int64]  # of the value's (the Datum's) first byte in data.mdb
    lengths: NDArray[np.int64]  # of the value, bytes
    keys: NDArray[np.uint8]  # all keys, one after the other
    key_ends: NDArray[np.int64]  # [records + 1]; key i is keys[key_ends[i] : key_ends[i + 1]]

    def __len__(self) -> int:
        return len(self.offsets)

    def key(self, i: int) -> bytes:
        return self.keys[self.key_ends[i] : self.key_ends[i + 1]].tobytes()


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Offsets(Table):
    file_size: int  # of data.mdb, bytes
    transaction: int  # the newest one; each commit to the LMDB adds 1


def printable(key: bytes) -> str:
    """A key as a message shows it: text where it is text, else escaped."""
    return key.decode("utf-8", "backslashreplace")


def offsets_of(path: str) -> Offsets:
    """Walks the tree of the LMDB in folder `path`, values excepted: about a second for a million records.

    DataError if it isn't whole, isn't Caffe's (duplicate keys, named databases), or is damaged.
    """
    fd, meta = open_file(path)
    try:
        return offsets_in(fd, meta, path)
    finally:
        os.close(fd)


def offsets_in(fd: int, meta: Meta, path: str) -> Offsets:
    """As `offsets_of`, of the LMDB that `open_file` has opened."""
    pages = _Pages(fd, meta, data_file(path))
    leaves = _leaves(pages)
    parts: list[_Columns] = []
    found = 0
    for i in range(0, len(leaves), _PAGES_AT_ONCE):
        parts.append(_read_leaves(pages, leaves[i : i + _PAGES_AT_ONCE]))
        found += len(parts[-1][0])
        if found > meta.entries:
            raise pages.damaged(f"its header says {meta.entries} records, but there are more")
    offsets, lengths, keys, sizes = (np.concatenate(column) for column in zip(_NOTHING, *parts, strict=True))
    if len(offsets) != meta.entries:
        raise pages.damaged(f"its header says {meta.entries} records, but there are {len(offsets)}")
    return Offsets(
        file_size=meta.file_size,
        transaction=meta.transaction,
        offsets=offsets,
        lengths=lengths,
        keys=keys,
        key_ends=np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)]),
    )


_Columns = tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]
_NOTHING: _Columns = (np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.uint8), np.empty(0, np.int64))


class _Pages:
    """The pages of one data.mdb, open for reading."""

    def __init__(self, fd: int, meta: Meta, file: Path) -> None:
        self.file = file
        self._fd = fd
        self.size, self.page_size = meta.file_size, meta.page_size
        self.flags, self.depth, self.root, self.last = meta.flags, meta.depth, meta.root, meta.last_page

    def _read(self, at: int, size: int) -> bytes:
        with reading(self.file):
            data = os.pread(self._fd, size, at)
        if len(data) < size:
            raise self.damaged(f"ends within the page at byte {at}")
        return data

    def read(self, numbers: NDArray[np.int64], kind: int) -> NDArray[np.uint8]:
        """Those pages, uint8[pages, page size], each of which must be of that kind."""
        read = bytearray()
        for number in numbers.tolist():
            if not 2 <= number <= self.last:
                raise self.damaged(f"there is no page {number}")
            read += self._read(number * self.page_size, self.page_size)
        pages = np.frombuffer(read, np.uint8).reshape(len(numbers), self.page_size)
        wrong = (_numbers(pages, 0, "<i8") != numbers) | (_numbers(pages, 10, "<u2") != kind)
        if wrong.any():
            raise self.damaged(f"page {int(numbers[wrong.argmax()])} is not what its tree says")
        return pages

    def damaged(self, why: str) -> DataError:
        return DataError(f"{self.file}: is damaged: {why}", "copy it again from where it was whole, or make it again")


def _leaves(pages: _Pages) -> NDArray[np.int64]:
    """Numbers of the leaf pages in key order: the tree level by level, as many levels as its header says."""
    if pages.root == _NO_PAGE:
        return np.empty(0, np.int64)
    if pages.flags:
        raise DataError(
            f"{pages.file}: is an LMDB of another kind (duplicate or integer keys)", "stagerun reads LMDBs as Caffe has"
        )
    if not 1 <= pages.depth <= DEEPEST:
        raise pages.damaged(f"its tree has {pages.depth} levels")
    level = np.array([pages.root], np.uint64).astype(np.int64)
    for _ in range(pages.depth - 1):
        parts = [level[i : i + _PAGES_AT_ONCE] for i in range(0, len(level), _PAGES_AT_ONCE)]
        level = np.concatenate([_children(pages, part) for part in parts])
        if len(np.unique(level)) < len(level):  # without this a few pages could name billions
            raise pages.damaged("its tree names a page twice")
    return level


def _children(pages: _Pages, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    read = pages.read(numbers, _BRANCH)
    page, at = _nodes(pages, read)
    low, high, top, key_size = (_u16(pages, read, page, at + 2 * i) for i in range(4))
    _require_room(pages, page, at, key_size)
    return low | high << 16 | top << 32


def _read_leaves(pages: _Pages, numbers: NDArray[np.int64]) -> _Columns:
    """(offsets, lengths, keys one after the other, sizes of the keys) of the records in those pages."""
    read = pages.read(numbers, _LEAF)
    page, at = _nodes(pages, read)
    low, high, flags, key_size = (_u16(pages, read, page, at + 2 * i) for i in range(4))
    lengths = low | high << 16
    if (flags & ~_BIG).any():
        raise DataError(
            f"{pages.file}: holds named databases or duplicate keys",
            "stagerun reads LMDBs as Caffe has, with one record a key",
        )
    big = flags == _BIG
    value_at = at + _NODE_HEADER + key_size
    _require_room(pages, page, at, key_size, np.where(big, 8, lengths))
    offsets = numbers[page] * pages.page_size + value_at
    words = [_u16(pages, read, page[big], value_at[big] + 2 * i) for i in range(4)]
    first = words[0] | words[1] << 16 | words[2] << 32 | words[3] << 48
    if ((first < 2) | (first > pages.last)).any():
        raise pages.damaged("a record is said to be in a page that doesn't exist")
    offsets[big] = first * pages.page_size + _PAGE_HEADER
    if (offsets + lengths > pages.size).any():
        raise pages.damaged("a record reaches over the end of the file")
    return offsets, lengths, _stretches(read, page * pages.page_size + at + _NODE_HEADER, key_size), key_size


def _require_room(
    pages: _Pages, page: NDArray[np.int64], at: NDArray[np.int64], key_size: NDArray[np.int64], value: Any = 0
) -> None:
    """DataError unless each node lies in its page, and those of a page would fit into it side by side. Where nodes share bytes, one page
    makes thousands of keys that are as long as the page."""
    if (key_size > _LONGEST_KEY).any():
        raise pages.damaged(f"a key has {key_size.max()} bytes, and LMDB allows {_LONGEST_KEY}")
    sizes = _NODE_HEADER + key_size + value
    if (at + sizes > pages.page_size).any():
        raise pages.damaged("a record reaches over the end of its page")
    if (np.bincount(page, sizes + 2) > pages.page_size - _PAGE_HEADER).any():
        raise pages.damaged("the records of a page overlap")


def _nodes(pages: _Pages, read: NDArray[np.uint8]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(row of `read`, place within the page) of each node, page by page in order."""
    lower = _numbers(read, 12, "<u2")
    counts = (lower - _PAGE_HEADER) // 2
    most = (pages.page_size - _PAGE_HEADER) // (2 + _NODE_HEADER)
    if (lower < _PAGE_HEADER).any() or (counts > most).any() or (counts < 1).any():
        raise pages.damaged("a page says that it has more nodes than it has room for, or none")
    page = np.repeat(np.arange(len(read), dtype=np.int64), counts)
    number = np.arange(len(page), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    at = _u16(pages, read, page, _PAGE_HEADER + 2 * number)
    if (at < lower[page]).any() or (at + _NODE_HEADER > pages.page_size).any():
        raise pages.damaged("a node lies outside its page")
    return page, at


def _u16(pages: _Pages, read: NDArray[np.uint8], page: NDArray[np.int64], at: NDArray[np.int64]) -> NDArray[np.int64]:
    if (at + 2 > pages.page_size).any():
        raise pages.damaged("a node reaches over the end of its page")
    return read[page, at].astype(np.int64) | read[page, at + 1].astype(np.int64) << 8


def _numbers(pages: NDArray[np.uint8], at: int, kind: str) -> NDArray[np.int64]:
    """The number that stands at byte `at` of each page."""
    size = np.dtype(kind).itemsize
    return np.ascontiguousarray(pages[:, at : at + size]).view(kind)[:, 0].astype(np.int64)


def _stretches(read: NDArray[np.uint8], starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.uint8]:
    """The bytes of all stretches, one after the other."""
    ends = np.cumsum(sizes)
    return read.reshape(-1)[np.arange(ends[-1], dtype=np.int64) + np.repeat(starts - (ends - sizes), sizes)]
