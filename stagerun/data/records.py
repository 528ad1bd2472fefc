"""What a loader reads from: numbered records with keys. A small interface, and a list behind it."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class Records(Protocol):
    """Numbered records. `name` is what messages call the whole, a path as a rule."""

    @property
    def name(self) -> str: ...

    def __len__(self) -> int: ...

    def get(self, i: int) -> tuple[bytes, bytes]:
        """(key, value) of record i, 0 <= i < len. DataError if it can't be read. May be called from any thread."""
        ...


class ListRecords:
    """Records held in memory, with the keys that `write_lmdb` gives."""

    def __init__(self, values: Sequence[bytes], name: str = "memory") -> None:
        self.name = name
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def get(self, i: int) -> tuple[bytes, bytes]:
        return b"%08d" % i, self._values[i]


def printable(key: bytes) -> str:
    """A key as a message shows it: text where it is text, else escaped."""
    return key.decode("utf-8", "backslashreplace")


def spread(n: int, samples: int) -> list[int]:
    """At most `samples` (2 or more) of 0 .. n-1, evenly spaced, the first and the last among them."""
    return sorted({int(i) for i in np.linspace(0, n - 1, min(n, samples)).round()})
