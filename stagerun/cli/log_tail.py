"""The last process life in OUT/log.jsonl, read from the end of the file: it may hold millions of lines."""

import json
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, get_args, get_origin

from stagerun import events
from stagerun.events import Event, Iterated, RunStarted, StageStarted, Tested
from stagerun.pace import WINDOW
from stagerun.store.faults import reporting

FIRST_LOOK = 1 << 18  # bytes; four times as many with each further look

_KINDS: dict[str, Any] = {kind.__name__: kind for kind in get_args(events.Event)}
# As `report.jsonl` writes them. Inside a text the quotes would have backslashes.
_STARTED, _ITERATED = b'"event": "RunStarted"', b'"event": "Iterated"'
_TESTS = re.compile(rb'"event": "(?:Tested|StageStarted)"')


@dataclass(frozen=True, slots=True)
class Life:
    """From the last RunStarted on: (seconds since the epoch, event), in order.

    `seen` has every event but Iterated; `window` the last iterations of the last stage, WINDOW at most. `last` is the
    newest line. `unreadable` counts lines that are not whole, but for one at the end, which may be in the writing.
    """

    seen: tuple[tuple[float, Event], ...] = ()
    window: tuple[Iterated, ...] = ()
    last: tuple[float, Event] | None = None
    unreadable: int = 0

    def of(self, *kinds: type) -> Iterator[Any]:
        return (event for _, event in self.seen if isinstance(event, kinds))


def read_last_life(log: Path) -> Life | None:
    """None if there is no log, or nothing in it. StorageError, PermissionDenied."""
    with reporting("read the log", log):
        try:
            data = _tail(log)
        except FileNotFoundError:
            return None
    seen: list[tuple[float, Event]] = []
    recent: deque[bytes] = deque(maxlen=WINDOW)
    unreadable = 0
    lines = data.split(b"\n")
    lines.pop()  # behind the last end of line: nothing, or a line in the writing
    for line in lines:
        if _ITERATED in line:
            recent.append(line)
        elif (found := _parse(line)) is not None:
            seen.append(found)
            if isinstance(found[1], StageStarted):
                recent.clear()
        elif line and not _of_another_version(line):
            unreadable += 1
    iterated = [found for line in recent if (found := _parse(line)) is not None]
    unreadable += len(recent) - len(iterated)
    if not seen and not iterated:
        return None
    last = max([*seen[-1:], *iterated[-1:]], key=lambda found: found[0])
    return Life(tuple(seen), tuple(e for _, e in iterated if isinstance(e, Iterated)), last, unreadable)


def earlier_tests(log: Path, stage: str) -> list[Tested]:
    """The evaluations inside a stage that count for where it is now, over all process lives: not those of iterations that
    were trained again after a kill. Reads all of the file, and parses a few of its lines. StorageError, PermissionDenied.
    """
    with reporting("read the log", log):
        data = log.read_bytes()
    found: list[Tested] = []
    for match in _TESTS.finditer(data):
        start, end = data.rfind(b"\n", 0, match.start()) + 1, data.find(b"\n", match.end())
        parsed = _parse(data[start:end]) if end >= 0 else None
        match parsed[1] if parsed else None:
            case StageStarted() as begun if begun.stage == stage:
                found = [test for test in found if test.iter <= begun.iter]
            case Tested() as test if test.stage == stage:
                found.append(test)
    return found


def _tail(log: Path) -> bytes:
    """The bytes from the line of the last RunStarted on; all of the file if there is none."""
    look = FIRST_LOOK
    with open(log, "rb") as file:
        size = file.seek(0, 2)
        while True:
            start = max(0, size - look)
            file.seek(start)
            data = file.read(size - start)
            at = data.rfind(_STARTED)
            line = data.rfind(b"\n", 0, at) + 1 if at >= 0 else 0
            if start == 0 or line:
                return data[line:]
            look *= 4


def _parse(line: bytes) -> tuple[float, Event] | None:
    """(time, event); None for what is not a line of this log."""
    try:
        record = json.loads(line)
        kind = _KINDS[record["event"]]
        values = {f.name: record[f.name] for f in fields(kind) if f.name in record}
        required = {f.name for f in fields(kind) if f.default is MISSING}
        if required - values.keys() or not all(_fits(values[f.name], f.type) for f in fields(kind) if f.name in values):
            return None
        return float(record["time"]), kind(**values)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _fits(value: object, wanted: Any) -> bool:
    if wanted is float:
        return isinstance(value, int | float)
    if get_origin(wanted) is tuple:
        return isinstance(value, list) and all(isinstance(item, get_args(wanted)[0]) for item in value)
    return isinstance(value, wanted)


def _of_another_version(line: bytes) -> bool:
    """Whether it is a whole line about an event that this version does not know."""
    try:
        return json.loads(line)["event"] not in _KINDS
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


def started(life: Life) -> RunStarted | None:
    return next(life.of(RunStarted), None)
