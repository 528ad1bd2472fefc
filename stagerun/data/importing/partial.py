"""The folder of an unfinished import, OUT.partial: one process writes it, and goes on with it only if it is the same work.

    OUT.partial/lock                 held (flock) by the process that works on it
    OUT.partial/import.json          what the work is: source, options, version; without it the rest is nothing
    OUT.partial/positions/           an LMDB: what is known of each position (`Seen`)
    OUT.partial/lmdb/                becomes OUT by one rename, when it is complete and on disk
    OUT.partial/stagerun-import.txt  the report, where too much was left out
    OUT.partial/stagerun-copy.json   in scratch: the room it will take, written before the rest

The rest of OUT.partial is removed after that rename; a crash between the two leaves a folder without `lmdb` beside a complete OUT,
which the next import into OUT removes.
"""

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import lmdb
import numpy as np

from stagerun.base.errors import DataError, FolderInUseError, ResumeRefused
from stagerun.base.text import count, shown
from stagerun.data.rows import ROW, Rows
from stagerun.data.scratch.layout import held_now
from stagerun.data.write import FIRST_MAP_SIZE
from stagerun.system.files import sync_folder, write_whole
from stagerun.system.host import host_name
from stagerun.system.image_sets import SIDE_FILE
from stagerun.system.imports import COPY, REPORT
from stagerun.system.lmdb_file import check_file
from stagerun.system.typed import json_object

if TYPE_CHECKING:
    from stagerun.data.importing.engine import Work

IDENTITY, LOCK, LMDB, SEEN = "import.json", "lock", "lmdb", "positions"
# `lock.mdb` is from a tool that looked into the LMDB.
_OURS = {IDENTITY, LOCK, REPORT, COPY, LMDB, SEEN, f"{SEEN}/data.mdb"}
_OURS |= {f"{LMDB}/{name}" for name in ("data.mdb", "lock.mdb", SIDE_FILE, REPORT)}
_UNFINISHED = re.compile(r"\.partial(-[0-9a-f]{32})?$")  # of `write_whole` and `index.save`, killed

_LARGEST_SEEN = 1 << 36  # bytes of address space, for 100 million images


def open_lmdb(folder: Path, map_size: int = FIRST_MAP_SIZE) -> lmdb.Environment:
    # No one else knows the folder, and one process at a time has OUT.partial's lock: none of LMDB's own is needed.
    return lmdb.open(str(folder), map_size=map_size, lock=False)


def records_in(folder: Path) -> int:
    """Records of one of the LMDBs, looked at before it is mapped. DataError."""
    try:
        return check_file(str(folder))
    except DataError as error:
        raise DataError(error.message, "something changed it; add --restart to begin anew") from None


@dataclass(frozen=True, slots=True)
class Note:
    """Something to report about an image: `what` is counted, `text` is the detail, `bad` means that it was left out."""

    name: str
    what: str
    text: str = ""
    bad: bool = False


class Seen:
    """What is known of each position, those that were left out too: its `ROW` and its notes.

    Committed before the records of the same positions, so it is never behind them. Whatever is killed, the records alone say how
    far the import is; what stands here beyond that is written again.
    """

    def __init__(self, folder: Path) -> None:
        """DataError."""
        records_in(folder)
        self._env = open_lmdb(folder, _LARGEST_SEEN)

    def close(self) -> None:
        self._env.close()

    def write(self, first: int, entries: Sequence[tuple[bytes, Sequence[Note]]]) -> None:
        """Rows and notes from position `first` on. Returns when they are on disk. lmdb.Error."""
        with self._env.begin(write=True) as txn:
            for at, (row, notes) in enumerate(entries, first):
                said = json.dumps([asdict(note) for note in notes]).encode() if notes else b""
                txn.put(b"%08d" % at, row + said)

    def read(self, most: int | None = None) -> tuple[Rows, list[Note]]:
        """(rows, notes) of the first `most` positions, or of all, in their order."""
        rows, notes = bytearray(), list[Note]()
        with self._env.begin() as txn:
            for _, value in islice(txn.cursor(), most):
                rows += value[: ROW.itemsize]
                if len(value) > ROW.itemsize:
                    notes += [Note(**said) for said in json.loads(value[ROW.itemsize :])]
        return np.frombuffer(bytes(rows), ROW), notes


class Partial:
    """OUT.partial, locked from `__enter__` to `__exit__`. OSErrors are the caller's to explain."""

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
        """Makes the folder ready: what is there goes on if it is the same work. ResumeRefused if it is another."""
        path = self.folder / IDENTITY
        if restart or not path.exists() or not self.seen.exists():
            self.clear()
            for folder in (self.lmdb, self.seen):
                folder.mkdir()
                with open_lmdb(folder) as env:
                    env.sync(True)
                sync_folder(folder)
            # The last of it: where this file is, the LMDBs can be opened, and where not, nothing is lost.
            self.write(IDENTITY, json.dumps(identity, sort_keys=True, indent=1).encode())
            return
        try:
            found = json_object(path.read_bytes())
        except ValueError:
            raise ResumeRefused(f"{path}: is damaged", "add --restart to begin anew") from None
        names = sorted(name for name in {*found, *identity} if found.get(name) != identity.get(name))
        if names:
            words = "\n  ".join(f"{name}: {found.get(name)} then, {identity.get(name)} now" for name in names)
            raise ResumeRefused(
                f"{self.folder}: an unfinished import of something else:\n  {words}",
                "give the command as it was to go on with it, or add --restart to begin anew",
            )

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
        """Removes all but the lock, and the room that is promised. DataError, with nothing gone, for what no import has made."""
        # import.json first: without it the rest counts as nothing, should this be interrupted.
        self._require_ours()
        (self.folder / IDENTITY).unlink(missing_ok=True)
        sync_folder(self.folder)
        self._delete(self.folder, (LOCK, COPY))

    def only_records(self) -> None:
        """Leaves data.mdb alone in the LMDB's folder, whatever an interrupted end put beside it. DataError as above."""
        self._require_ours()
        self._delete(self.lmdb, (f"{LMDB}/data.mdb",))

    def remove(self) -> None:
        """Removes all of it, the lock last: as long as it has its name no one else can have it. DataError as above."""
        self._require_ours()
        self._delete(self.folder, (LOCK,))
        (self.folder / LOCK).unlink()
        with suppress(OSError):  # the next import has just made its lock in it
            self.folder.rmdir()

    def _require_ours(self) -> None:
        for file in sorted(self.folder.rglob("*")):
            name = str(file.relative_to(self.folder))
            if _UNFINISHED.sub("", name) not in _OURS:
                hint = "move it away, or give another name than that for the result"
                raise DataError(f"{self.folder}: holds `{name}`, which is not from an import", hint)

    def _delete(self, folder: Path, keep: Collection[str]) -> None:
        for file in sorted(folder.rglob("*"), reverse=True):  # what is in a folder comes before the folder
            if str(file.relative_to(self.folder)) not in keep:
                if file.is_dir() and not file.is_symlink():
                    file.rmdir()
                else:
                    file.unlink()


# -- The report, beside the records: what it says, and what can be read from it later.

_LEFT_OUT = "left out"  # : how many
_COUNT_LINE = re.compile(rf"{_LEFT_OUT}: ([0-9]+)\n".encode())
_LONGEST_LINE = 1 << 16
_MOST_IGNORED = 1000  # in the report
_EXTENSION = re.compile(r"\.\S{1,10}")  # of `Mr. Smith on the beach` it is none
_MOST_EXTENSIONS = 8


def ignored_text(names: Sequence[str]) -> str:
    """`ignored: 5 files (.heic 2, .txt 1, no extension 2)`: extensions in small letters, the most first."""
    suffixes = (PurePosixPath(name).suffix.lower() for name in names)
    found = Counter(suffix if _EXTENSION.fullmatch(suffix) else "no extension" for suffix in suffixes)
    ordered = sorted(found.items(), key=lambda pair: (-pair[1], pair[0]))
    parts = [f"{shown(suffix)} {n}" for suffix, n in ordered[:_MOST_EXTENSIONS]]
    if others := sum(n for _, n in ordered[_MOST_EXTENSIONS:]):
        parts.append(f"others {others}")
    return f"ignored: {count(len(names), 'file')} ({', '.join(parts)})"


def text_of(work: "Work", records: int, notes: list[Note], kinds: Mapping[str, int]) -> bytes:
    """Without times, so that the same images give the same text."""
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
        # Behind the lines above: what `left_out_of` looks for comes first, whatever files are called.
        lines += ["", ignored_text(work.ignored), *(_printable(name) for name in work.ignored[:_MOST_IGNORED])]
        if (more := len(work.ignored) - _MOST_IGNORED) > 0:
            lines.append(f"and {more} more")
    return "".join(line + "\n" for line in lines).encode(errors="surrogateescape")


def line_of(note: Note) -> str:
    return _printable(f"{note.name}: {note.text}" if note.text else note.name)


def identity_digest(identity: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def left_out_of(out: Path, identity: Mapping[str, Any]) -> int | None:
    """How many images were left out, if OUT is what this very work makes; None if it isn't."""
    try:
        with open(out / REPORT, "rb") as stream:
            stream.readline(_LONGEST_LINE)
            if stream.readline(_LONGEST_LINE) != f"identity {identity_digest(identity)}\n".encode():
                return None
            for line in stream:
                if found := _COUNT_LINE.fullmatch(line):
                    return int(found[1])
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        pass
    return None


def _printable(text: str) -> str:
    """Names come from others' archives: a line break in one would look like a line of ours."""
    return "".join(c if c.isprintable() or "\udc80" <= c <= "\udcff" else "?" for c in text)
