"""Events from the JSON that a run has written: lines of OUT/log.jsonl, files of OUT/results. Pure.

They come from outside: each value is checked against the types of `stagerun.events`.
"""

import json
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields

from stagerun import events
from stagerun.events import EnsembleTested, Event, StageFinished


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


def _texts(value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError("not a list")
    return tuple(_text(item) for item in value)


_READERS: dict[object, Callable[[object], object]] = {
    float: _number,
    int: _count,
    str: _text,
    bool: _flag,
    tuple[str, ...]: _texts,
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
