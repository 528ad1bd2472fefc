"""Events from the JSON that a run has written: lines of OUT/log.jsonl, files of OUT/results. Pure.

They come from outside: each value is checked against the types of `stagerun.base.events`.
"""

import typing
from collections.abc import Iterable, Iterator
from typing import BinaryIO

from stagerun.base.events import EnsembleTested, Event, Indexed, StageFinished
from stagerun.system.typed import json_object, number, read_as

BLOCK = 1 << 12  # bytes that are read at first; four times as many with each further look
_MOST = 1 << 20
# Numbers in events are no larger: sums and products of them are finite, and a time is a date.
LARGEST, _LATEST = 1e100, 1e11
_INDEXED = b'"event": "Indexed"'  # as `report.jsonl` writes it; inside a text the quotes would have backslashes


def event_of(line: bytes) -> tuple[float, Event] | None:
    """(time, event) of a line; None for an event that this version doesn't know. ValueError for what no run writes."""
    record = json_object(line)
    if not isinstance(record.get("event"), str):
        raise ValueError("event is of another kind")
    kind = _KINDS.get(str(record["event"]))
    if kind is None:
        return None
    time = number(record.get("time"))
    if not 0 <= time < _LATEST or _largest(record.values()) > LARGEST:
        raise ValueError("a number that no run writes")
    return time, read_as(kind, record)


def _largest(values: Iterable[object]) -> float:
    """Return the largest size of the numbers, in lists too."""
    sizes = (
        _largest(value) if isinstance(value, list) else abs(value) if isinstance(value, int | float) else 0.0
        for value in values
    )
    return max(sizes, default=0.0)


def result_of(text: bytes) -> StageFinished:
    """The content of a file of OUT/results. ValueError for what no run writes."""
    return read_as(StageFinished, json_object(text))


def ensemble_of(text: bytes) -> EnsembleTested:
    """The content of a file of OUT/results/ensembles. ValueError for what no run writes."""
    return read_as(EnsembleTested, json_object(text))


class Backwards:
    """The lines of a log from the last to the first, without their ends, but for one in the writing and those of Indexed. Once
    `skipping` is set, those that it doesn't name are left out of what lies before the next Indexed."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.skipping = file, False

    def __iter__(self) -> Iterator[bytes]:
        at, rest, torn, look = self._file.seek(0, 2), b"", True, BLOCK  # `rest`: the end of the line that `at` is in
        while at > 0:
            start, look = max(0, at - look), min(look * 4, _MOST)
            self._file.seek(start)
            data = self._file.read(at - start) + rest
            lines = data.split(b"\n")
            at, rest, end = start, lines[0], start + len(data)
            if torn:
                torn, end = len(lines) == 1, end - len(lines.pop()) - 1
            for line in reversed(lines[start > 0 :]):
                begin, end = end - len(line), end - len(line) - 1
                if _INDEXED not in line:
                    yield line
                elif self.skipping and (index := self._index(line, begin)) is not None:
                    yield from index[1]
                    at, rest, torn, look = index[0], b"", True, BLOCK
                    break

    def _index(self, line: bytes, begin: int) -> tuple[int, list[bytes]] | None:
        """Where the lines begin that an Indexed is about, and those that it names, the last one first; None if it does not fit where it
        stands, as in a log that someone has edited."""
        try:
            found = event_of(line)
        except ValueError:
            return None
        assert found is not None and isinstance(found[1], Indexed)
        places = [found[1].since, *found[1].lines]
        if [*places, begin] != sorted([*places, begin]):
            return None
        named = []
        for place in places:
            self._file.seek(max(0, place - 1))
            if place and self._file.read(1) != b"\n":
                return None
            named.append(self._file.readline().rstrip(b"\n"))
        return places[0], named[:0:-1]


_KINDS = {kind.__name__: kind for kind in typing.get_args(Event)}
