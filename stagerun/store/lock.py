"""Locks that allow one run per output folder, and the process lives of a run.

The lock is flock(2) on OUT/lock: the kernel releases it when the process ends, however it ends, so no lock is ever stale. On NFS it
reaches the other hosts too. Where a file system has no locks (Lustre mounted without `flock`), nothing is held, and the caller's `Lease`
alone decides. The package `filelock` has no shared lock to look with, and falls back to a file that outlives its process.

A life is a small file, OUT/lives/aNNNN.json, NNNN being its attempt. Rank 0 creates it as a new file, so that of two that want the same
number one fails; it rewrites it while it lives, with a `beat` that is one higher each time, and at last with the exit code. A file without
a code is from a process that lives, or was killed, or whose disk would not take the last word.
"""

import errno
import fcntl
import hashlib
import itertools
import json
import os
import re
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

from stagerun.base.errors import FolderInUseError, PermissionDenied
from stagerun.store.disk import Disk, names_in, twice
from stagerun.store.errors import DAMAGE, reporting
from stagerun.store.layout import attempt_of_life, life_file, lock_file
from stagerun.system.files import open_lock
from stagerun.system.host import host_name
from stagerun.system.process import Identity
from stagerun.system.typed import json_object, read_as

_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})

# `holder` has the lock for an instant, to see whether it can be had. A run that starts just then tries again.
_TRIES, _PAUSE = 6, 0.02

WAIT = "wait for it, stop it, or choose another folder with --out"

_NAME = re.compile(r"process (\d+) on (\S+), since (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d [+-]\d{4})")


@dataclass(frozen=True, slots=True)
class Holder:
    """The holder of a lock: `text` as it wrote it, empty if it has just started; the others are None if `text` can't be parsed.

    `since`: seconds since the epoch, by the holder's clock. `beat`: if only its lease shows it."""

    text: str
    pid: int | None = None
    host: str | None = None
    since: float | None = None
    beat: int | None = None

    def __str__(self) -> str:
        return self.text or "a process without a name yet"


def holder(out: Path) -> Holder | None:
    """Return the holder of the output folder; None if it is free, or the lock can't be read: then ask `last_word`. Changes nothing.
    StorageError."""
    path = lock_file(out)
    with reporting("see who holds the output folder", path):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except (FileNotFoundError, PermissionError):
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return holder_named(_written(fd))
        except OSError as error:
            if error.errno not in _NO_LOCKS:  # else no process can hold it; only the lease shows a run
                raise
        finally:
            os.close(fd)
    return None


def holder_named(text: str, beat: int | None = None) -> Holder:
    if (match := _NAME.fullmatch(text)) is not None:
        with suppress(ValueError):  # the 31st of February
            since = datetime.strptime(match[3], "%Y-%m-%d %H:%M:%S %z").timestamp()
            return Holder(text, int(match[1]), match[2], since, beat)
    return Holder(text, beat=beat)


def _written(fd: int) -> str:
    """Return the text of the lock file, on one line and printable."""
    text = os.pread(fd, 300, 0).decode(errors="replace").strip()
    return "".join(c for c in text if c.isprintable())


class Lock:
    """The right to write into an existing output folder. For rank 0. A context manager, or `acquire` and `release`. On a file system
    without locks `held` stays False."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self._fd: int | None = None
        self._writer = 0  # the process whose name is in the file

    @property
    def held(self) -> bool:
        return self._fd is not None

    def acquire(self) -> None:
        """Take the lock without waiting. FolderInUseError names its holder; StorageError, PermissionDenied."""
        path = lock_file(self.out)
        with reporting("lock the output folder", path):
            try:
                self._fd = fd = open_lock(path)
            except PermissionError:
                raise PermissionDenied(
                    f"can't lock the output folder in {path}: it belongs to another user",
                    "choose another folder with --out, or ask its owner for permission; `stagerun status` shows its run",
                ) from None
            _open.add(self)
            try:
                if not self._take(fd):
                    return self.release()
                # The lock file is never deleted: a process that opened it before would hold a lock on a file without a name.
                os.ftruncate(fd, 0)
                myself = f"process {os.getpid()} on {host_name()}, since {now_text()}\n"
                os.pwrite(fd, myself.encode(), 0)
                self._writer = os.getpid()
            except BaseException:
                self.release()
                raise

    def _take(self, fd: int) -> bool:
        """Take the lock; return False if the file system has no locks. FolderInUseError, OSError."""
        for _ in range(_TRIES):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                time.sleep(_PAUSE)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                return False
        raise FolderInUseError(f"another run holds {self.out}: {_written(fd) or 'no name yet'}", WAIT)

    def release(self) -> None:
        """Release the lock, if it is held."""
        fd, self._fd = self._fd, None
        _open.discard(self)
        if fd is not None:
            if self._writer == os.getpid():  # no forked child
                with suppress(OSError):
                    os.ftruncate(fd, 0)  # else the next holder would be mistaken for this one
            self._writer = 0
            os.close(fd)

    def __enter__(self) -> "Lock":
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


_open: set[Lock] = set()


def _let_go_in_child() -> None:
    """Close a forked child's descriptor. A lock belongs to the open file, which the child (a loader's worker) shares, so it would outlive
    its holder. Closing it leaves the parent's lock alone."""
    for lock in list(_open):
        lock.release()


os.register_at_fork(after_in_child=_let_go_in_child)


MAX_BYTES = 1 << 16

_UNKNOWN = Identity("", "", "", 0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """A process life. `run` is a random name, `begun` a time for people. `newest`: what it resumed from. `code`: its exit code, None while it
    lives. `taken_by`: the attempt that replaced it when it was silent.

    A file that can't be parsed, or doesn't fit its name, has only an `attempt`: it is not `readable`, and `run` is its digest, so that a
    change shows."""

    attempt: int
    run: str
    process: Identity = _UNKNOWN
    begun: str = ""
    newest: str = ""
    beat: int = 0
    code: int | None = None
    taken_by: int | None = None

    @property
    def readable(self) -> bool:
        return self.process != _UNKNOWN

    def __str__(self) -> str:
        if not self.readable:
            return f"a process that left no readable name in {life_file(Path(), self.attempt).name}"
        return f"process {self.process.pid} on {self.process.host}, since {self.begun}"


def now_text() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %z")


def encode(life: Life) -> bytes:
    return (json.dumps(asdict(life), indent=1) + "\n").encode()


def parse(data: bytes, attempt: int) -> Life:
    """Return the life in a file; not `readable` if the bytes are torn or foreign, or of another attempt."""
    unreadable = Life(attempt=attempt, run=hashlib.sha256(data).hexdigest())
    try:
        life = read_as(Life, json_object(data))
    except ValueError:
        return unreadable
    process = life.process
    texts = (process.host, process.boot, process.namespace, life.run, life.newest, life.begun)
    good = life.readable and life.attempt == attempt and all(text.isprintable() for text in texts)
    return life if good else unreadable


def attempts_of_lives(disk: Disk, out: Path) -> list[int]:
    """Return the attempts that have a life, ascending. StorageError, PermissionDenied."""
    folder = life_file(out, 0).parent
    with reporting("list the process lives", folder):
        attempts = map(attempt_of_life, names_in(disk, folder))
    return sorted(attempt for attempt in attempts if attempt is not None)


def look_at(disk: Disk, out: Path, attempt: int) -> Life | None:
    """Return the life of an attempt, None if it has no file. StorageError, PermissionDenied if the file can't be read."""
    path = life_file(out, attempt)
    with reporting(f"read {path.name}", path.parent):
        try:
            # ESTALE: another file took its name while it was opened, on NFS.
            return parse(twice(partial(disk.read, path, MAX_BYTES), errno.ESTALE), attempt)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno not in DAMAGE:
                raise
            return parse(b"", attempt)


def last_lives(disk: Disk, out: Path, count: int) -> list[Life]:
    """Return the lives of the `count` highest attempts, ascending. StorageError, PermissionDenied."""
    looks = (look_at(disk, out, attempt) for attempt in reversed(attempts_of_lives(disk, out)))
    # A missing file was just deleted by its holder.
    return [*itertools.islice((life for life in looks if life is not None), count)][::-1]


def newest_life(disk: Disk, out: Path) -> Life | None:
    """Return the life of the highest attempt, or None. StorageError, PermissionDenied."""
    return next(iter(last_lives(disk, out, 1)), None)
