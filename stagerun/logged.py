"""Events from the JSON that a run has written: lines of OUT/log.jsonl, files of OUT/results. Pure.

They come from outside: each value is checked against the types of `stagerun.events`.
"""

import json
import math
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields
from typing import BinaryIO

from stagerun import events
from stagerun.events import EnsembleTested, Event, Indexed, StageFinished

BLOCK = 1 << 12  # bytes that are read at first; four times as many with each further look
_MOST = 1 << 20
_INDEXED = b'"event": "Indexed"'  # as `report.jsonl` writes it; inside a text the quotes would have backslashes


def event_of(line: bytes) -> tuple[float, Event] | None:
    """(time, event) of a line; None for an event that this version doesn't know. ValueError for what no run writes."""
    record = _object(line)
    maker = _MAKERS.get(_text(record.get("event")))
    return None if maker is None else (_number(record.get("time")), maker(record))


def result_of(text: bytes) -> StageFinished:
    """The content of a file of OUT/results. ValueError for what no run writes."""
    found = _MAKERS[StageFinished.__name__](_object(text))
    assert isinstance(found, StageFinished)
    return found


def ensemble_of(text: bytes) -> EnsembleTested:
    """The content of a file of OUT/results/ensembles. ValueError for what no run writes."""
    found = _MAKERS[EnsembleTested.__name__](_object(text))
    assert isinstance(found, EnsembleTested)
    return found


class Backwards:
    """The lines of a log from the last to the first, without their ends, but for one in the writing and those of Indexed. Once
    `skipping` is set, they are without the Iterated and Retraced before the next Indexed."""

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


def _object(text: bytes) -> Mapping[str, object]:
    try:
        record = json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    if not isinstance(record, dict):
        raise ValueError("not an object")
    return record


def _number(value: object) -> float:
    if type(value) not in (int, float):
        raise ValueError("not a number")
    try:
        number = float(value)  # type: ignore[arg-type]
    except OverflowError as error:  # an int of hundreds of digits
        raise ValueError("not a finite number") from error
    if not math.isfinite(number):
        raise ValueError("not a finite number")
    return number


def _count(value: object) -> int:
    if type(value) is not int or value < 0:  # a bool is an int to isinstance
        raise ValueError("not a count")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("not a text")
    return value


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("not a bool")
    return value


def _list_of(read: Callable[[object], object]) -> Callable[[object], object]:
    def items(value: object) -> tuple[object, ...]:
        if not isinstance(value, list):
            raise ValueError("not a list")
        return tuple(map(read, value))

    return items


_READERS: dict[object, Callable[[object], object]] = {
    float: _number,
    int: _count,
    str: _text,
    bool: _flag,
    tuple[str, ...]: _list_of(_text),
    tuple[int, ...]: _list_of(_count),
}


def _reader(kind: object) -> Callable[[object], object]:
    if isinstance(kind, types.UnionType):  # `float | None`
        inner = _READERS[typing.get_args(kind)[0]]
        return lambda value: None if value is None else inner(value)
    return _READERS[kind]


def _maker(kind: type) -> Callable[[Mapping[str, object]], Event]:
    """What makes an event of that class from a line. Fields it doesn't know are passed over: a newer version's."""
    hints = typing.get_type_hints(kind)
    known = [(f.name, _reader(hints[f.name]), f.default is MISSING) for f in fields(kind)]

    def make(record: Mapping[str, object]) -> Event:
        # A field that is missing must have a default: it is younger than the line.
        if any(needed and name not in record for name, _, needed in known):
            raise ValueError("a field is missing")
        return kind(**{name: read(record[name]) for name, read, _ in known if name in record})

    return make


_MAKERS = {kind.__name__: _maker(kind) for kind in typing.get_args(events.Event)}
