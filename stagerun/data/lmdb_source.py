"""An LMDB as numbered records: read-only, without its lock file, in the order of its keys.

The file must not shrink while it is open: a page that is gone is a SIGBUS, which ends the process. Sizes are therefore
compared before it is opened (`check_file`), and `scratch` copies it to a disk that nobody else writes to.
"""

import os
import struct
import threading
import weakref
from pathlib import Path

import lmdb
import numpy as np

from stagerun.data.records import printable
from stagerun.errors import DataError, PermissionDenied

# LMDB's file starts with two meta pages, of which the one with the larger transaction number counts. All
# little-endian here, as written by a 64-bit machine: 16 bytes of page header, then magic, version, address, map size;
# the record of the free list (its first field is the page size), the record of the data (its entries are counted);
# last page, transaction.
_META = struct.Struct("<16x II QQ I44x 32xQ8x QQ")
_MAGIC, _VERSION = 0xBEEFC0DE, 1
_PAGE_SIZES = {1 << n for n in range(8, 17)}

# LMDB forbids to open a file twice in one process: those who read the same file share it, by process, device, inode.
_open: "weakref.WeakValueDictionary[tuple[int, int, int], _Shared]" = weakref.WeakValueDictionary()
_opening = threading.Lock()


def data_file(path: str) -> Path:
    """The file data.mdb of an LMDB's folder. DataError if there is no such folder or file."""
    folder = Path(path)
    hint = "check `source` under `data` in schedule.prototxt"
    try:
        if folder.is_file():
            raise DataError(f"{path}: is a file, not the folder of an LMDB", "give the folder that holds data.mdb")
        if not folder.is_dir():
            raise DataError(f"{path}: no such folder", hint)
        if not (folder / "data.mdb").is_file():
            raise DataError(f"{path}: not an LMDB: there is no data.mdb in it", hint)
    except PermissionError:
        raise PermissionDenied(f"{path}: may not be read", "ask its owner for read permission") from None
    return folder / "data.mdb"


def check_file(path: str) -> int:
    """Number of records of the LMDB in folder `path`, from its meta pages. DataError unless it is whole."""
    file = data_file(path)
    try:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            metas = _read_metas(stream.fileno())
    except PermissionError:
        raise PermissionDenied(f"{file}: may not be read", "ask its owner for read permission") from None
    except OSError as error:
        raise DataError(f"{file}: can't be read: {error.strerror}", "check the disk or the file server") from None
    if metas is None:
        raise DataError(f"{file}: not an LMDB of a 64-bit machine", "make it again, or copy it again")
    page, entries, last_page, _ = max(metas, key=lambda meta: meta[3])
    needed = (last_page + 1) * page
    if size < needed:
        raise DataError(
            f"{file}: is cut off: {size} bytes, where its header says {needed}",
            "its copy or its making was interrupted; copy or make it again",
        )
    return entries


def _read_metas(fd: int) -> list[tuple[int, int, int, int]] | None:
    """(page size, entries, last page, transaction) of both meta pages, or None where they are no meta pages."""
    metas: list[tuple[int, int, int, int]] = []
    at = 0
    while len(metas) < 2:
        header = os.pread(fd, _META.size, at)
        if len(header) < _META.size:
            return None
        magic, version, _, _, page, entries, last_page, txn = _META.unpack(header)
        if magic != _MAGIC or version != _VERSION or page not in _PAGE_SIZES:
            return None
        metas.append((page, entries, last_page, txn))
        at = page
    return metas


class _Shared:
    """The one environment of a file in this process, its long-lived read transaction, and its keys.

    The keys lie one after the other in one string: 40 bytes a record instead of 100 for ILSVRC.
    """

    def __init__(self, path: str, entries: int) -> None:
        self.env = lmdb.open(path, readonly=True, lock=False, create=False)
        keys = bytearray()
        ends = np.zeros(entries + 1, np.int64)
        with self.env.begin() as txn:
            n = 0
            for n, key in enumerate(txn.cursor().iternext(keys=True, values=False), start=1):
                keys += key
                if n <= entries:
                    ends[n] = len(keys)
        if n != entries:
            raise DataError(f"{path}: its header says {entries} records, but there are {n}", "make the LMDB again")
        self.keys, self.ends = bytes(keys), ends

    def key(self, i: int) -> bytes:
        return self.keys[self.ends[i] : self.ends[i + 1]]


def _share(path: str, entries: int) -> _Shared:
    stat = data_file(path).stat()
    identity = (os.getpid(), stat.st_dev, stat.st_ino)
    with _opening:
        shared = _open.get(identity)
        if shared is None:
            try:
                shared = _Shared(path, entries)
            except lmdb.Error as error:
                raise DataError(f"{path}: can't be opened: {error}", "make or copy the LMDB again") from None
            _open[identity] = shared
        return shared


class LmdbSource:
    """`Records` of an LMDB's folder, numbered in the byte order of their keys, as Caffe reads them.

    Make it in the process that reads it, not before a fork. It stays open as long as it is referred to. `get` may be
    called from several threads. Opening reads every key once, from the leaf pages only. Encrypted, nested (named
    databases) and duplicate-key LMDBs are not Caffe's and not read.
    """

    def __init__(self, path: str, images: int | None = None) -> None:
        """`images` is the number of records that the schedule states; DataError if there are others, or none."""
        entries = check_file(path)
        if entries == 0:
            raise DataError(f"{path}: the LMDB is empty", "its making was interrupted, or found no images")
        if images is not None and entries != images:
            raise DataError(
                f"{path}: holds {entries} records, but the schedule says images: {images}",
                f"write `images: {entries}` beside its `source` in schedule.prototxt, or name the folder meant",
            )
        self.name = path
        self._shared = _share(path, entries)

    def __len__(self) -> int:
        return len(self._shared.ends) - 1

    def get(self, i: int) -> tuple[bytes, bytes]:
        """(key, value) of record i. IndexError outside 0 .. len-1; DataError if the LMDB is damaged there."""
        if not 0 <= i < len(self):
            raise IndexError(i)
        key = self._shared.key(i)
        place = f"{self.name}: record `{printable(key)}`"
        try:
            with self._shared.env.begin() as txn:
                value = txn.get(key)
        except lmdb.Error as error:
            raise DataError(f"{place}: can't be read: {error}", "make or copy the LMDB again") from None
        if value is None:
            raise DataError(
                f"{place}: is gone", "the LMDB was changed while it was read; don't write to it during a run"
            )
        return key, bytes(value)
