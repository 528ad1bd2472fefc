"""The file of an LMDB, looked at before anybody maps or reads it: is it there, is it whole, how many records has it."""

import os
import struct
from pathlib import Path

from stagerun.errors import DataError, PermissionDenied

# LMDB's file starts with two meta pages, of which the one with the larger transaction number counts. All
# little-endian here, as written by a 64-bit machine: 16 bytes of page header, then magic, version, address, map size;
# the record of the free list (its first field is the page size), the record of the data (its entries are counted);
# last page, transaction.
_META = struct.Struct("<16x II QQ I44x 32xQ8x QQ")
_MAGIC, _VERSION = 0xBEEFC0DE, 1
_PAGE_SIZES = {1 << n for n in range(8, 17)}


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


def transaction_of(fd: int) -> int | None:
    """The newest transaction of the open data.mdb; each commit adds 1. None where it is no LMDB. OSError."""
    metas = _read_metas(fd)
    return None if metas is None else max(meta[3] for meta in metas)


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
