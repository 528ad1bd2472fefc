"""OUT/log.jsonl: every event as one line of JSON. A run appends to it. It may hold millions of lines, so readers start at its end, with the
last process life, or follow what is appended from now on."""

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from stagerun.base.errors import PermissionDenied, StorageError
from stagerun.base.events import (
    Event,
    Iterated,
    PieceStarted,
    Renamed,
    Retraced,
    RunStarted,
    StageStarted,
    Synchronised,
    Tested,
)
from stagerun.base.pace import WINDOW
from stagerun.store.errors import reporting
from stagerun.store.events import backwards, event_of
from stagerun.system.files import LineFile, open_shared, why

LOG = "log.jsonl"  # in an output folder
# As JsonLines writes it. Inside a text the quotes would have backslashes.
_EVENT = re.compile(rb'"event": "(\w+)"')
# Fields that a line lacks where they have these values.
_OMITTED = {"sent_bytes": 0, "dense_bytes": 0, "gradients": "", "staleness": None, "replica": None}
_BUFFER = 1 << 10  # bytes that are read for a line by itself
_LONGEST = 1 << 25  # bytes of a line: no run writes a thousandth of that, and longer ones must not fill the memory


@dataclass(frozen=True, slots=True)
class Life:
    """A process life, from the last RunStarted on: (seconds since the epoch, event), in order. Empty if nothing was logged.

    `seen` has every event but Iterated, Retraced, Compressed, Proof and Synchronised, of which a life may have millions; `window` the last
    iterations of the last stage, `retraced` those of a piece that came after it, WINDOW at most of either; `met` the last stage's newest
    Synchronised. `last` is the newest line. `unreadable` counts lines that are not whole, but for one at the end, which may be in the
    writing.
    """

    seen: tuple[tuple[float, Event], ...] = ()
    window: tuple[Iterated, ...] = ()
    retraced: tuple[Retraced, ...] = ()
    met: Synchronised | None = None
    last: tuple[float, Event] | None = None
    unreadable: int = 0

    def of(self, *kinds: type) -> Iterator[Any]:
        return (event for _, event in self.seen if isinstance(event, kinds))

    @property
    def run(self) -> RunStarted | None:
        return next(self.of(RunStarted), None)

    @property
    def stage(self) -> StageStarted | None:
        """The newest start of a stage."""
        return next(reversed(list(self.of(StageStarted))), None)

    @property
    def names(self) -> dict[str, str]:
        """Stages by the names of snapshots that were written when the stage had another name."""
        return {snapshot: event.stage for event in self.of(Renamed) for snapshot in event.snapshots}


@dataclass(slots=True)
class Place:
    """How far a log was read: `begin` and `at` are the bytes where the newest line starts and ends. `damaged` counts lines that no run
    writes, `unknown` those of events that only a later version knows."""

    at: int = 0
    begin: int = 0
    damaged: int = 0
    unknown: int = 0


def read_on(file: BinaryIO, place: Place) -> Iterator[tuple[float, Event]]:
    """Yield (seconds since the epoch, event) from `place` on, which moves along. A line without an end waits for the next call: it may be in
    the writing."""
    file.seek(place.at)
    while line := file.readline(_LONGEST):
        if not line.endswith(b"\n") and len(line) < _LONGEST:
            return
        place.begin, place.at = place.at, place.at + len(line)
        found, damaged = _parse(line)
        place.damaged += damaged
        if found is not None:
            yield found
        elif not damaged and line.strip():
            place.unknown += 1


class Tail:
    """The events of a log that a run appends to, each once. `at`: the byte from which on."""

    def __init__(self, path: Path, at: int = 0) -> None:
        self._path, self._place = path, Place(at)

    def __call__(self) -> list[tuple[float, Event]]:
        """Return what has come since the last call."""
        try:
            with os.fdopen(open_shared(self._path), "rb") as file:
                return [*read_on(file, self._place)]
        except FileNotFoundError:
            return []


def read_last_life(log: Path) -> Life:
    """Return the last process life; an empty one if the log is missing or empty. StorageError, PermissionDenied."""
    with reporting("read the log", log):
        try:
            with os.fdopen(open_shared(log), "rb", buffering=_BUFFER) as file:
                return _last_life(backwards(file))
        except FileNotFoundError:
            return Life()


def _last_life(lines: Iterator[bytes]) -> Life:
    seen: list[tuple[float, Event]] = []
    window: list[Iterated] = []
    retraced: list[Retraced] = []
    met: Synchronised | None = None
    # The newest line is the last in the file: a clock may be set back.
    last: tuple[float, Event] | None = None
    unreadable, stage_seen, piece_seen = 0, False, False  # the newest StageStarted; that or a PieceStarted
    for line in lines:
        match _kind(line):
            case b"Compressed" | b"Proof" | b"Indexed":
                continue
            case b"Iterated" if stage_seen or len(window) == WINDOW:
                continue
            case b"Retraced" if piece_seen or len(retraced) == WINDOW:
                continue
            case b"Synchronised" if stage_seen or met is not None:
                continue
        found, damaged = _parse(line)
        unreadable += damaged
        if found is None:
            continue
        last = last or found
        match found[1]:
            case Iterated() as event:
                window.append(event)
            case Retraced() as event:
                retraced.append(event)
            case Synchronised() as event:
                met = event
            case event:
                seen.append(found)
                stage_seen |= isinstance(event, StageStarted)
                piece_seen |= isinstance(event, StageStarted | PieceStarted)
        if isinstance(found[1], RunStarted):
            break
    if last is None:
        return Life()
    return Life(tuple(seen[::-1]), tuple(window[::-1]), tuple(retraced[::-1]), met, last, unreadable)


def earlier_tests(log: Path, stage: str) -> list[Tested]:
    """The evaluations inside a stage that count for where it is now, over all process lives: not those of iterations that
    were trained again after a kill. Reads back to the stage's start. StorageError, PermissionDenied.
    """
    found: list[Tested] = []
    with reporting("read the log", log), os.fdopen(open_shared(log), "rb", buffering=_BUFFER) as file:
        last = None
        for line in backwards(file):
            parsed = _parse(line)[0] if _kind(line) in (b"Tested", b"StageStarted") else None
            match parsed and parsed[1]:
                case StageStarted() as start if start.stage == stage:
                    last = start.iter if last is None else min(last, start.iter)
                    if last == start.begins:
                        break
                case Tested() as test if test.stage == stage and (last is None or test.iter <= last):
                    found.append(test)
    return found[::-1]


def _kind(line: bytes) -> bytes:
    """The name of the line's event, without a look at the rest."""
    found = _EVENT.search(line)
    return found[1] if found else b""


def _parse(line: bytes) -> tuple[tuple[float, Event] | None, bool]:
    """(time, event), None where there is none that this version knows; and whether the line is damaged."""
    try:
        return (event_of(line) if line.strip() else None), False
    except ValueError:
        return None, True


class JsonLines:
    """Rank 0 only. Each line is written whole with one call: a killed run leaves at most its last line cut short, and the next run
    starts on a line of its own.

    A log that can't be written is not a reason to lose training: `warn` hears of the first failure, and later events are
    still tried, each on a line of its own. PermissionDenied, StorageError if the file can't be opened.
    """

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self._path, self._warn, self._warned = path, warn, False
        try:
            self._lines = LineFile(path)
        except PermissionError as error:
            raise PermissionDenied(f"{path}: may not be written", "give another output folder with --out") from error
        except OSError as error:
            raise StorageError(f"{path}: can't be written: {why(error, path.parent)}", "check the disk") from error

    def __call__(self, event: Event) -> None:
        said = {name: value for name, value in asdict(event).items() if value != _OMITTED.get(name, ...)}
        record = {"time": round(time.time(), 3), "event": type(event).__name__, **said}
        try:
            self._lines.append(json.dumps(record).encode() + b"\n")
        except OSError as error:
            if not self._warned:
                self._warned = True
                self._warn(
                    f"warning: {self._path} can't be written: {why(error, self._path.parent)}; training goes on without its lines"
                )

    def __enter__(self) -> "JsonLines":
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.close()
