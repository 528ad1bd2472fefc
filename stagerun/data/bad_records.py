"""Training records that give no picture, and how many of them a run puts up with (`on_bad_record: REPLACE`)."""

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stagerun.base.errors import DataError
from stagerun.base.text import first

_ONE_IN = 1000
_MOST_SHOWN = 10
_REPLACE = "`on_bad_record: REPLACE` under `data` in schedule.prototxt takes another record in its place"


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
    """The bad ones that one worker knows of, each once, whichever stage met it. From any thread.

    Nothing stops here when there are too many: who trains asks `too_many` once per iteration, so that all workers end after
    the same update, report to each other what they have met, and none of it is lost.
    """

    def __init__(self, records: int) -> None:
        self._allowed = allowed(records)
        self._lock = threading.Lock()
        self._known: dict[int, Bad] = {}
        self._unseen: list[Bad] = []

    def add(self, bad: Bad) -> None:
        """This worker has met it."""
        with self._lock:
            if bad.index not in self._known:
                self._known[bad.index] = bad
                self._unseen.append(bad)

    def learn(self, others: Iterable[Bad]) -> list[Bad]:
        """Others have met these, now or in an earlier life of the run. Those that were not known here."""
        with self._lock:
            new = {bad.index: bad for bad in others if bad.index not in self._known}
            self._known |= new
        return list(new.values())

    def fresh(self) -> list[Bad]:
        """Those that this worker has met since the last call."""
        if not self._unseen:
            return []
        with self._lock:
            fresh, self._unseen = self._unseen, []
        return fresh

    def all(self) -> list[Bad]:
        with self._lock:
            return list(self._known.values())

    def too_many(self) -> bool:
        return len(self._known) > self._allowed


def check(met: Sequence[Bad], most: int) -> None:
    """DataError, naming them, when more than `most` were met."""
    if len(met) > most:
        raise DataError(
            f"{len(met)} bad records were met, more than one of a thousand:\n  {listed(met)}",
            "look into the LMDB: `stagerun data verify --decode` names all of them; make it again without them",
        )


def listed(met: Sequence[Bad]) -> str:
    """One a line, in the order of their numbers, the first ten."""
    return "\n  ".join(first([bad.text for bad in sorted(met, key=lambda bad: bad.index)], _MOST_SHOWN))


def stopping(error: Undecodable, position: int | None = None) -> Undecodable:
    """The error as it ends a training that doesn't replace: where it was met, and that it could."""
    where = f" (at position {position})" if position is not None else ""
    return Undecodable(f"{error.message}{where}", f"{error.hint}; {_REPLACE}" if error.hint else _REPLACE)
