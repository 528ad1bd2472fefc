"""Events from the JSON that a run has written: lines of OUT/log.jsonl, files of OUT/results. Pure.

They come from outside: each value is checked against the types of `stagerun.base.events`.
"""

import typing
from collections.abc import Collection, Iterator
from typing import BinaryIO

from stagerun.base.events import EnsembleTested, Event, StageFinished
from stagerun.system.typed import json_object, read_as

BLOCK = 1 << 12  # bytes that are read at first; four times as many with each further look
_MOST = 1 << 20
# Numbers in events are no larger: sums and products of them are finite, and a time is a date.
LARGEST, _LATEST = 1e100, 1e11


def event_of(line: bytes) -> tuple[float, Event] | None:
    """(time, event) of a line; None for an event that this version doesn't know. ValueError for what no run writes."""
    record = json_object(line)
    if not isinstance(record.get("event"), str):
        raise ValueError("event is of another kind")
    kind = _KINDS.get(str(record["event"]))
    if kind is None:
        return None
    time = read_as(float, record.get("time"))
    if not 0 <= time < _LATEST or _largest(record.values()) > LARGEST:
        raise ValueError("a number that no run writes")
    return time, read_as(kind, record)


def _largest(values: Collection[object]) -> float:
    """Return the largest size of the numbers, in lists too."""
    sizes = [abs(value) for value in values if isinstance(value, int | float)]
    return max([*sizes, *(_largest(value) for value in values if isinstance(value, list))], default=0.0)


def result_of(text: bytes) -> StageFinished:
    """The content of a file of OUT/results. ValueError for what no run writes."""
    return read_as(StageFinished, json_object(text))


def ensemble_of(text: bytes) -> EnsembleTested:
    """The content of a file of OUT/results/ensembles. ValueError for what no run writes."""
    return read_as(EnsembleTested, json_object(text))


def backwards(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a log from the last to the first, without their ends, but for one in the writing."""
    at, rest, torn, look = file.seek(0, 2), b"", True, BLOCK  # `rest`: the end of the line that `at` is in
    while at > 0:
        start, look = max(0, at - look), min(look * 4, _MOST)
        file.seek(start)
        lines = (file.read(at - start) + rest).split(b"\n")
        at, rest = start, lines[0]
        if torn:
            torn = len(lines) == 1
            lines.pop()
        yield from reversed(lines[start > 0 :])


_KINDS = {kind.__name__: kind for kind in typing.get_args(Event)}
