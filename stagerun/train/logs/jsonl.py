"""Every event as one line of JSON, appended to OUT/log.jsonl."""

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from stagerun.base.errors import PermissionDenied, StorageError
from stagerun.base.events import Event, Indexed, Iterated, Retraced

INDEX_EVERY = 2048  # lines of iterations


class JsonLines:
    """Rank 0 only. Each line is written whole with one call: a killed run leaves at most its last line cut short, and the next run
    starts on a line of its own.

    A log that can't be written is not a reason to lose training: `warn` hears of the first failure, and later events are
    still tried, each on a line of its own. PermissionDenied, StorageError if the file can't be opened.
    """

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self._path, self._warn, self._warned = path, warn, False
        try:
            self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 - closed by __exit__
            size = self._file.seek(0, os.SEEK_END)
            self._file.seek(max(0, size - 1))
            self._torn = size > 0 and self._file.read(1) != b"\n"
            self._indexed = self._file.seek(0, os.SEEK_END) + self._torn
            self._others, self._iterations = dict[int, bool](), 0
        except PermissionError as error:
            raise PermissionDenied(f"{path}: may not be written", "give another output folder with --out") from error
        except OSError as error:
            raise StorageError(f"{path}: can't be written: {error.strerror}", "check the disk") from error

    def __call__(self, event: Event) -> None:
        try:
            line = b"\n" * self._torn + self._index(event) + _line(event)
            written = self._file.write(line)
        except OSError as error:
            self._failed(error.strerror or str(error))
            return
        # A disk with room for a part of the line takes that part, and says so.
        self._torn = written != len(line)
        if self._torn:
            self._failed("the disk took a part of a line only")

    def _index(self, event: Event) -> bytes:
        """What comes before the line of `event`: after many iterations, an Indexed. Where a line could not be written, the next one may name
        wrong places, which its readers see."""
        if not isinstance(event, Iterated | Retraced):
            self._others[self._file.seek(0, os.SEEK_END) + self._torn] = True
            return b""
        self._iterations += 1
        if self._iterations % INDEX_EVERY:
            return b""
        line = _line(Indexed(since=self._indexed, lines=tuple(self._others)))
        if self._others:  # else the next one covers these lines, too: a reader that goes backwards meets few of them
            self._indexed, self._others = self._file.seek(0, os.SEEK_END) + self._torn + len(line), {}
        return line

    def _failed(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            self._warn(f"warning: {self._path} can't be written: {why}; training goes on without its lines")

    def __enter__(self) -> "JsonLines":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _line(event: Event) -> bytes:
    record = {"time": round(time.time(), 3), "event": type(event).__name__, **asdict(event)}
    return json.dumps(record).encode() + b"\n"
