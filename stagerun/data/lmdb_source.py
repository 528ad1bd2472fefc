"""An LMDB as numbered records: read-only, in the order of its keys, with plain reads of its file.

Where each record lies is known from the side file, or from one walk over the tree of pages. From then on a record is one
`pread` into the caller's memory: nothing is mapped, so that a file that shrinks or a disk that fails is an error with the
record's key instead of a SIGBUS; any thread may read, and so may a child after a fork; and a shuffled read of a file that
is not in memory moves the bytes of the record alone, 9 to 18 times as fast as page faults through LMDB's mapping.
"""

import os
import weakref

from stagerun.data import index
from stagerun.data.lmdb_offsets import offsets_in
from stagerun.data.records import Room, printable
from stagerun.errors import DataError, StorageError
from stagerun.lmdb_file import BY_COMMAND, BY_SCHEDULE, check_file, data_file, open_file, transaction_of

__all__ = ["LmdbSource", "check_file", "data_file"]


class LmdbSource:
    """`Records` of an LMDB's folder, numbered in the byte order of their keys, as Caffe reads them.

    It stays open as long as it is referred to, also when the file is removed. Encrypted, nested (named databases) and
    duplicate-key LMDBs are not Caffe's and not read.
    """

    def __init__(self, path: str, images: int | None = None, *, side_file: bool = True) -> None:
        """`images` is the number of records that the schedule states; DataError if there are others, or none.

        DataError too for a side file that belongs to another state of the LMDB; without `side_file` it isn't looked at.
        """
        self._fd, meta = open_file(path, BY_COMMAND if images is None else BY_SCHEDULE)
        self._close = weakref.finalize(self, os.close, self._fd)
        entries = meta.entries
        if entries == 0:
            raise DataError(f"{path}: the LMDB is empty", "its making was interrupted, or found no images")
        if images is not None and entries != images:
            raise DataError(
                f"{path}: holds {entries} records, but the schedule says images: {images}",
                f"write `images: {entries}` beside its `source` in schedule.prototxt, or name the folder meant",
            )
        self.name = path
        self.index = index.load_for(path, self._fd, meta) if side_file else None
        table = self.index or offsets_in(self._fd, meta, path)
        self._table, self._offsets, self._lengths = table, table.offsets, table.lengths
        self._transaction = meta.transaction
        self._changed = meta.changed  # mtime at which the transaction was last compared

    def __len__(self) -> int:
        return len(self._offsets)

    def key(self, i: int) -> bytes:
        return self._table.key(i)

    def get(self, i: int) -> tuple[bytes, bytes]:
        """(key, value) of record i. IndexError outside 0 .. len-1; errors as of `read`."""
        return self.key(i), bytes(self.read(i, Room()))

    def read(self, i: int, room: Room) -> memoryview:
        """The value of record i, in `room`. IndexError outside 0 .. len-1.

        StorageError when the disk fails; DataError when the file was cut off or written to since it was opened.
        """
        if not 0 <= i < len(self):
            raise IndexError(i)
        at, length = int(self._offsets[i]), int(self._lengths[i])
        value = room.of(length)
        try:
            if os.fstat(self._fd).st_mtime_ns != self._changed:
                self._compare()
            done = os.preadv(self._fd, (value,), at)
            while 0 < done < length:  # a read may be answered in parts
                more = os.preadv(self._fd, (value[done:],), at + done)
                done = done + more if more else -1
        except OSError as error:
            raise StorageError(
                f"{self._place(i)}: can't be read: {error.strerror}",
                "check the disk or the file server; the same command goes on",
            ) from None
        if done != length:
            raise DataError(
                f"{self._place(i)}: the file ends before it: it was cut off while it was read",
                "copy or make the LMDB again; don't write to it during a run",
            )
        return value

    def expect(self, indices: list[int]) -> None:
        """These records will be read soon, in this order: the kernel begins to fetch them. Never fails."""
        for i in indices:
            try:
                os.posix_fadvise(self._fd, int(self._offsets[i]), int(self._lengths[i]), os.POSIX_FADV_WILLNEED)
            except OSError:  # a file system without it; the read itself tells what is wrong with a disk
                return

    def _compare(self) -> None:
        """DataError if something was committed since the records' places were read: their pages may be others' by now."""
        changed = os.fstat(self._fd).st_mtime_ns
        if transaction_of(self._fd) != self._transaction:
            raise DataError(
                f"{self.name}: the LMDB was changed while it was read",
                "don't write to it during a run; start again with the LMDB as it is to be",
            )
        self._changed = changed

    def _place(self, i: int) -> str:
        return f"{self.name}: record `{printable(self.key(i))}`"
