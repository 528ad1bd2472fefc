"""What a loader reads from: numbered records with keys, held in memory, in an LMDB, or in a copy of one."""

import os
import threading
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from stagerun.base.errors import DataError, StagerunError, StorageError
from stagerun.data.index import Index, load, places_in, printable
from stagerun.data.jpeg.decoder import Scratch
from stagerun.data.jpeg.header import as_bytes
from stagerun.data.scratch import Copy, Original, look
from stagerun.system.lmdb_file import BY_COMMAND, BY_SCHEDULE, LmdbFile

Room = Scratch  # that one thread reads records into, one after the other


class Records(Protocol):
    """Numbered records. `name` is what messages call the whole, a path as a rule. Any thread may call."""

    @property
    def name(self) -> str: ...

    @property
    def index(self) -> Index | None:
        """The side file, where there is one."""
        ...

    def __len__(self) -> int: ...

    def key(self, i: int) -> bytes: ...

    def get(self, i: int) -> tuple[bytes, bytes]:
        """(key, value) of record i, 0 <= i < len. DataError, StorageError if it can't be read."""
        ...

    def read(self, i: int, room: Room) -> memoryview:
        """The value of record i, valid until the next read into `room`. Errors as in `get`."""
        ...

    def expect(self, indices: list[int]) -> None:
        """These records will be read soon, in this order."""
        ...


class ListRecords:
    """Records held in memory, with the keys that `write_lmdb` gives."""

    def __init__(self, values: Sequence[bytes], name: str = "memory") -> None:
        self.name = name
        self.index: Index | None = None
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def key(self, i: int) -> bytes:
        return b"%08d" % i

    def get(self, i: int) -> tuple[bytes, bytes]:
        return self.key(i), self._values[i]

    def read(self, i: int, room: Room) -> memoryview:
        return memoryview(self._values[i])

    def expect(self, indices: list[int]) -> None:
        """They are here."""


def spread(n: int, samples: int) -> list[int]:
    """At most `samples` (2 or more) of 0 .. n-1, evenly spaced, the first and the last among them."""
    return sorted({int(i) for i in np.linspace(0, n - 1, min(n, samples)).round()})


# -- An LMDB as numbered records: read-only, in the order of its keys, with plain reads of its file.
#
# Where each record lies is known from the side file, or from one walk over the tree of pages. From then on a record is one `pread` into
# the caller's memory: nothing is mapped, so that a file that shrinks or a disk that fails is an error with the record's key instead of
# a SIGBUS; any thread may read, and so may a child after a fork; and a shuffled read of a file that is not in memory moves the bytes of
# the record alone, 9 to 18 times as fast as page faults through LMDB's mapping.


class LmdbSource:
    """`Records` of an LMDB's folder, numbered in the byte order of their keys, as Caffe reads them.

    It stays open as long as it is referred to, also when the file is removed. Encrypted, nested (named databases) and
    duplicate-key LMDBs are not Caffe's and not read.
    """

    def __init__(self, path: str, images: int | None = None, *, side_file: bool = True) -> None:
        """`images` is the number of records that the schedule states; DataError if there are others, or none.

        DataError too for a side file that belongs to another state of the LMDB; without `side_file` it isn't looked at.
        """
        self.lmdb = LmdbFile(path, BY_COMMAND if images is None else BY_SCHEDULE)
        entries = self.lmdb.meta.entries
        if entries == 0:
            raise DataError(f"{path}: the LMDB is empty", "its making was interrupted, or found no images")
        if images is not None and entries != images:
            raise DataError(
                f"{path}: holds {entries} records, but the schedule says images: {images}",
                f"write `images: {entries}` beside its `source` in schedule.prototxt, or name the folder meant",
            )
        self.name = path
        self.index = load(path, self.lmdb) if side_file else None
        self.table = self.index or places_in(self.lmdb)

    def __len__(self) -> int:
        return len(self.table)

    def key(self, i: int) -> bytes:
        return self.table.key(i)

    def get(self, i: int) -> tuple[bytes, bytes]:
        """(key, value) of record i. IndexError outside 0 .. len-1; errors as in `read`."""
        return self.key(i), bytes(self.read(i, Room()))

    def read(self, i: int, room: Room) -> memoryview:
        """The value of record i, in `room`. IndexError outside 0 .. len-1.

        StorageError when the disk fails; DataError when the file was cut off or written to since it was opened.
        """
        if not 0 <= i < len(self):
            raise IndexError(i)
        at, length, done = int(self.table.offsets[i]), int(self.table.lengths[i]), 0
        value = as_bytes(room.of(length))
        try:
            if self.lmdb.is_changed():  # the pages of its records may be others' by now
                raise DataError(
                    f"{self.name}: the LMDB was changed while it was read",
                    "don't write to it during a run; start again with the LMDB as it is to be",
                )
            # A read may be answered in parts.
            while done < length and (more := os.preadv(self.lmdb.fd, (value[done:],), at + done)):
                done += more
        except OSError as error:
            raise StorageError(
                f"{self._place(i)}: can't be read: {error.strerror}",
                "check the disk or the file server; the same command goes on",
            ) from None
        if done < length:
            raise DataError(
                f"{self._place(i)}: the file ends before it: it was cut off while it was read",
                "copy or make the LMDB again; don't write to it during a run",
            )
        return value

    def expect(self, indices: list[int]) -> None:
        """These records will be read soon, in this order: the kernel begins to fetch them. Never fails."""
        offsets, lengths = self.table.offsets, self.table.lengths
        for i in indices:
            try:
                os.posix_fadvise(self.lmdb.fd, int(offsets[i]), int(lengths[i]), os.POSIX_FADV_WILLNEED)
            except OSError:  # a file system without it; the read itself reports what is wrong with a disk
                return

    def _place(self, i: int) -> str:
        return f"{self.name}: record `{printable(self.key(i))}`"


class SwitchingRecords:
    """`Records` of `original`. Reads a copy; `name` is the original's path.

    A copy that can't be read any more (its disk fails, its file is cut off) is left for the original, in mid-run too:
    training goes on with the same bytes, and `trouble` says so.
    """

    def __init__(self, original: Original, images: int, copy: Copy | None = None) -> None:
        """`images` as for LmdbSource; its errors."""
        self.name = original.path
        self.trouble: list[str] = []  # what the user should know; whoever reports it takes it out
        self._original, self._images, self._copy = original, images, copy
        self._lock = threading.Lock()
        self._now = LmdbSource(original.path if copy is None else copy.path, images)

    @property
    def index(self) -> Index | None:
        return self._now.index

    def __len__(self) -> int:
        return len(self._now)

    def key(self, i: int) -> bytes:
        return self._now.key(i)

    def get(self, i: int) -> tuple[bytes, bytes]:
        return self.key(i), bytes(self.read(i, Room()))

    def read(self, i: int, room: Room) -> memoryview:
        now = self._now
        try:
            return now.read(i, room)
        except (DataError, StorageError) as error:
            with self._lock:
                if self._now is now:  # no other thread has switched
                    self._switch(error)
        return self._now.read(i, room)

    def expect(self, indices: list[int]) -> None:
        self._now.expect(indices)

    def _switch(self, error: StagerunError) -> None:
        """From the copy, which can't be read, to the original. The error itself without a copy; StorageError if the original is gone, too."""
        if self._copy is None:
            raise error
        self._copy.suspect()
        try:
            if look(self._original.path) != self._original:
                raise DataError(f"{self._original.path}: the LMDB was changed since it was copied")
            self._now = LmdbSource(self._original.path, self._images)
        except StagerunError as second:
            raise StorageError(
                f"{error.message}; and what it was copied from can't be read either: {second.message}",
                "check the scratch disk and the file server; the same command goes on from the newest snapshot",
            ) from None
        self._copy = None
        self.trouble.append(
            f"the copy in scratch can't be read: {error.message}; {self._original.path} is read from now on"
        )
