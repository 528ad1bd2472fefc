"""The folders that a run writes to, as this host sees them. Nothing is left behind in them."""

import os
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from stagerun.data.scratch.layout import PARTIAL, home_of, look, survey
from stagerun.data.scratch.locks import held_now
from stagerun.data.scratch.room import free_bytes, idle_now, missing
from stagerun.errors import PermissionDenied, StorageError
from stagerun.recipe import Data
from stagerun.system.files import LOCAL, mounted
from stagerun.text import size


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A folder. `kind` of its file system (ext4, nfs4 ...), `source` what is mounted there, `free` in bytes for this user. Of one that
    is not there yet they are those of the nearest folder above it."""

    path: str
    there: bool
    kind: str
    source: str
    free: int

    @property
    def shared(self) -> bool:
        """Whether, by its kind, other hosts may see it, too."""
        return self.kind not in LOCAL


@dataclass(frozen=True, slots=True, kw_only=True)
class ScratchRoom:
    """Bytes of the scratch disk: that copies of the schedule's LMDBs still need, free, kept free (`scratch_reserve`), and taken by
    copies that no one uses, which make room."""

    path: str
    needed: int
    free: int
    reserve: int
    removable: int

    @property
    def short(self) -> int:
        """Bytes that are missing; 0 or less: there is room. What is there already needs none."""
        return self.needed + self.reserve - self.free - self.removable if self.needed else 0


def place(path: Path) -> Place:
    """StorageError if it can't be looked at."""
    there = path.is_dir()
    near = path.absolute()
    while not near.exists() and near != near.parent:
        near = near.parent
    try:
        free = free_bytes(near)
    except OSError as error:
        raise StorageError(
            f"{path}: can't be looked at: {error.strerror}", "check the disk or the file server"
        ) from None
    kind, source = mounted(near)
    return Place(path=str(path), there=there, kind=kind or "unknown", source=source, free=free)


def require_writable(path: Path) -> None:
    """StorageError, PermissionDenied if rank 0 couldn't make the output folder, or write to the one that is there."""
    near = path.absolute()
    while not near.exists() and near != near.parent:
        near = near.parent
    if not near.is_dir():
        raise StorageError(f"{near}: is a file, and no folder", "give another --out")
    if not os.access(near, os.W_OK | os.X_OK):
        raise PermissionDenied(f"{path}: may not be written", "give an --out that you may write to")
    if near == path.absolute():
        _probe(near, "give another --out, or make room there")


def require_temporary() -> str:
    """The folder for temporary files. StorageError if there is none that can be written to."""
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError:
        raise StorageError("no folder for temporary files can be written to", "set TMPDIR to one that can") from None
    _probe(Path(folder), "make room there, or set TMPDIR to another folder")
    return folder


def _probe(folder: Path, hint: str) -> None:
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x" * 4096)  # a block, so that a full disk shows
            file.flush()
            os.fsync(file.fileno())
    except PermissionError:
        raise PermissionDenied(f"{folder}: may not be written", hint) from None
    except OSError as error:
        raise StorageError(f"{folder}: can't be written: {error.strerror}", hint) from None


def scratch_room(data: Data) -> ScratchRoom:
    """Of `data.scratch`, without taking any. StorageError if there is no such folder, PermissionDenied; DataError if an LMDB isn't
    there whose copy isn't whole either."""
    assert data.scratch is not None
    sources = [data.train, *([data.val] if data.val else [])]
    home = home_of(data.scratch, make=False)
    originals = [look(source.path) for source in sources]
    names = {original.name for original in originals}
    removable = 0
    try:
        if home.is_dir():
            # As who takes room does it: what is locked here for a moment is not taken for one in use by a job that starts. While another
            # does, nothing is counted; where no one ever has, no lock is made, since there is nothing to count.
            lock = home / "lock"
            with held_now(lock) if lock.exists() else nullcontext(False) as ours:
                for one in survey(home) if ours else ():
                    if one.folder.name.removesuffix(PARTIAL) not in names:
                        with idle_now(one) as why:
                            removable += 0 if why else one.bytes
        return ScratchRoom(
            path=data.scratch,
            needed=sum(missing(home, original) for original in originals),
            free=free_bytes(home if home.is_dir() else Path(data.scratch)),
            reserve=round(data.scratch_reserve * 1e9),
            removable=removable,
        )
    except OSError as error:
        raise StorageError(f"{data.scratch}: {error.strerror}", "check the disk, or give another `scratch`") from None


def require_room(room: ScratchRoom) -> None:
    """StorageError if the copies don't fit."""
    if room.short > 0:
        raise StorageError(
            f"{room.path}: {size(room.needed)} needed for copies of the images, {size(room.free)} free, of which "
            f"{size(room.reserve)} stay free (scratch_reserve)",
            "free some space there, give another `scratch`, or leave it out to read the data where it is",
        )
