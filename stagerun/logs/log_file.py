"""OUT/log.jsonl: every event as one line of JSON. A run appends to it (`JsonLines`), and `Log` reads it. It may hold millions of lines, so
readers start at its end, with the last process life, or follow new lines."""

import io
import json
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from stagerun.base import events
from stagerun.base.pace import WINDOW
from stagerun.store.errors import reporting
from stagerun.system.files import LineFile, open_shared, why, writing
from stagerun.system.typed import decode

LOG = "log.jsonl"  # in an output folder
_HEAD = re.compile(rb'{"time": ?([0-9.e+]+), ?"event": ?"(\w+)"')  # of each line
# Fields that a line lacks where they have these values.
_OMITTED = {"sent_bytes": 0, "dense_bytes": 0, "gradients": "", "staleness": None, "replica": None}
_LATEST = 1e11  # seconds since the epoch: a later time is not a date
_LONGEST = 1 << 25  # bytes of a line, a thousand times a run's longest: longer ones must not fill the memory
# Bytes of the first block read from the end, and of the largest; each is four times the last.
_FIRST_BLOCK, _LARGEST_BLOCK = 1 << 12, 1 << 20

Line = tuple[float, events.Event]  # seconds since the epoch, event


class Log:
    """Reads a log. Each iteration continues at byte `at`, and leaves an unfinished line to the next one. A missing log is empty.
    OSError.

    `until`: the byte at which it stops, too. `damaged` counts unreadable lines, `unknown` lines with events of a later version.
    `wanted` selects events by name; others are not decoded."""

    def __init__(self, path: Path, wanted: Callable[[str], bool] = lambda name: True) -> None:
        self.path = path
        self.until: int | None = None
        self.at = self.damaged = self.unknown = 0
        self._wanted = wanted

    def __iter__(self) -> Iterator[Line]:
        with self._opened() as file:
            file.seek(self.at)
            while (self.until is None or self.at < self.until) and (line := file.readline(_LONGEST)):
                if not line.endswith(b"\n") and len(line) < _LONGEST:
                    return
                self.at += len(line)
                if (event := self._decoded(line)) is not None:
                    yield event

    def backward(self) -> Iterator[Line]:
        """Yield from the newest complete line to the first."""
        with self._opened() as file:
            at, rest, torn, block = file.seek(0, os.SEEK_END), b"", True, _FIRST_BLOCK
            while at > 0:
                start, block = max(0, at - block), min(block * 4, _LARGEST_BLOCK)
                file.seek(start)
                lines = (file.read(at - start) + rest).split(b"\n")
                at, rest = start, lines[0]  # the end of the line that `at` is in
                if torn:
                    torn = len(lines) == 1
                    lines.pop()
                for line in reversed(lines[start > 0 :]):
                    if (event := self._decoded(line)) is not None:
                        yield event

    def _opened(self) -> BinaryIO:
        try:
            return os.fdopen(open_shared(self.path), "rb")
        except FileNotFoundError:
            return io.BytesIO()

    def _decoded(self, line: bytes) -> Line | None:
        head = _HEAD.match(line)
        if head is None:
            self.damaged += line.strip() != b""
            return None
        name = head[2].decode()
        if not self._wanted(name):
            return None
        if (kind := events.Event.kinds.get(name)) is None:
            self.unknown += 1
            return None
        try:
            if (time := float(head[1])) >= _LATEST:
                raise ValueError("a time that no run writes")
            return time, decode(kind, line)
        except ValueError:
            self.damaged += 1
            return None


@dataclass(frozen=True, slots=True)
class Life:
    """A process life, from the last RunStarted on. Empty if nothing was logged.

    `seen` has every event but Iterated, Retraced, Compressed, Proof and Synchronised, since a life may have millions of these; `window` the
    last iterations of the last stage and `retraced` the last of a piece after it, WINDOW at most of either; `met` the last stage's newest
    Synchronised. `last` is the newest line. `unreadable` counts damaged lines.
    """

    seen: tuple[Line, ...] = ()
    window: tuple[events.Iterated, ...] = ()
    retraced: tuple[events.Retraced, ...] = ()
    met: events.Synchronised | None = None
    last: Line | None = None
    unreadable: int = 0

    def of(self, *kinds: type) -> Iterator[Any]:
        return (event for _, event in self.seen if isinstance(event, kinds))

    @property
    def run(self) -> events.RunStarted | None:
        return next(self.of(events.RunStarted), None)

    @property
    def stage(self) -> events.StageStarted | None:
        """The newest start of a stage."""
        return next(reversed(list(self.of(events.StageStarted))), None)

    @property
    def names(self) -> dict[str, str]:
        """Stages by the names of snapshots that were written when the stage had another name."""
        return {snapshot: event.stage for event in self.of(events.Renamed) for snapshot in event.snapshots}


def read_last_life(path: Path) -> Life:
    """Return the last process life; an empty one if the log is missing or empty. StorageError, PermissionDenied."""
    # Frequent events, and how many are still wanted.
    room = {"Iterated": WINDOW, "Retraced": WINDOW, "Synchronised": 1, "Compressed": 0, "Proof": 0, "Indexed": 0}
    frequent: defaultdict[str, list[Any]] = defaultdict(list)
    seen: list[Line] = []
    last: Line | None = None  # the last in the file: a clock may be set back
    log = Log(path, wanted=lambda name: room.get(name, 1) > 0)
    with reporting("read the log", path):
        for line in log.backward():
            last, name = last or line, type(line[1]).__name__
            if name in room:
                frequent[name].insert(0, line[1])
                room[name] -= 1
                continue
            seen.append(line)
            if isinstance(line[1], events.StageStarted | events.PieceStarted):
                room["Retraced"] = 0
            if isinstance(line[1], events.StageStarted):
                room = dict.fromkeys(room, 0)
            if isinstance(line[1], events.RunStarted):
                break
    met = next(iter(frequent["Synchronised"]), None)
    unreadable = log.damaged if last is not None else 0
    return Life(tuple(seen[::-1]), tuple(frequent["Iterated"]), tuple(frequent["Retraced"]), met, last, unreadable)


class JsonLines:
    """The sink of rank 0. Each line is written with one call: a killed run cuts at most its last line short, and the next run starts a new
    line.

    A log that can't be written doesn't end training: the first failure is a warning, and later events are still tried, each on a new line.
    PermissionDenied, StorageError if the file can't be opened.
    """

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self._path, self._warn, self._warned = path, warn, False
        with writing(path, "check the disk, or give another output folder with --out"):
            self._lines = LineFile(path)

    def __call__(self, event: events.Event) -> None:
        fields = {name: value for name, value in asdict(event).items() if value != _OMITTED.get(name, ...)}
        record = {"time": round(time.time(), 3), "event": type(event).__name__, **fields}
        try:
            self._lines.append(json.dumps(record).encode() + b"\n")
        except OSError as error:
            if not self._warned:
                self._warned = True
                self._warn(
                    f"warning: {self._path} can't be written: {why(error, self._path.parent)}; training continues without its lines"
                )

    def __enter__(self) -> "JsonLines":
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.close()
