"""Names and files of the scratch folder, what a manifest says, and locks that die with their holder.

The locks are those of flock(2), which the kernel gives up when the process ends, however it ends.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from stagerun.base.errors import DataError, PermissionDenied, StorageError
from stagerun.system.files import private_folder, write_whole
from stagerun.system.imports import COPY, REPORT, scratch_home
from stagerun.system.lmdb_file import BY_SCHEDULE, SIDE_FILE, check_file, data_file, ends_of, reading
from stagerun.system.typed import Signed, json_object, read_as

# Between two looks at a lock that another process has: no one waits inside the kernel, where a request to stop isn't heard.
_PAUSE_S = 0.1


class CopyStopped(Exception):
    """A request to stop came before the copies were there. What was copied stays, and the next job goes on from it."""


@contextlib.contextmanager
def held(path: Path, stop: Callable[[], bool], waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Waits for the lock and holds it. `waiting` is called from time to time meanwhile. CopyStopped, OSError."""
    while (fd := _try(path)) is None:
        if stop():
            raise CopyStopped
        waiting()
        time.sleep(_PAUSE_S)
    try:
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def held_now(path: Path) -> Iterator[bool]:
    """Holds the lock if it can be had at once: gives whether it could. OSError."""
    fd = _try(path)
    try:
        yield fd is not None
    finally:
        if fd is not None:
            os.close(fd)


def _try(path: Path) -> int | None:
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        kept = False
        try:
            if not _flock(fd, fcntl.LOCK_EX):
                return None
            # Whoever removes a copy removes its lock too, while holding it: the name may be another file's, or no one's.
            with contextlib.suppress(FileNotFoundError):
                kept = os.path.samestat(os.fstat(fd), path.lstat())
            if kept:
                return fd
        finally:
            if not kept:
                os.close(fd)


@contextlib.contextmanager
def unused_now(folder: Path) -> Iterator[bool]:
    """Whether no one reads the copy; and no one starts to, until the end. Call it while holding the copy's lock. OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield _flock(fd, fcntl.LOCK_EX)
    finally:
        os.close(fd)


class Use:
    """That this process reads a copy: a shared lock on its folder, which also keeps systemd-tmpfiles away from it
    (python/cpython#81831)."""

    def __init__(self, folder: Path) -> None:
        """Call it while holding the copy's lock: then no one is removing it. OSError."""
        self._fd: int | None = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH)
            os.utime(self._fd)
        except BaseException:
            os.close(self._fd)
            raise

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            with contextlib.suppress(OSError):  # a disk that is gone
                os.utime(fd)
            os.close(fd)


def _flock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


BLOCK = 1 << 26
DATA, MANIFEST, JOURNAL, SUSPECT = "data.mdb", COPY, "blocks", "suspect"
# All that is ever deleted, in this order: the manifest last, so that a half removed copy is still known as one.
OWN_FILES = (DATA, SIDE_FILE, REPORT, f"{SIDE_FILE}.new", JOURNAL, SUSPECT, f"{MANIFEST}.new", MANIFEST)
PARTIAL = ".partial"
IMPORTED = "lmdb/data.mdb"  # of an import that is not complete

_NAME = re.compile(r"[0-9a-f]{64}")
_VERSION = 1
_MOST_MANIFEST_BYTES = 1 << 26
_FULL = {errno.ENOSPC, errno.EDQUOT}
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF}


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
    check_file(path, BY_SCHEDULE)  # one that a command names is looked for before
    file = data_file(path)
    with reading(file), file.open("rb") as stream:
        found = os.fstat(stream.fileno())
        real = str(file.resolve())
        digest = hashlib.sha256(f"{real}\0{found.st_size}\0{found.st_mtime_ns}\0".encode(errors="surrogateescape"))
        digest.update(ends_of(stream.fileno(), found.st_size))
    return Original(path, str(Path(real).parent), found.st_size, found.st_mtime_ns, digest.hexdigest())


@contextlib.contextmanager
def writing(scratch: str) -> Iterator[None]:
    """Errors of the scratch disk: StorageError, PermissionDenied."""
    hint = "check the disk, or give another `scratch`"
    try:
        yield
    except PermissionError as error:
        raise PermissionDenied(
            f"{error.filename or scratch}: no permission", "give a `scratch` folder that you may write to"
        ) from None
    except OSError as error:
        place = error.filename or scratch
        if error.errno in _NO_LOCKS:
            raise StorageError(
                f"{place}: the file system has no locks, or can't be used as scratch: {error.strerror}",
                "give a `scratch` folder on a disk of the node itself",
            ) from None
        if error.errno in _FULL:
            hint = "free some space there, give another `scratch`, or leave it out to read the data where it is"
        raise StorageError(f"{place}: {error.strerror}", hint) from None


def home_of(scratch: str, make: bool = True) -> Path:
    """The folder of this user's copies. StorageError if there is no folder `scratch`, PermissionDenied if it isn't ours."""
    try:
        there = Path(scratch).is_dir()
    except OSError:
        there = False
    if not there:
        raise StorageError(f"{scratch}: no such folder", "make it on every node, or give another `scratch`")
    return private_folder(scratch_home(scratch), "copies", "give another `scratch`", make)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What is known about a copy. A partial one has no `blocks` yet."""

    source: str  # real path of the LMDB's folder
    size: int  # of data.mdb
    mtime_ns: Signed
    blocks: tuple[str, ...] = ()  # sha256 in hex of each BLOCK bytes of data.mdb, the last one shorter
    side: tuple[int, Signed] | None = None  # size and mtime_ns of the source's side file
    made: str = ""  # date and time
    seconds: float = 0.0
    stagerun: str = ""


def blocks_in(size: int) -> int:
    return -(-size // BLOCK)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Whole or not at all. OSError."""
    text = json.dumps({"version": _VERSION, **asdict(manifest)}, indent=1)
    write_whole(folder / MANIFEST, text.encode(), aside=folder / f"{MANIFEST}.new")


def read_manifest(folder: Path) -> Manifest | None:
    """None if there is none, or it isn't what `write_manifest` writes. OSError if the disk fails."""
    found = _json(folder)
    if found.get("version") != _VERSION or not {field.name for field in fields(Manifest)} <= found.keys():
        return None
    try:
        manifest = read_as(Manifest, found)
    except ValueError:
        return None
    return manifest if len(manifest.blocks) in (0, blocks_in(manifest.size)) else None


def is_of_another_version(folder: Path) -> bool:
    """Whether its manifest is one that this version can't judge: what it says of the copy, and which files are its own."""
    version = _json(folder).get("version")
    return isinstance(version, int) and version != _VERSION


def _json(folder: Path) -> Mapping[str, object]:
    """What the manifest holds; nothing if it is missing or damaged. OSError."""
    try:
        fd = os.open(folder / MANIFEST, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    with open(fd, "rb") as stream:
        data = stream.read(_MOST_MANIFEST_BYTES)
    try:
        return json_object(data)
    except ValueError:
        return {}


@dataclass(frozen=True, slots=True)
class Found:
    """A folder of stagerun's in the scratch folder."""

    folder: Path
    manifest: Manifest
    partial: bool
    bytes: int  # taken on the disk
    used: float  # last use, seconds since the epoch

    @property
    def lock(self) -> Path:
        return self.folder.with_name(f"{self.folder.name.removesuffix(PARTIAL)}.lock")


def survey(home: Path) -> list[Found]:
    """The copies, complete and partial, longest unused first. OSError."""
    found = []
    for folder in home.iterdir() if home.is_dir() else ():
        if not _NAME.fullmatch(folder.name.removesuffix(PARTIAL)):
            continue
        try:
            status = folder.lstat()
            manifest = read_manifest(folder) if stat.S_ISDIR(status.st_mode) else None
            if manifest is not None:
                partial = folder.name.endswith(PARTIAL)
                found.append(Found(folder, manifest, partial, taken(folder), status.st_mtime))
        except FileNotFoundError:  # another process has just removed it
            continue
    return sorted(found, key=lambda one: one.used)


def suspect(folder: Path) -> None:
    """The copy is checked, and mended, before anyone uses it again. As far as the disk lets us say so."""
    with contextlib.suppress(OSError):
        os.close(os.open(folder / SUSPECT, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))


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
    """Deletes stagerun's files in it, and the folder unless it holds something else. OSError."""
    for name in OWN_FILES:
        with contextlib.suppress(FileNotFoundError):
            (folder / name).unlink()
    try:
        folder.rmdir()
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


class SourceChanged(DataError):
    def __init__(self, original: Original) -> None:
        super().__init__(
            f"{original.path}: the LMDB was changed while it was copied",
            "wait until it is complete, then run the same command again",
        )
