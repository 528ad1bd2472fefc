"""The folder of an unfinished import, OUT.partial: one process writes it, and resumes it only for the same work.

    OUT.partial/lock                 held (flock) by the process that works on it
    OUT.partial/import.json          identity of the work: source, options, version; without it the rest is ignored
    OUT.partial/positions/           an LMDB: the result of each position (`Seen`)
    OUT.partial/lmdb/                becomes OUT by one rename, when it is complete and on disk
    OUT.partial/stagerun-import.txt  the report, if too much was left out

The rest of OUT.partial is removed after that rename; a crash between the two leaves a folder without `lmdb` next to a complete OUT, which
the next import into OUT removes.
"""

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import lmdb
import numpy as np

from stagerun.base.errors import DataError, FolderInUseError, ResumeRefused
from stagerun.base.text import count, first, shown
from stagerun.data.index import ROW, Rows
from stagerun.data.write import FIRST_MAP_SIZE, held_now
from stagerun.system.files import sync_folder, write_whole
from stagerun.system.host import host_name
from stagerun.system.image_sets import COPY, REPORT, SIDE_FILE
from stagerun.system.lmdb_file import check_file
from stagerun.system.typed import json_object

if TYPE_CHECKING:
    from stagerun.data.importing.engine import Work

IDENTITY, LOCK, LMDB, SEEN = "import.json", "lock", "lmdb", "positions"
# `lock.mdb` is from a tool that opened the LMDB, COPY from earlier versions.
_OURS = {IDENTITY, LOCK, REPORT, COPY, LMDB, SEEN, f"{SEEN}/data.mdb"}
_OURS |= {f"{LMDB}/{name}" for name in ("data.mdb", "lock.mdb", SIDE_FILE, REPORT)}
_UNFINISHED = re.compile(r"\.partial(-[0-9a-f]{32})?$")  # of `write_whole` and `index.save`, killed

_LARGEST_SEEN = 1 << 36  # bytes of address space, for 100 million images


def open_lmdb(folder: Path, map_size: int = FIRST_MAP_SIZE) -> lmdb.Environment:
    # One process at a time holds OUT.partial's lock, so LMDB's is not needed.
    return lmdb.open(str(folder), map_size=map_size, lock=False)


def records_in(folder: Path) -> int:
    """Return the number of records of an LMDB, checked before it is mapped. DataError."""
    try:
        return check_file(str(folder))
    except DataError as error:
        raise DataError(error.message, "something changed it; add --restart to begin again") from None


@dataclass(frozen=True, slots=True)
class Note:
    """A report on an image: `what` is counted, `text` is the detail, `bad` means that it was left out."""

    name: str
    what: str
    text: str = ""
    bad: bool = False


class Seen:
    """The `ROW` and notes of each position, also if the image was left out.

    Committed before the records of the same positions, so it is never behind them. The records alone decide where the import resumes;
    later positions here are overwritten.
    """

    def __init__(self, folder: Path) -> None:
        """Open the LMDB. DataError."""
        records_in(folder)
        self._env = open_lmdb(folder, _LARGEST_SEEN)

    def close(self) -> None:
        self._env.close()

    def write(self, first: int, entries: Sequence[tuple[bytes, Sequence[Note]]]) -> None:
        """Write rows and notes from position `first` on, and sync. lmdb.Error."""
        with self._env.begin(write=True) as txn:
            for at, (row, notes) in enumerate(entries, first):
                texts = json.dumps([asdict(note) for note in notes]).encode() if notes else b""
                txn.put(b"%08d" % at, row + texts)

    def read(self) -> tuple[Rows, list[Note]]:
        """Return (rows, notes) of all positions, in order."""
        rows, notes = bytearray(), list[Note]()
        with self._env.begin() as txn:
            for _, value in txn.cursor():
                rows += value[: ROW.itemsize]
                if len(value) > ROW.itemsize:
                    notes += [Note(**fields) for fields in json.loads(value[ROW.itemsize :])]
        return np.frombuffer(bytes(rows), ROW), notes


class Partial:
    """OUT.partial, locked from `__enter__` to `__exit__`. OSError."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.folder = out.with_name(f"{out.name}.partial")
        self.lmdb, self.seen = self.folder / LMDB, self.folder / SEEN
        self._lock = ExitStack()

    def __enter__(self) -> "Partial":
        """FolderInUseError."""
        lock = self.folder / LOCK
        while True:
            self.folder.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError), ExitStack() as stack:  # another process finished, and removed the folder
                if not stack.enter_context(held_now(lock)):
                    holder = lock.read_text(errors="replace")[:200]
                    raise FolderInUseError(
                        f"{self.folder}: another import works on it: {holder or 'it has just started'}",
                        "wait for it, stop it, or give another folder",
                    )
                lock.write_text(f"process {os.getpid()} on {host_name()}")
                self._lock = stack.pop_all()
                return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    def begin(self, identity: Mapping[str, Any], restart: bool) -> None:
        """Prepare the folder, or resume an import of the same identity. ResumeRefused for another one."""
        path = self.folder / IDENTITY
        if restart or not path.exists() or not self.seen.exists():
            self.clear()
            for folder in (self.lmdb, self.seen):
                folder.mkdir()
                with open_lmdb(folder) as env:
                    env.sync(True)
                sync_folder(folder)
            # Last: if this file exists, the LMDBs can be opened; if not, nothing is lost.
            self.write(IDENTITY, json.dumps(identity, sort_keys=True, indent=1).encode())
            return
        try:
            earlier = json_object(path.read_bytes())
        except ValueError:
            raise ResumeRefused(f"{path}: is damaged", "add --restart to begin again") from None
        names = sorted(name for name in {*earlier, *identity} if earlier.get(name) != identity.get(name))
        if names:
            words = "\n  ".join(f"{name}: {earlier.get(name)} then, {identity.get(name)} now" for name in names)
            raise ResumeRefused(
                f"{self.folder}: an unfinished import of something else:\n  {words}",
                "repeat the earlier command to resume it, or add --restart to begin again",
            )

    def write(self, name: str, data: bytes) -> None:
        """Write a file, whole or not at all, and sync."""
        write_whole(self.folder / name, data, aside=self.folder / f"{name}.partial")

    def finish(self) -> None:
        """Rename the LMDB's folder to OUT. FileExistsError if OUT exists and isn't empty."""
        sync_folder(self.lmdb)
        self.lmdb.rename(self.out)
        sync_folder(self.out.parent)
        self.remove()

    def clear(self) -> None:
        """Remove all but the lock. DataError, with nothing removed, for foreign files."""
        # import.json first: without it the rest is ignored, should this be interrupted.
        self._require_ours()
        (self.folder / IDENTITY).unlink(missing_ok=True)
        sync_folder(self.folder)
        self._delete(self.folder, (LOCK,))

    def only_records(self) -> None:
        """Remove the files of an interrupted end from the LMDB's folder, except data.mdb. DataError as above."""
        self._require_ours()
        self._delete(self.lmdb, (f"{LMDB}/data.mdb",))

    def remove(self) -> None:
        """Remove everything, the lock last: no process can lock it while it has its name. DataError as above."""
        self.clear()
        (self.folder / LOCK).unlink()
        with suppress(OSError):  # the next import has just made its lock in it
            self.folder.rmdir()

    def _require_ours(self) -> None:
        for file in sorted(self.folder.rglob("*")):
            name = str(file.relative_to(self.folder))
            if _UNFINISHED.sub("", name) not in _OURS:
                hint = "move it, or give another name for the result"
                raise DataError(f"{self.folder}: holds `{name}`, which is not from an import", hint)

    def _delete(self, folder: Path, keep: Collection[str]) -> None:
        for file in sorted(folder.rglob("*"), reverse=True):  # the files of a folder before the folder
            if str(file.relative_to(self.folder)) not in keep:
                if file.is_dir() and not file.is_symlink():
                    file.rmdir()
                else:
                    file.unlink()


# -- The report, next to the records.

_LEFT_OUT = "left out"  # : how many
_COUNT_LINE = re.compile(rf"{_LEFT_OUT}: ([0-9]+)\n".encode())
_LONGEST_LINE = 1 << 16
_MOST_IGNORED = 1000  # in the report
_MOST_EXTENSIONS = 8


def ignored_text(names: Sequence[str]) -> str:
    """Return `ignored: 5 files (.heic 2, no extension 2, .txt 1)`: extensions in small letters, the most frequent first."""
    suffixes = Counter(sorted(PurePosixPath(name).suffix.lower() or "no extension" for name in names))
    parts = ", ".join(f"{shown(suffix)} {n}" for suffix, n in suffixes.most_common(_MOST_EXTENSIONS))
    return f"ignored: {count(len(names), 'file')} ({parts})"


def text_of(work: "Work", records: int, notes: list[Note], kinds: Mapping[str, int]) -> bytes:
    """Return the report, without times, so that the same images give the same text."""
    identity = work.identity
    lines = [_printable(work.title), f"identity {identity_digest(identity)}"]
    lines += [f"{name}: {value}" for name, value in identity.items()]
    lines += ["", f"records: {records}", *(f"  {kind}: {n}" for kind, n in kinds.items())]
    for title, wanted in ((_LEFT_OUT, True), ("taken by rule", False)):
        chosen = [note for note in notes if note.bad is wanted]
        lines += ["", f"{title}: {len(chosen)}"]
        lines += [f"  {what}: {n}" for what, n in Counter(note.what for note in chosen).most_common()]
        lines += [f"{note.what}\t{line_of(note)}" for note in chosen]
    if work.ignored:
        # Last: `left_out_of` must meet its lines before any file names.
        lines += ["", ignored_text(work.ignored), *map(_printable, first(work.ignored, _MOST_IGNORED))]
    return "".join(line + "\n" for line in lines).encode(errors="surrogateescape")


def line_of(note: Note) -> str:
    return _printable(f"{note.name}: {note.text}" if note.text else note.name)


def identity_digest(identity: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def left_out_of(out: Path, identity: Mapping[str, Any]) -> int | None:
    """Return the number of images left out, if OUT is the result of this work; else None."""
    try:
        with open(out / REPORT, "rb") as stream:
            stream.readline(_LONGEST_LINE)
            if stream.readline(_LONGEST_LINE) != f"identity {identity_digest(identity)}\n".encode():
                return None
            for line in stream:
                if match := _COUNT_LINE.fullmatch(line):
                    return int(match[1])
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        pass
    return None


def _printable(text: str) -> str:
    """Replace unprintable characters: a line break in a name would look like a line of the report."""
    return "".join(c if c.isprintable() or "\udc80" <= c <= "\udcff" else "?" for c in text)
