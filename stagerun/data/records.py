"""Numbered records with keys, of an LMDB or its copy."""

import os
import threading
from typing import Protocol

import numpy as np

from stagerun.base.errors import DataError, StagerunError, StorageError
from stagerun.data.index import Index, load, printable, table_of
from stagerun.data.jpeg.decoder import Scratch
from stagerun.data.jpeg.header import as_bytes
from stagerun.data.scratch import Copy, Original, look
from stagerun.system.lmdb_file import BY_COMMAND, BY_SCHEDULE, LmdbFile

Room = Scratch  # memory that one thread reads records into, one after the other


class Records(Protocol):
    """Numbered records. Messages call them `name`, usually a path. Any thread may call."""

    name: str
    index: Index | None  # the side file

    def __len__(self) -> int: ...

    def key(self, i: int) -> bytes: ...

    def read(self, i: int, room: Room) -> memoryview:
        """Return the value of record i, 0 <= i < len, valid until the next read into `room`. DataError, StorageError."""
        ...

    def get(self, i: int) -> tuple[bytes, bytes]:
        """Return (key, value) of record i. Errors as in `read`."""
        return self.key(i), bytes(self.read(i, Room()))

    def expect(self, indices: list[int]) -> None:
        """Prepare for reading these records soon, in this order."""
        return


def spread(n: int, samples: int) -> list[int]:
    """Return at most `samples` (2 or more) of 0 .. n-1, evenly spaced, with the first and the last."""
    return sorted({int(i) for i in np.linspace(0, n - 1, min(n, samples)).round()})


# -- An LMDB as numbered records: read-only, in the order of its keys, with plain reads of its file.
#
# The side file, or one walk over the tree of pages, locates the records. From then on a record is one `pread` into the caller's
# memory: nothing is mapped, so that a shrunken file or a failing disk is an error with the record's key instead of a SIGBUS; any
# thread may read, and so may a child after a fork; and a shuffled read of a file that is not in memory moves only the bytes of the
# record, 9 to 18 times as fast as page faults through LMDB's mapping.


class LmdbSource(Records):
    """`Records` of an LMDB's folder, numbered in the byte order of their keys, as Caffe reads them.

    It stays open as long as it is referenced, even when the file is removed. Encrypted, nested (named databases) and
    duplicate-key LMDBs are refused.
    """

    def __init__(self, path: str, images: int | None = None, *, side_file: bool = True) -> None:
        """Open it. DataError unless the number of records is `images`, the schedule's, or if it is empty, or for a side file of
        another state of the LMDB; ignore that without `side_file`."""
        self.lmdb = LmdbFile(path, BY_COMMAND if images is None else BY_SCHEDULE)
        entries = self.lmdb.meta.entries
        if entries == 0:
            raise DataError(f"{path}: the LMDB is empty", "make it again: its import was interrupted, or saw no images")
        if images is not None and entries != images:
            raise DataError(
                f"{path}: holds {entries} records, but the schedule says images: {images}",
                f"write `images: {entries}` next to its `source` in schedule.prototxt, or correct the folder",
            )
        self.name = path
        self.index = load(path, self.lmdb) if side_file else None
        self.table = self.index or table_of(self.lmdb)

    def __len__(self) -> int:
        return len(self.table)

    def key(self, i: int) -> bytes:
        return self.table.key(i)

    def read(self, i: int, room: Room) -> memoryview:
        """Read the value of record i into `room`. IndexError outside 0 .. len-1.

        StorageError when the disk fails; DataError when the file was cut off or written to since it was opened.
        """
        if not 0 <= i < len(self):
            raise IndexError(i)
        lmdb, at, length, done = self.lmdb, int(self.table.offsets[i]), int(self.table.lengths[i]), 0
        value = as_bytes(room.of(length))
        try:
            if lmdb.is_changed():  # the pages of its records may be reused by now
                raise DataError(
                    f"{lmdb.path}: the LMDB was changed while it was read",
                    "don't write to it during a run; start again when it is complete",
                )
            # A read may be answered in parts.
            while done < length and (more := os.preadv(lmdb.fd, (value[done:],), at + done)):
                done += more
        except OSError as error:
            raise StorageError(
                f"{self._name(i)}: can't be read: {error.strerror}",
                "check the disk or the file server; the same command resumes",
            ) from None
        if done < length:
            raise DataError(
                f"{self._name(i)}: the file ends before it: it was cut off while it was read",
                "copy or make the LMDB again; don't write to it during a run",
            )
        return value

    def expect(self, indices: list[int]) -> None:
        """Have the kernel fetch these records. Never fails."""
        offsets, lengths = self.table.offsets, self.table.lengths
        for i in indices:
            try:
                os.posix_fadvise(self.lmdb.fd, int(offsets[i]), int(lengths[i]), os.POSIX_FADV_WILLNEED)
            except OSError:  # a file system without it; the read itself reports what is wrong with a disk
                return

    def _name(self, i: int) -> str:
        return f"{self.lmdb.path}: record `{printable(self.key(i))}`"


class SwitchingRecords(LmdbSource):
    """The records of `original`, read from a copy; `name` is the original's path.

    If the copy becomes unreadable (its disk fails, its file is cut off), the same records are read from the original: training
    continues with the same bytes, and `trouble` reports it.
    """

    def __init__(self, original: Original, images: int, copy: Copy | None = None) -> None:
        """Open the copy. Errors as for LmdbSource."""
        super().__init__(original.path if copy is None else copy.path, images)
        self.name = original.path
        self.trouble: list[str] = []  # messages for the user, until they are reported
        self._original, self._copy, self._lock = original, copy, threading.Lock()

    def read(self, i: int, room: Room) -> memoryview:
        lmdb = self.lmdb
        try:
            return super().read(i, room)
        except (DataError, StorageError) as error:
            with self._lock:
                if self.lmdb is lmdb:  # no other thread has switched
                    self._switch(error)
        return super().read(i, room)

    def _switch(self, error: StagerunError) -> None:
        """Switch from the unreadable copy to the original. The same error without a copy; StorageError without the original."""
        if self._copy is None:
            raise error
        self._copy.suspect()
        try:
            if look(self.name) != self._original:
                raise DataError(f"{self.name}: the LMDB was changed since it was copied")
            self.lmdb = LmdbFile(self.name, BY_SCHEDULE)
        except StagerunError as second:
            raise StorageError(
                f"{error.message}; and what it was copied from can't be read either: {second.message}",
                "check the scratch disk and the file server; the same command resumes from the newest snapshot",
            ) from None
        self._copy = None
        self.trouble.append(f"the copy in scratch can't be read: {error.message}; {self.name} is read from now on")
