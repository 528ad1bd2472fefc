"""Follows the log of a run: each look reads what has been added since the one before."""

import os
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from stagerun.base import events
from stagerun.store.layout import parse_name, snapshots_folder
from stagerun.tools.report.history import History
from stagerun.tools.report.read_log import Log, Updates, no_event, opened, whole_lines
from stagerun.tools.report.replay import Replay
from stagerun.tools.view.trace import Incident, Trace

TAIL = 256  # bytes before the place that is read from, by which a log that was written anew is recognised
LITTLE = 1 << 16  # bytes that are read where there is no time: enough for a first look at a hundred runs
MOST = 1000  # incidents that are kept, the newest: a broken run may warn at every iteration


class Follower:
    """`most`: points that stay of its curves. A line that has no end yet waits for the next look. `behind`: the last look ran out of
    time, and there is more to read."""

    def __init__(self, out: Path, most: int) -> None:
        self.out, self.most, self.behind = out, most, False
        self._saved: tuple[int, tuple[tuple[str, int], ...]] = 0, ()
        self._begin()

    def _begin(self) -> None:
        self._log, self._replay, self._past = Log(), Replay(), _Past()
        self._file, self._tail = (0, 0), b""
        self._history: tuple[int, History] | None = None

    def read(self, seconds: float = float("inf")) -> History:
        """Reads on for so many seconds; with 0 it reads only the beginning of a log that no look has seen yet. A log that was replaced or cut
        is read from its start. Raises what `read_log` does; what was read stays."""
        if seconds <= 0 and self._history is not None:
            self.behind = True
            return self._history[1]
        deadline = time.monotonic() + seconds
        self.behind = False
        with opened(self.out) as file:
            if not self._goes_on(file):
                self._begin()
            for block in whole_lines(file, self._log, LITTLE if seconds <= 0 else None):
                for at, event in block:
                    self._replay.take(at, event)
                    self._past.take(event)
                if time.monotonic() > deadline:
                    self.behind = True
                    break
            self._remember(file)
        if not self._replay.lives:
            raise no_event(self.out)
        if self._history is None or self._history[0] != self._log.read:
            self._history = self._log.read, self._replay.history(self._log, self.most)
        return self._history[1]

    def _goes_on(self, file: BinaryIO) -> bool:
        file.seek(self._log.read - len(self._tail))
        return _identity(file) == self._file and file.read(len(self._tail)) == self._tail

    def _remember(self, file: BinaryIO) -> None:
        begin = max(0, self._log.read - TAIL)
        file.seek(begin)
        self._file, self._tail = _identity(file), file.read(self._log.read - begin)
        if begin + len(self._tail) < self._log.read:  # it was cut short meanwhile
            self._file = 0, 0

    def trace(self, label: str, past: History, alive: bool) -> Trace:
        """What `read` has found, as it is drawn. `past`: that, or with results from elsewhere."""
        return Trace(
            label=label, history=past, snapshots=self._snapshots(), now=self._past.at, marks=tuple(self._past.marks),
            alive=alive,
        )  # fmt: skip

    def _snapshots(self) -> tuple[tuple[str, int], ...]:
        """By their names, read again when there are others."""
        folder = snapshots_folder(self.out)
        with suppress(OSError):
            changed = os.stat(folder).st_mtime_ns
            if changed != self._saved[0]:
                places = [place for name in os.listdir(folder) if (place := parse_name(name))]
                self._saved = changed, tuple(sorted({(place.stage, place.iter) for place in places}))
        return self._saved[1]


def _identity(file: BinaryIO) -> tuple[int, int]:
    found = os.fstat(file.fileno())
    return found.st_dev, found.st_ino


class _Past:
    """Where a run is, and what has happened to it and where."""

    def __init__(self) -> None:
        self.at: tuple[str, int] | None = None
        self.marks: deque[Incident] = deque(maxlen=MOST)
        self._lives, self._goes_on = 0, False

    def take(self, event: events.Event | Updates) -> None:
        match event:
            case Updates():
                self.at = event.stage, event.iter[-1]
            case events.Iterated():
                self.at = event.stage, event.iter
            case events.RunStarted():
                self._lives += 1
                self._goes_on = self._lives > 1
            case events.StageStarted():
                self._started(event)
            case events.NotFinite(back_to=None):
                self._add("warning", f"{event.what} is not finite in {event.stage} after iteration {event.iter}")
            case events.NotFinite():
                self._add(
                    "rollback",
                    f"{event.what} is not finite in {event.stage} after iteration {event.iter}: goes back to {event.back_to}",
                )
            case events.SnapshotFailed():
                self._add("warning", event.message)
            case events.Note(warning=True):
                self._add("warning", event.text)
            case events.Failed() if event.text:
                self._add("warning", event.text.partition("\n")[0])

    def _started(self, event: events.StageStarted) -> None:
        if event.iter == event.begins:  # what happened before is not of this training
            self.marks = deque((mark for mark in self.marks if mark.stage != event.stage), maxlen=MOST)
        self.at = event.stage, event.iter
        if self._goes_on:
            self._add("restart", f"process life {self._lives} goes on with {event.stage} at {event.iter}")
        self._goes_on = False

    def _add(self, kind: str, text: str) -> None:
        if self.at is not None:
            self.marks.append(Incident(*self.at, kind, text))
