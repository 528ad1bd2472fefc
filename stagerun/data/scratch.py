"""A copy of an LMDB on a node's own fast disk, made once, by whichever process of the node comes first.

    SCRATCH/stagerun-UID/               mode 0700: another user's data must not pass for ours
        FINGERPRINT/data.mdb            complete copies
        FINGERPRINT.partial-UUID/       a copy being made, or one that was interrupted
        FINGERPRINT.lock                held (flock) by the process that makes the copy

The kernel drops a lock with the process that held it, so a killed copy blocks nobody. Complete copies are not removed:
another run may be reading them.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from stagerun.data.lmdb_source import check_file, data_file
from stagerun.data.write import sync_folder
from stagerun.errors import DataError, PermissionDenied, StorageError

_CHUNK = 1 << 24
_ENDS = 1 << 20


def stage_in(source_path: str, scratch: str, progress: Callable[[int, int], None] = lambda done, total: None) -> str:
    """Folder of a complete copy of the LMDB in folder `source_path`, below folder `scratch`.

    Any number of processes and runs may call it at once: one copies, the others wait for it. `progress` is called
    with (bytes done, bytes in all) by the one that copies. DataError if the LMDB is not whole, StorageError if there
    is no room or the scratch disk fails.
    """
    check_file(source_path)
    source = data_file(source_path)
    try:
        home = _home(scratch)
        fingerprint = _fingerprint(source)
        copy = home / fingerprint
        with _locked(home / f"{fingerprint}.lock"):
            _sweep(home, fingerprint)
            if not _is_complete(copy, source):
                _copy(source, copy, progress)
        _sweep_others(home, fingerprint)
    except PermissionError as error:
        raise PermissionDenied(
            f"{error.filename or scratch}: no permission", "give a `scratch` folder under `data` that you may write to"
        ) from None
    except OSError as error:
        raise StorageError(
            f"{error.filename or scratch}: {error.strerror}", "check the disk, or change `scratch` under `data`"
        ) from None
    return str(copy)


def _home(scratch: str) -> Path:
    if not Path(scratch).is_dir():
        raise StorageError(f"{scratch}: no such folder", "make it on every node, or change `scratch` under `data`")
    home = Path(scratch) / f"stagerun-{os.getuid()}"
    home.mkdir(mode=0o700, exist_ok=True)
    found = home.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionDenied(f"{home}: belongs to another user, or is no folder", "remove it, or change `scratch`")
    return home


def _fingerprint(source: Path) -> str:
    """Which file, and which state of it: its real path, size, time of change, and the bytes at both ends."""
    found = source.stat()
    digest = hashlib.sha256(
        f"{source.resolve()}\0{found.st_size}\0{found.st_mtime_ns}\0".encode(errors="surrogateescape")
    )
    with source.open("rb") as stream:
        digest.update(stream.read(_ENDS))
        stream.seek(max(0, found.st_size - _ENDS))
        digest.update(stream.read(_ENDS))
    return digest.hexdigest()


@contextlib.contextmanager
def _locked(path: Path, wait: bool = True) -> Iterator[bool]:
    """Holds the lock; gives False, without it, where another process has it and `wait` is off."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(fd)


def _sweep(home: Path, fingerprint: str) -> None:
    """Removes interrupted copies. Under the lock, so that none of them is being made."""
    for partial in home.glob(f"{fingerprint}.partial-*"):
        shutil.rmtree(partial)


def _sweep_others(home: Path, own: str) -> None:
    for fingerprint in {partial.name.partition(".")[0] for partial in home.glob("*.partial-*")} - {own}:
        with _locked(home / f"{fingerprint}.lock", wait=False) as held:
            if held:
                _sweep(home, fingerprint)


def _is_complete(copy: Path, source: Path) -> bool:
    """A copy gets its name only when it is complete; its size is compared in case the disk was repaired since."""
    if not copy.exists():
        return False
    file = copy / "data.mdb"
    if file.is_file() and file.stat().st_size == source.stat().st_size:
        return True
    shutil.rmtree(copy)
    return False


def _copy(source: Path, copy: Path, progress: Callable[[int, int], None]) -> None:
    total = source.stat().st_size
    free = shutil.disk_usage(copy.parent).free
    if free < total:
        raise StorageError(
            f"{copy.parent}: no room for {source}: {_gigabytes(total)} needed, {_gigabytes(free)} free",
            "free some space there, change `scratch` under `data`, or leave it out to read the data where it is",
        )
    partial = copy.with_name(f"{copy.name}.partial-{uuid.uuid4().hex}")
    partial.mkdir()
    try:
        with source.open("rb") as reader, (partial / "data.mdb").open("wb") as writer:
            done = 0
            while chunk := reader.read(_CHUNK):
                writer.write(chunk)
                done += len(chunk)
                progress(done, total)
            writer.flush()
            os.fsync(writer.fileno())
        if done != total or source.stat().st_size != total:
            raise DataError(f"{source}: changed while it was copied", "wait until it is complete, then run again")
        sync_folder(partial)
        partial.rename(copy)
        sync_folder(copy.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
