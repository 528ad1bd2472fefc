"""Records read from an LMDB where it is or from a copy of it, changing over between two reads without changing a byte."""

import threading
from collections.abc import Callable
from typing import TypeVar

from stagerun.data.index import Index
from stagerun.data.lmdb_source import LmdbSource
from stagerun.data.records import Room
from stagerun.data.scratch import Copy, Original, look
from stagerun.errors import DataError, StagerunError, StorageError

T = TypeVar("T")


class SwitchingRecords:
    """`Records` of `original`. Begins where that is, or with a copy; `name` is the original's path in either case.

    A copy that can't be read any more (its disk fails, its file is cut off) is left for the original, in mid-run too:
    training goes on with the same bytes, and `trouble` says so.
    """

    def __init__(self, original: Original, images: int, copy: Copy | None = None) -> None:
        """`images` as for LmdbSource; its errors."""
        self.name = original.path
        self.trouble: list[str] = []  # what the user should know; whoever tells it takes it out
        self._original, self._images = original, images
        self._lock = threading.Lock()
        self._copy: Copy | None = None
        self._now = LmdbSource(original.path if copy is None else copy.path, images)
        self._copy = copy

    @property
    def copied(self) -> bool:
        """Whether a copy is read."""
        return self._copy is not None

    @property
    def index(self) -> Index | None:
        return self._now.index

    def __len__(self) -> int:
        return len(self._now)

    def key(self, i: int) -> bytes:
        return self._now.key(i)

    def get(self, i: int) -> tuple[bytes, bytes]:
        return self._try(lambda now: now.get(i))

    def read(self, i: int, room: Room) -> memoryview:
        return self._try(lambda now: now.read(i, room))

    def expect(self, indices: list[int]) -> None:
        self._now.expect(indices)

    def switch(self, copy: Copy) -> None:
        """From now on the copy is read. A read under way in another thread ends with the file it began with, which is closed
        when the last of them is done. LmdbSource's errors: then nothing is changed."""
        new = LmdbSource(copy.path, self._images)
        with self._lock:
            self._now, self._copy = new, copy

    def _try(self, read: Callable[[LmdbSource], T]) -> T:
        now = self._now
        try:
            return read(now)
        except (DataError, StorageError) as error:
            other = self._instead_of(now, error)
            if other is None:
                raise
        return read(other)

    def _instead_of(self, now: LmdbSource, error: StagerunError) -> LmdbSource | None:
        """What to read in place of `now`; None if that is the original itself. StorageError if the original is gone, too."""
        with self._lock:
            if self._now is not now:  # another thread has been here
                return self._now
            if self._copy is None:
                return None
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
            return self._now
