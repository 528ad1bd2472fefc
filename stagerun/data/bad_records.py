"""Training records that give no picture, and how many of them a run puts up with (`on_bad_record: REPLACE`)."""

import threading
from dataclasses import dataclass

from stagerun.errors import DataError

_ONE_IN = 1000
_MOST_SHOWN = 10


class Undecodable(DataError):
    """A record was read whole, but its bytes give no picture."""


@dataclass(frozen=True, slots=True)
class Bad:
    """Record number `index`, met first at `position`; `text` names LMDB, key and what is wrong."""

    index: int
    position: int
    text: str


def allowed(records: int) -> int:
    """How many of so many records may be bad: one of a thousand, and one of any number."""
    return max(1, records // _ONE_IN)


class BadRecords:
    """The bad ones that one worker has met in this process's life, each once, whichever stage met it. From any thread."""

    def __init__(self, records: int) -> None:
        self._allowed = allowed(records)
        self._lock = threading.Lock()
        self._met: dict[int, Bad] = {}
        self._unseen: list[Bad] = []

    def add(self, bad: Bad) -> None:
        """DataError, naming them, when there are too many."""
        with self._lock:
            if bad.index in self._met:
                return
            self._met[bad.index] = bad
            self._unseen.append(bad)
            met = list(self._met.values())
        check(met, self._allowed)

    def fresh(self) -> list[Bad]:
        """Those met since the last call."""
        if not self._unseen:
            return []
        with self._lock:
            fresh, self._unseen = self._unseen, []
        return fresh

    def all(self) -> list[Bad]:
        with self._lock:
            return list(self._met.values())


def check(met: list[Bad], most: int) -> None:
    """DataError, naming them, when more than `most` were met."""
    if len(met) > most:
        raise DataError(
            f"{len(met)} bad records were met, more than one of a thousand:\n  {listed(met)}",
            "look into the LMDB: `stagerun data verify` names all of them; make it again without them",
        )


def listed(met: list[Bad]) -> str:
    """One a line, in the order of their numbers, the first ten."""
    lines = [bad.text for bad in sorted(met, key=lambda bad: bad.index)]
    return "\n  ".join(
        lines[:_MOST_SHOWN] + ([f"and {len(lines) - _MOST_SHOWN} more"] if len(lines) > _MOST_SHOWN else [])
    )
