"""OUT/log.jsonl, back to events. Reads only, takes no lock: a run may be appending meanwhile."""

import json
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path

from stagerun import events
from stagerun.errors import PermissionDenied, StorageError, UsageError
from stagerun.events import Event

LOG = "log.jsonl"


@dataclass(frozen=True, slots=True)
class Log:
    """(time, event) in the order of writing; how many lines can't be read, and how many are of an event that this version
    doesn't know."""

    events: tuple[tuple[float, Event], ...]
    damaged: int = 0
    unknown: int = 0


def read_log(out: Path) -> Log:
    """The events of an output folder. A line that is not what a run writes is counted: the last one of a killed run may
    be cut short. UsageError if there is no log, PermissionDenied or StorageError if it can't be read.
    """
    path = out / LOG
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UsageError(*_no_log(out)) from error
    except PermissionError as error:
        raise PermissionDenied(f"{path} may not be read", "ask its owner for permission") from error
    except OSError as error:
        raise StorageError(f"can't read {path}: {error.strerror}", "check the disk") from error
    found: list[tuple[float, Event]] = []
    damaged = unknown = 0
    for line in data.split(b"\n"):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            maker = _MAKERS.get(record["event"])
            if maker is None:
                unknown += 1
            else:
                found.append((_number(record["time"]), maker(record)))
        except (ValueError, KeyError, TypeError, RecursionError):
            damaged += 1
    if not found:
        raise UsageError(f"{path} holds no event of a run", "wait until the run has begun, or name another folder")
    return Log(tuple(found), damaged, unknown)


def _no_log(out: Path) -> tuple[str, str]:
    """Message and hint."""
    if out.is_file():
        return (
            f"{out} is a file",
            f"name the output folder: {out.parent}" if out.name == LOG else "name an output folder",
        )
    if not out.exists():
        return f"there is no folder {out}", "name the output folder of a run: ./out/NAME, or what --out named"
    if (out / "schedule.prototxt").is_file():
        return (
            f"{out} is the folder of a schedule",
            "name the output folder of its run: ./out/NAME, or what --out named",
        )
    return f"{out} has no {LOG}", "name the output folder of a run that has begun: ./out/NAME, or what --out named"


# -- values from outside, checked against the types of stagerun.events


def _number(value: object) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):  # type: ignore[arg-type]
        raise ValueError("not a finite number")
    return float(value)  # type: ignore[arg-type]


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
        return kind(**{name: read(record[name]) for name, read, needed in known if needed or name in record})

    return make


_MAKERS = {kind.__name__: _maker(kind) for kind in typing.get_args(events.Event)}
