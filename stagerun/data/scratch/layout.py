"""Names and files of the scratch folder, what a manifest says, locks that die with their holder, and room on the disk.

The locks are those of flock(2), which the kernel gives up when the process ends, however it ends.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from stagerun.base.errors import StorageError
from stagerun.base.text import size
from stagerun.system.files import open_lock, private_folder, write_whole
from stagerun.system.image_sets import SIDE_FILE
from stagerun.system.imports import COPY, scratch_home
from stagerun.system.lmdb_file import BY_SCHEDULE, LmdbFile, reading
from stagerun.system.typed import json_object, read_as

BLOCK = 1 << 26
DATA, MANIFEST, JOURNAL, SUSPECT = "data.mdb", COPY, "blocks", "suspect"
PARTIAL = ".partial"
IMPORTED = "lmdb/data.mdb"  # of an import that is not complete

_NAME = re.compile(r"[0-9a-f]{64}")
_PAUSE_S = 0.1  # between two tries of a lock: a wait inside the kernel would not hear a request to stop


class CopyStopped(Exception):
    """A request to stop came before the copies were there. What was copied stays, and the next job goes on from it."""


@contextlib.contextmanager
def held(path: Path, stop: Callable[[], bool], waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Waits for the lock and holds it. `waiting` is called from time to time meanwhile. CopyStopped, OSError."""
    while True:
        with held_now(path) as ours:
            if ours:
                yield
                return
        if stop():
            raise CopyStopped
        waiting()
        time.sleep(_PAUSE_S)


@contextlib.contextmanager
def held_now(path: Path) -> Iterator[bool]:
    """Holds the lock if it can be had at once: gives whether it could. OSError."""
    while True:
        fd = open_lock(path)
        try:
            ours, named = _flock(fd), False
            # Whoever removes what is locked removes the lock's file too, while holding it: the name may be another file's, or no one's.
            with contextlib.suppress(FileNotFoundError):
                named = os.path.samestat(os.fstat(fd), path.lstat())
            if named or not ours:
                yield ours
                return
        finally:
            os.close(fd)


def _flock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def unused_now(folder: Path) -> Iterator[bool]:
    """Whether no one reads the copy; and no one starts to, until the end. Call it while holding the copy's lock. OSError."""
    fd = _open_folder(folder)
    try:
        yield _flock(fd)
    finally:
        os.close(fd)


class Use:
    """That this process reads a copy: a shared lock on its folder, which also keeps systemd-tmpfiles away from it
    (python/cpython#81831)."""

    def __init__(self, folder: Path) -> None:
        """Call it while holding the copy's lock: then no one is removing it. OSError."""
        self._fd = _open_folder(folder)
        fcntl.flock(self._fd, fcntl.LOCK_SH)
        os.utime(self._fd)

    def close(self) -> None:
        """May be called twice."""
        fd, self._fd = self._fd, -1
        for end in (os.utime, os.close):
            with contextlib.suppress(OSError):  # a disk that is gone
                end(fd)


def _open_folder(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


@dataclass(frozen=True, slots=True)
class Original:
    """One state of an LMDB that is copied. `path` as it was given; `size` and `mtime_ns` are those of data.mdb."""

    path: str
    real: str
    size: int
    mtime_ns: int
    name: str  # of its copies


def look(path: str) -> Original:
    """The LMDB in folder `path` as it is now. DataError if it is not whole, PermissionDenied.

    Its state is known by its real path, size, time of change, and the bytes at both ends of data.mdb.
    """
    lmdb = LmdbFile(path, BY_SCHEDULE)  # one that a command names is looked for before
    with reading(lmdb.file):
        real = str(lmdb.file.resolve())
        digest = hashlib.sha256(f"{real}\0{lmdb.size}\0{lmdb.changed}\0".encode(errors="surrogateescape"))
        digest.update(lmdb.ends())
    return Original(path, str(Path(real).parent), lmdb.size, lmdb.changed, digest.hexdigest())


# Behind the hints for errors of its disk.
OR_ELSE = "; or give another `scratch`, on a disk of the node itself"


def home_of(scratch: str, make: bool = True) -> Path:
    """The folder of this user's copies. StorageError if there is no folder `scratch`, PermissionDenied if it isn't ours."""
    if not os.path.isdir(scratch):
        raise StorageError(f"{scratch}: no such folder", "make it on every node, or give another `scratch`")
    return private_folder(scratch_home(scratch), "copies", "give another `scratch`", make)


# -- What is on the disk.


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What is known about a copy. A partial one has no `blocks` yet."""

    source: str  # real path of the LMDB's folder
    size: int  # of data.mdb
    blocks: tuple[str, ...] = ()  # sha256 in hex of each BLOCK bytes of data.mdb, the last one shorter


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Whole or not at all. OSError."""
    text = json.dumps(asdict(manifest), indent=1)
    write_whole(folder / MANIFEST, text.encode(), aside=folder / f"{MANIFEST}.new")


def read_manifest(folder: Path) -> Manifest | None:
    """None if there is none, or it isn't what `write_manifest` writes. OSError if the disk fails."""
    try:
        manifest = read_as(Manifest, json_object((folder / MANIFEST).read_bytes()))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return manifest if len(manifest.blocks) in (0, -(-manifest.size // BLOCK)) else None


@dataclass(frozen=True, slots=True)
class Found:
    """A folder of stagerun's in the scratch folder."""

    folder: Path
    manifest: Manifest
    partial: bool
    bytes: int  # taken on the disk
    used: float  # last use, seconds since the epoch

    @property
    def name(self) -> str:
        return self.folder.name.removesuffix(PARTIAL)

    @property
    def lock(self) -> Path:
        return self.folder.with_name(f"{self.name}.lock")


def survey(home: Path) -> list[Found]:
    """The copies, complete and partial, longest unused first. OSError."""
    found = []
    for folder in home.iterdir() if home.is_dir() else ():
        partial = folder.name.endswith(PARTIAL)
        if not _NAME.fullmatch(folder.name.removesuffix(PARTIAL)):
            continue
        with contextlib.suppress(FileNotFoundError):  # another process has just removed it
            status = folder.lstat()
            if stat.S_ISDIR(status.st_mode) and (manifest := read_manifest(folder)) is not None:
                found.append(Found(folder, manifest, partial, taken(folder), status.st_mtime))
    return sorted(found, key=lambda one: one.used)


def file_size(folder: Path) -> int | None:
    """The size of data.mdb; None if there is none. OSError."""
    try:
        return (folder / DATA).lstat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return None


def taken(folder: Path) -> int:
    """Bytes that the files of a copy take on the disk; what is not written yet takes none."""
    total = 0
    for name in (DATA, SIDE_FILE, IMPORTED):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            total += (folder / name).lstat().st_blocks * 512
    return total


def remove(folder: Path) -> None:
    """Deletes a copy, the manifest last, so that a half removed one is still known as one. OSError."""
    for file in sorted(folder.rglob("*"), key=lambda file: (file.name == MANIFEST, -len(file.parts))):
        if file.is_dir() and not file.is_symlink():
            file.rmdir()
        else:
            file.unlink()
    folder.rmdir()


# -- Room: counted for all copies at once, before the first byte; made by removing what no one uses.


def free_bytes(home: Path) -> int:
    """Bytes that this user may still write to the disk. OSError."""
    found = os.statvfs(home)
    return found.f_bavail * found.f_frsize


def missing(home: Path, original: Original) -> int:
    """Bytes that are still to be written."""
    if file_size(home / original.name) == original.size:
        return 0
    # A copy being made has its full size from the start, and takes what is written.
    return max(0, original.size - taken(home / original.name) - taken(home / f"{original.name}{PARTIAL}"))


@contextlib.contextmanager
def idle_now(one: Found) -> Iterator[bool]:
    """Whether no one makes or uses the copy; it is locked against everyone until the end. OSError."""
    with contextlib.ExitStack() as stack:
        idle = stack.enter_context(held_now(one.lock))
        if idle:
            try:
                idle = stack.enter_context(unused_now(one.folder))
            except FileNotFoundError:
                idle = False
        yield idle


def take_room(
    home: Path, originals: Sequence[Original], reserve: int, stop: Callable[[], bool], removed: Callable[[Found], None]
) -> None:
    """Takes the room that copies of `originals` still need and leaves `reserve` bytes free; registers the copies.

    The caller holds the locks of these copies. Under one lock for all jobs, and with what others are about to write counted as
    written: two jobs at once don't both take the last room. Removes copies that no one uses, interrupted ones first, then the
    longest unused, if and only if that makes enough room, and calls `removed` for each; else StorageError. CopyStopped, OSError.
    """
    with held(home / "lock", stop), contextlib.ExitStack() as locks:
        names = {original.name for original in originals}
        others = [one for one in survey(home) if one.name not in names]
        needed = sum(missing(home, original) for original in originals)
        idle = [one for one in others if locks.enter_context(idle_now(one))]
        busy = [one for one in others if one not in idle]
        pending = sum(max(0, one.manifest.size - one.bytes) for one in busy if one.partial)

        def short() -> int:
            return needed + pending + reserve - free_bytes(home)

        if needed and short() > sum(one.bytes for one in idle):
            parts = [f"{size(needed)} needed, {size(free_bytes(home))} free"]
            parts.append(f"{size(reserve)} stay free (scratch_reserve)")
            parts += [f"{size(pending)} are promised to copies being made"] if pending else []
            parts += [f"{size(sum(one.bytes for one in busy))} are copies in use"] if busy else []
            raise StorageError(
                f"{home}: no room for the images: {'; '.join(parts)}",
                "free some space there, give another `scratch`, or leave it out to read the data where it is",
            )
        for one in sorted(idle, key=lambda one: not one.partial):
            if not needed or short() <= 0:
                break
            remove(one.folder)
            one.lock.unlink(missing_ok=True)
            removed(one)
        for original in originals:  # others count the folder from now on
            folder = home / f"{original.name}{PARTIAL}"
            folder.mkdir(mode=0o700, exist_ok=True)
            if read_manifest(folder) is None:
                write_manifest(folder, Manifest(source=original.real, size=original.size))
