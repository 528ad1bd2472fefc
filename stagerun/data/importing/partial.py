"""The folder of an unfinished import, OUT.partial: one process writes it, and knows whether it is its own work.

    OUT.partial/lock                 held (flock) by the process that works on it
    OUT.partial/import.json          what the work is: source, options, version; without it the rest is nothing
    OUT.partial/rows2, notes.jsonl   the journal
    OUT.partial/stagerun-import.txt  the report, where too much was left out
    OUT.partial/stagerun-copy.json   in scratch: the room it will take, written before the rest
    OUT.partial/lmdb/                becomes OUT by one rename, when it is complete and on disk

What is left of OUT.partial after that rename is swept away; a crash between the two leaves a folder without `lmdb` beside a complete
OUT, which the next import into OUT removes.
"""

import errno
import fcntl
import json
import os
import re
import stat
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stagerun.base.errors import DataError, FolderInUseError, ResumeRefused, StorageError
from stagerun.data.rows import ROW, Rows
from stagerun.system.files import open_lock, sync_folder, write_whole
from stagerun.system.host import host_name
from stagerun.system.imports import COPY, REPORT
from stagerun.system.lmdb_file import SIDE_FILE
from stagerun.system.process import gone
from stagerun.system.typed import count, json_object, read_as

ROWS, NOTES = "rows2", "notes.jsonl"
OLD_ROWS = "rows"  # of an unfinished import by an older stagerun, whose rows were shorter; nothing goes on from them
_ENTRY = np.dtype([("row", ROW), ("state", "<u8")])


@dataclass(frozen=True, slots=True)
class Note:
    """Something to report about an image: `what` is counted, `text` is the detail, `bad` means that it was left out."""

    name: str
    what: str
    text: str = ""
    bad: bool = False


def entry(row: bytes, state: int) -> bytes:
    """What stands in the journal for one position."""
    return row + state.to_bytes(8, "little")


class Journal:
    """What is known about each position: fixed rows, and a line of text for each that is odd. OSError if it can't be opened.

    rows2        per position, in order, those that were left out too: its `ROW`, and the state of the file it was made from
    notes.jsonl  {"at": position, "name": ..., "what": ..., "text": ..., "bad": true or false}, in order

    Both are appended to and on disk *before* the LMDB's commit of the same records. So whatever is killed, or loses power:
     - before the journal is on disk: the LMDB lacks those records as well; what the journal has of them is cut off again.
     - between the two: the journal is ahead of the LMDB, and is cut back to it.
     - after the commit: both have them.
    The LMDB alone therefore says how far it went. The journal is never behind it; if it is, someone changed the files.
    """

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
                record = json_object(line)
                at, note = count(record.get("at")), read_as(Note, record)
            except ValueError:
                break
            if not line.endswith(b"\n"):
                break
            end += len(line)
            found.append((at, note, end))
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


# `REPORT`: of a complete import it is in OUT, and its second line holds the identity
IDENTITY, LOCK, LMDB = "import.json", "lock", "lmdb"

_OURS = {IDENTITY, LOCK, ROWS, OLD_ROWS, NOTES, REPORT, COPY}
_OURS_IN_LMDB = {"data.mdb", "lock.mdb", SIDE_FILE, REPORT}  # a tool that looked into it made the lock
# What `write` below, and `index.save`, are killed over.
_UNFINISHED = re.compile(r"(?P<name>.+)\.partial(-[0-9a-f]{32})?")

_HOLDER = re.compile(r"process (\d+) on (\S+)")
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)


class Partial:
    """OUT.partial, locked from `__enter__` to `__exit__`. OSErrors are the caller's to explain."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.folder = out.with_name(f"{out.name}.partial")
        self.lmdb = self.folder / LMDB
        self._lock = -1

    def __enter__(self) -> "Partial":
        while self._lock < 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = self._try()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            os.ftruncate(self._lock, 0)  # or the next holder would be taken for this one
        os.close(self._lock)

    def _try(self) -> int:
        """The lock's descriptor; -1 where another process finished and swept the folder away in between."""
        path = self.folder / LOCK
        try:
            fd = open_lock(path)
        except FileNotFoundError:
            return -1
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever had it before may have deleted the file: then this is a lock on nothing.
            if not os.path.exists(path) or not os.path.samestat(os.fstat(fd), os.stat(path)):
                raise FileNotFoundError
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"process {os.getpid()} on {host_name()}".encode(), 0)
            return fd
        except FileNotFoundError:
            os.close(fd)
            return -1
        except BlockingIOError:
            holder = os.pread(fd, 200, 0).decode(errors="replace")
            os.close(fd)
            named = _HOLDER.fullmatch(holder)
            if named is not None and gone(int(named[1]), named[2]):
                holder = ""  # of one that was killed before
            raise FolderInUseError(
                f"{self.folder}: another import works on it: {holder or 'it has just started'}",
                "wait for it, stop it, or give another folder",
            ) from None
        except OSError as error:
            os.close(fd)
            if error.errno in _NO_LOCKS:
                raise StorageError(
                    f"{self.folder}: its file system has no locks: {error.strerror}",
                    "give a folder on another file system, and copy the result",
                ) from None
            raise

    def begin(self, identity: Mapping[str, Any], restart: bool, make_lmdb: Callable[[Path], None]) -> None:
        """Makes the folder ready: what is there goes on if it is the same work. ResumeRefused if it is another.

        `make_lmdb` makes an empty LMDB in a folder, on disk when it returns.
        """
        if restart:
            self.clear()
        path = self.folder / IDENTITY
        try:
            found = json_object(path.read_bytes())
        except FileNotFoundError:
            self.clear()
            self.lmdb.mkdir()
            make_lmdb(self.lmdb)
            sync_folder(self.lmdb)
            # The last of it: where this file is, the LMDB is one that can be opened, and where not, nothing is lost.
            self.write(IDENTITY, json.dumps(identity, sort_keys=True, indent=1).encode())
        except ValueError:
            raise ResumeRefused(f"{path}: is damaged", "add --restart to begin anew") from None
        else:
            _require_same(self.folder, found, identity)

    def write(self, name: str, data: bytes) -> None:
        """A file, whole or not at all, and on disk."""
        write_whole(self.folder / name, data, aside=self.folder / f"{name}.partial")

    def finish(self) -> None:
        """The LMDB's folder becomes OUT. FileExistsError if there is one by now that isn't empty."""
        sync_folder(self.lmdb)
        self.lmdb.rename(self.out)
        sync_folder(self.out.parent)
        self.remove()

    def clear(self) -> None:
        """Takes everything away but the lock, and the room that is promised. DataError, with nothing gone, if there is what no import has made."""
        if strange := self._strange():
            raise DataError(
                f"{self.folder}: holds `{strange}`, which is not from an import",
                "move it away, or give another name than that for the result",
            )
        self._delete((LOCK, COPY))

    def only_records(self) -> None:
        """Leaves data.mdb alone in the LMDB's folder, whatever an end that was interrupted put beside it. DataError as above."""
        for name in os.listdir(self.lmdb):
            if not _is_ours(self.lmdb, name, _OURS_IN_LMDB):
                raise DataError(f"{self.lmdb}: holds `{name}`, which is not from an import", "move it away")
        for name in os.listdir(self.lmdb):
            if name != "data.mdb":
                (self.lmdb / name).unlink()

    def remove(self) -> None:
        """All of it, the lock last: as long as it has its name no one else can have it. What isn't ours stays."""
        self._delete((LOCK,))
        (self.folder / LOCK).unlink()
        try:
            self.folder.rmdir()
        except OSError as error:
            # Or the next import has just made its lock in it.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                raise

    def _delete(self, keep: Collection[str]) -> None:
        # import.json first: without it the rest counts as nothing, should this be interrupted.
        (self.folder / IDENTITY).unlink(missing_ok=True)
        sync_folder(self.folder)
        if self.lmdb.exists():
            for name in os.listdir(self.lmdb):
                if _is_ours(self.lmdb, name, _OURS_IN_LMDB):
                    (self.lmdb / name).unlink()
            self.lmdb.rmdir()
        for name in os.listdir(self.folder):
            if name not in keep and _is_ours(self.folder, name, _OURS):
                (self.folder / name).unlink()

    def _strange(self) -> str:
        """The name of something that no import has made, '' if there is nothing of the kind."""
        for name in sorted(os.listdir(self.folder)):
            if name == LMDB and self.lmdb.is_dir() and not self.lmdb.is_symlink():
                for inner in sorted(os.listdir(self.lmdb)):
                    if not _is_ours(self.lmdb, inner, _OURS_IN_LMDB):
                        return f"{LMDB}/{inner}"
            elif not _is_ours(self.folder, name, _OURS):
                return name
        return ""


def _is_ours(folder: Path, name: str, names: set[str]) -> bool:
    """Whether it is a file, no folder and no link, of one of these names, whole or unfinished."""
    unfinished = _UNFINISHED.fullmatch(name)
    return (unfinished["name"] if unfinished else name) in names and stat.S_ISREG((folder / name).lstat().st_mode)


def _require_same(folder: Path, found: Any, wanted: Mapping[str, Any]) -> None:
    if found == wanted:
        return
    said = found if isinstance(found, dict) else {}
    words = [f"{name}: {said.get(name)} then, {value} now" for name, value in wanted.items() if said.get(name) != value]
    words += [f"{name}: {value} then, not given now" for name, value in said.items() if name not in wanted]
    raise ResumeRefused(
        f"{folder}: an unfinished import of something else:\n  " + "\n  ".join(words),
        "give the command as it was to go on with it, or add --restart to begin anew",
    )
