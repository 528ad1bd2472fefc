"""The last process life in OUT/log.jsonl, read from the end of the file: it may hold millions of lines; and what is appended to it
from now on."""

import re
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stagerun.events import Event, Iterated, PieceStarted, Renamed, Retraced, RunStarted, StageStarted, Tested
from stagerun.logged import event_of
from stagerun.pace import WINDOW
from stagerun.store.faults import reporting

FIRST_LOOK = 1 << 18  # bytes; four times as many with each further look

# As `report.jsonl` writes them. Inside a text the quotes would have backslashes.
_STARTED, _ITERATED, _RETRACED = (b'"event": "%b"' % name for name in (b"RunStarted", b"Iterated", b"Retraced"))
_TESTS = re.compile(rb'"event": "(?:Tested|StageStarted)"')


@dataclass(frozen=True, slots=True)
class Life:
    """From the last RunStarted on: (seconds since the epoch, event), in order.

    `seen` has every event but Iterated and Retraced, of which a life may have millions; `window` the last iterations of the
    last stage, `retraced` those of a piece that came after it, WINDOW at most of either. `last` is the newest line. `unreadable`
    counts lines that are not whole, but for one at the end, which may be in the writing.
    """

    seen: tuple[tuple[float, Event], ...] = ()
    window: tuple[Iterated, ...] = ()
    retraced: tuple[Retraced, ...] = ()
    last: tuple[float, Event] | None = None
    unreadable: int = 0

    def of(self, *kinds: type) -> Iterator[Any]:
        return (event for _, event in self.seen if isinstance(event, kinds))


class Tail:
    """The events of a log that a run appends to, each once."""

    def __init__(self, path: Path) -> None:
        self._path, self._at, self._rest = path, 0, b""

    def __call__(self) -> list[tuple[float, Event]]:
        """What has come since the last call. A line that a kill cut short is left out."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._at)
                new = file.read()
        except FileNotFoundError:
            return []
        self._at += len(new)
        *lines, self._rest = (self._rest + new).split(b"\n")
        found = []
        for line in lines:
            with suppress(ValueError):
                event = event_of(line)
                if event is not None:
                    found.append(event)
        return found


def read_last_life(log: Path) -> Life | None:
    """None if there is no log, or nothing in it. StorageError, PermissionDenied."""
    with reporting("read the log", log):
        try:
            data = _tail(log)
        except FileNotFoundError:
            return None
    seen: list[tuple[float, Event]] = []
    recent: deque[tuple[int, bytes]] = deque(maxlen=WINDOW)
    again: deque[tuple[int, bytes]] = deque(maxlen=WINDOW)
    unreadable = 0
    # The newest line is the last in the file: a clock may be set back.
    last: tuple[int, tuple[float, Event] | None] = -1, None
    lines = data.split(b"\n")
    lines.pop()  # behind the last end of line: nothing, or a line in the writing
    for number, line in enumerate(lines):
        if _ITERATED in line or _RETRACED in line:
            (recent if _ITERATED in line else again).append((number, line))
            continue
        found, damaged = _parse(line)
        unreadable += damaged
        if found is not None:
            seen.append(found)
            last = number, found
            if isinstance(found[1], StageStarted):
                recent.clear()
            if isinstance(found[1], StageStarted | PieceStarted):
                again.clear()
    window: list[Iterated] = []
    retraced: list[Retraced] = []
    for number, line in (*recent, *again):
        found, damaged = _parse(line)
        unreadable += damaged
        if found is not None and isinstance(found[1], Iterated | Retraced):
            if isinstance(found[1], Iterated):
                window.append(found[1])
            else:
                retraced.append(found[1])
            last = max(last, (number, found), key=lambda numbered: numbered[0])
    return Life(tuple(seen), tuple(window), tuple(retraced), last[1], unreadable) if last[1] is not None else None


def earlier_tests(log: Path, stage: str) -> list[Tested]:
    """The evaluations inside a stage that count for where it is now, over all process lives: not those of iterations that
    were trained again after a kill. Reads all of the file, and parses a few of its lines. StorageError, PermissionDenied.
    """
    with reporting("read the log", log):
        data = log.read_bytes()
    found: list[Tested] = []
    for match in _TESTS.finditer(data):
        start, end = data.rfind(b"\n", 0, match.start()) + 1, data.find(b"\n", match.end())
        parsed, _ = _parse(data[start:end]) if end >= 0 else (None, False)
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


def _parse(line: bytes) -> tuple[tuple[float, Event] | None, bool]:
    """(time, event), None where there is none that this version knows; and whether the line is damaged."""
    try:
        return (event_of(line) if line.strip() else None), False
    except ValueError:
        return None, True


def started(life: Life) -> RunStarted | None:
    return next(life.of(RunStarted), None)


def names(life: Life) -> dict[str, str]:
    """By its name the stage of a snapshot that was written when the stage was called otherwise."""
    return {snapshot: event.stage for event in life.of(Renamed) for snapshot in event.snapshots}


def newest_start(life: Life) -> StageStarted | None:
    """Of a stage."""
    begun: list[StageStarted] = list(life.of(StageStarted))
    return begun[-1] if begun else None
