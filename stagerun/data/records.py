"""What a loader reads from: numbered records with keys. A small interface, and a list behind it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:  # which needs `printable`
    from stagerun.data.index import Index

_KEEP = 1 << 26  # bytes kept from one record to the next


class Room:
    """Memory that one thread reads records into, one after the other; it grows to the largest but for giants."""

    def __init__(self) -> None:
        self._view = memoryview(bytearray(0))

    def of(self, size: int) -> memoryview:
        """`size` bytes to write to, the same memory each time."""
        if size > _KEEP:
            return memoryview(bytearray(size))
        if len(self._view) < size:
            self._view = memoryview(bytearray(min(_KEEP, max(size, 2 * len(self._view)))))
        return self._view[:size]


class Records(Protocol):
    """Numbered records. `name` is what messages call the whole, a path as a rule. Any thread may call."""

    @property
    def name(self) -> str: ...

    @property
    def index(self) -> "Index | None":
        """The side file, where there is one."""
        ...

    def __len__(self) -> int: ...

    def key(self, i: int) -> bytes: ...

    def get(self, i: int) -> tuple[bytes, bytes]:
        """(key, value) of record i, 0 <= i < len. DataError, StorageError if it can't be read."""
        ...

    def read(self, i: int, room: Room) -> memoryview:
        """The value of record i, valid until the next read into `room`. Errors as of `get`."""
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


def printable(key: bytes) -> str:
    """A key as a message shows it: text where it is text, else escaped."""
    return key.decode("utf-8", "backslashreplace")


def spread(n: int, samples: int) -> list[int]:
    """At most `samples` (2 or more) of 0 .. n-1, evenly spaced, the first and the last among them."""
    return sorted({int(i) for i in np.linspace(0, n - 1, min(n, samples)).round()})
