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
import struct
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stagerun.base.errors import DataError
from stagerun.system.lmdb_file import DEEPEST, Meta, data_file, open_file, reading

_PAGE_HEADER, _NODE_HEADER = 16, 8
_BRANCH, _LEAF = 0x01, 0x02
_BIG = 0x01  # a node's flag: the value is in overflow pages
_NO_PAGE = 2**64 - 1
_LONGEST_KEY = 511  # LMDB's own limit, too, as it is built everywhere
_HEADER = struct.Struct("<Q2xHH")  # number, flags, lower end of the free space
_NODE = struct.Struct(
    "<IHH"
)  # size of the value, or a child's number but for its highest bits; flags, or these bits; size of the key


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
    """Walks the tree of the LMDB in folder `path`, values excepted: a second or two for a million records.

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
    offsets, lengths, ends, keys = array("q"), array("q"), array("q", [0]), bytearray()
    for number in _leaves(pages, meta):
        for at, size, key in _records(pages, number):
            offsets.append(at)
            lengths.append(size)
            keys += key
            ends.append(len(keys))
        if len(offsets) > meta.entries:
            raise pages.damaged(f"its header says {meta.entries} records, but there are more")
    if len(offsets) != meta.entries:
        raise pages.damaged(f"its header says {meta.entries} records, but there are {len(offsets)}")
    return Offsets(
        file_size=meta.file_size,
        transaction=meta.transaction,
        offsets=np.array(offsets, np.int64),
        lengths=np.array(lengths, np.int64),
        keys=np.frombuffer(bytes(keys), np.uint8),
        key_ends=np.array(ends, np.int64),
    )


class _Pages:
    """The pages of one data.mdb, open for reading."""

    def __init__(self, fd: int, meta: Meta, file: Path) -> None:
        self.file, self.size, self.page_size, self.last = file, meta.file_size, meta.page_size, meta.last_page
        self._fd = fd

    def nodes(self, number: int, kind: int) -> Iterator[tuple[bytes, int, int, int]]:
        """(page, place in it, flags or the highest bits of a child's number, size of the key) of each node of a page of that kind."""
        if not 2 <= number <= self.last:
            raise self.damaged(f"there is no page {number}")
        with reading(self.file):
            page = os.pread(self._fd, self.page_size, number * self.page_size)
        if len(page) < self.page_size:
            raise self.damaged(f"ends within page {number}")
        own, found, lower = _HEADER.unpack_from(page)
        if (own, found) != (number, kind):
            raise self.damaged(f"page {number} is not what its tree says")
        count = (lower - _PAGE_HEADER) // 2
        if not 1 <= count <= (self.page_size - _PAGE_HEADER) // (2 + _NODE_HEADER):
            raise self.damaged("a page says that it has more nodes than it has room for, or none")
        taken = lower
        for (at,) in struct.iter_unpack("<H", page[_PAGE_HEADER : _PAGE_HEADER + 2 * count]):
            if not lower <= at <= self.page_size - _NODE_HEADER:
                raise self.damaged("a node lies outside its page")
            size, flags, key_size = _NODE.unpack_from(page, at)
            if key_size > _LONGEST_KEY:
                raise self.damaged(f"a key has {key_size} bytes, and LMDB allows {_LONGEST_KEY}")
            value = 0 if kind == _BRANCH else 8 if flags == _BIG else size
            end = at + _NODE_HEADER + key_size + value
            if end > self.page_size:
                raise self.damaged("a record reaches over the end of its page")
            # Where nodes share bytes, one page makes thousands of keys that are as long as the page.
            taken += end - at
            if taken > self.page_size:
                raise self.damaged("the records of a page overlap")
            yield page, at, flags, key_size

    def damaged(self, why: str) -> DataError:
        return DataError(f"{self.file}: is damaged: {why}", "copy it again from where it was whole, or make it again")


def _leaves(pages: _Pages, meta: Meta) -> list[int]:
    """Numbers of the leaf pages in key order: the tree level by level, as many levels as its header says."""
    if meta.root == _NO_PAGE:
        return []
    if meta.flags:
        raise DataError(
            f"{pages.file}: is an LMDB of another kind (duplicate or integer keys)", "stagerun reads LMDBs as Caffe has"
        )
    if not 1 <= meta.depth <= DEEPEST:
        raise pages.damaged(f"its tree has {meta.depth} levels")
    level = [meta.root]
    for _ in range(meta.depth - 1):
        nodes = (node for number in level for node in pages.nodes(number, _BRANCH))
        level = [_NODE.unpack_from(page, at)[0] | top << 32 for page, at, top, _ in nodes]
        if len(set(level)) < len(level):  # without this a few pages could name billions
            raise pages.damaged("its tree names a page twice")
    return level


def _records(pages: _Pages, number: int) -> Iterator[tuple[int, int, bytes]]:
    """(offset, length, key) of the records in a leaf page."""
    for page, at, flags, key_size in pages.nodes(number, _LEAF):
        if flags & ~_BIG:
            raise DataError(
                f"{pages.file}: holds named databases or duplicate keys",
                "stagerun reads LMDBs as Caffe has, with one record a key",
            )
        size, value = _NODE.unpack_from(page, at)[0], at + _NODE_HEADER + key_size
        place = number * pages.page_size + value
        if flags == _BIG:
            first = int.from_bytes(page[value : value + 8], "little")
            if not 2 <= first <= pages.last:
                raise pages.damaged("a record is said to be in a page that doesn't exist")
            place = first * pages.page_size + _PAGE_HEADER
        if place + size > pages.size:
            raise pages.damaged("a record reaches over the end of the file")
        yield place, size, page[at + _NODE_HEADER : value]
