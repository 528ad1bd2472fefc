"""What is known about each position of an unfinished import: fixed rows, and a line of text for each that is odd.

    rows2        per position, in order, those that were left out too: its `ROW`, and the state of the file it was made from
    notes.jsonl  {"at": position, "name": ..., "what": ..., "text": ..., "bad": true or false}, in order

Both are appended to and on disk *before* the LMDB's commit of the same records. So whatever is killed, or loses power:
 - before the journal is on disk: the LMDB lacks those records as well; what the journal has of them is cut off again.
 - between the two: the journal is ahead of the LMDB, and is cut back to it.
 - after the commit: both have them.
The LMDB alone therefore says how far it went. The journal is never behind it; if it is, somebody changed the files.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stagerun.data.rows import ROW, Rows

ROWS, NOTES = "rows2", "notes.jsonl"
OLD_ROWS = "rows"  # of an unfinished import by an older stagerun, whose rows were shorter; nothing goes on from them
_ENTRY = np.dtype([("row", ROW), ("state", "<u8")])


@dataclass(frozen=True, slots=True)
class Note:
    """Something to tell about an image: `what` is counted, `text` is the detail, `bad` means that it was left out."""

    name: str
    what: str
    text: str = ""
    bad: bool = False


def entry(row: bytes, state: int) -> bytes:
    """What stands in the journal for one position."""
    return row + state.to_bytes(8, "little")


class Journal:
    """Open for appending; OSError if that fails."""

    def __init__(self, folder: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._rows = os.open(folder / ROWS, flags, 0o666)
        self._notes = os.open(folder / NOTES, flags, 0o666)

    def close(self) -> None:
        os.close(self._rows)
        os.close(self._notes)

    def rows(self) -> Rows:
        """All whole rows; one that a crash left in part is not among them."""
        return self._entries()["row"]

    def states(self) -> NDArray[np.uint64]:
        """One for each of `rows`."""
        return self._entries()["state"]

    def _entries(self) -> NDArray[np.void]:
        data = _all(self._rows)
        return np.frombuffer(data[: len(data) // _ENTRY.itemsize * _ENTRY.itemsize], _ENTRY)

    def notes(self) -> list[tuple[int, Note]]:
        """(position, note) of all whole lines."""
        return [(at, note) for at, note, _ in self._lines()]

    def cut(self, positions: int) -> None:
        """Takes away what is behind the first `positions`."""
        os.ftruncate(self._rows, positions * _ENTRY.itemsize)
        end = 0
        for at, _, line_end in self._lines():
            if at >= positions:
                break
            end = line_end
        os.ftruncate(self._notes, end)

    def append(self, entries: bytes, notes: list[tuple[int, Note]]) -> None:
        """Returns when they are on disk. `entries`: what `entry` gave, one behind the other."""
        lines = [
            json.dumps({"at": at, "name": n.name, "what": n.what, "text": n.text, "bad": n.bad}) for at, n in notes
        ]
        for fd, data in ((self._rows, entries), (self._notes, "".join(line + "\n" for line in lines).encode())):
            if data:
                os.lseek(fd, 0, os.SEEK_END)
                _write(fd, data)
                os.fsync(fd)

    def _lines(self) -> list[tuple[int, Note, int]]:
        """(position, note, byte behind its line), up to the first line that isn't whole."""
        found: list[tuple[int, Note, int]] = []
        end = 0
        for line in _all(self._notes).splitlines(keepends=True):
            try:
                said = json.loads(line)
                note = Note(said["name"], said["what"], said["text"], said["bad"])
            except (ValueError, KeyError, TypeError):
                break
            if not line.endswith(b"\n"):
                break
            end += len(line)
            found.append((said["at"], note, end))
        return found


def _all(fd: int) -> bytes:
    size, data = os.fstat(fd).st_size, bytearray()
    while len(data) < size and (more := os.pread(fd, size - len(data), len(data))):
        data += more
    return bytes(data)


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:  # a full disk first writes less than it was given, then fails
        view = view[os.write(fd, view) :]
