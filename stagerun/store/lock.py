"""One run per output folder: a lock that dies with its process.

It is flock(2) on OUT/lock: the kernel gives it up when the process ends, however it ends, so there are no stale locks to
judge by age or process number. On NFS it reaches the other hosts too. Where a file system has no locks (Lustre mounted
without `flock`), nothing is held, and the caller's `Lease` alone decides.

The package `filelock` would stand for the one call that takes the lock: it has no shared lock to look with, and where a file system has no
locks it takes a file for one, which outlives its process.
"""

import contextlib
import errno
import fcntl
import os
import re
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from stagerun.base.errors import FolderInUseError, PermissionDenied
from stagerun.store.errors import reporting
from stagerun.store.layout import lock_file
from stagerun.store.lives import now_text
from stagerun.system.files import open_lock
from stagerun.system.host import host_name

_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})

# `holder` has the lock for an instant, to see whether it can be had. A run that starts just then tries again.
_TRIES, _PAUSE = 6, 0.02

WAIT = "wait for it, stop it, or choose another folder with --out"

_NAME = re.compile(r"process (\d+) on (\S+), since (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d [+-]\d{4})")


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a lock: `text` as it wrote it; the others are None where that is not to be read.

    A holder that has just started may not have written its name yet; then `text` is empty. `since` is in seconds since the epoch, to
    the second, of the holder's clock. `beat`: of one that is known by its lease alone.
    """

    text: str
    pid: int | None = None
    host: str | None = None
    since: float | None = None
    beat: int | None = None

    def __str__(self) -> str:
        return self.text or "a process without a name yet"


def holder(out: Path) -> Holder | None:
    """Who holds the output folder now; None if no process does, or its lock is not for this user: then its lives say (`last_word`). Changes
    nothing. StorageError."""
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
            if error.errno not in _NO_LOCKS:  # else no one can have it; the lease alone shows a run
                raise
        finally:
            os.close(fd)
    return None


def holder_named(text: str, beat: int | None = None) -> Holder:
    if (match := _NAME.fullmatch(text)) is not None:
        with contextlib.suppress(ValueError):  # the 31st of February
            since = datetime.strptime(match[3], "%Y-%m-%d %H:%M:%S %z").timestamp()
            return Holder(text, int(match[1]), match[2], since, beat)
    return Holder(text, beat=beat)


def _written(fd: int) -> str:
    """What stands in the lock file, on one line and printable."""
    text = os.pread(fd, 300, 0).decode(errors="replace").strip()
    return "".join(c for c in text if c.isprintable())


class Lock:
    """The right to write into an output folder, which exists. For rank 0. A context manager, or `acquire` and `release`. On a file system
    without locks `held` stays False."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self._fd: int | None = None
        self._writer = 0  # the process whose name is in the file

    @property
    def held(self) -> bool:
        return self._fd is not None

    def acquire(self) -> None:
        """Doesn't wait for a holder to end. FolderInUseError names it; StorageError, PermissionDenied."""
        path = lock_file(self.out)
        with reporting("lock the output folder", path):
            try:
                self._fd = open_lock(path)
            except PermissionError:
                raise PermissionDenied(
                    f"can't lock the output folder in {path}: it belongs to another user",
                    "choose another folder with --out, or ask its owner for permission; `stagerun status` says whether a run goes on",
                ) from None
        _open.add(self)
        try:
            with reporting("lock the output folder", path):
                if not self._take(self._fd):
                    return self.release()
                # The file of an output folder is never deleted: whoever opened it before would hold a lock on a file without a name.
                os.ftruncate(self._fd, 0)
                myself = f"process {os.getpid()} on {host_name()}, since {now_text()}\n"
                os.pwrite(self._fd, myself.encode(), 0)
                self._writer = os.getpid()
        except BaseException:
            self.release()
            raise

    def _take(self, fd: int) -> bool:
        """False where there are no locks. FolderInUseError, OSError."""
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

    def named(self) -> bool:
        """Whether the file that is held is still the one in the folder: one that was deleted keeps no one out."""
        assert self._fd is not None
        try:
            return os.path.samestat(os.fstat(self._fd), os.lstat(lock_file(self.out)))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Does nothing if it isn't held."""
        fd, self._fd = self._fd, None
        _open.discard(self)
        if fd is not None:
            if self._writer == os.getpid():  # no forked child
                with contextlib.suppress(OSError):
                    os.ftruncate(fd, 0)  # or the next holder would be taken for this one
            self._writer = 0
            os.close(fd)

    def __enter__(self) -> "Lock":
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


_open: set[Lock] = set()


def _let_go_in_child() -> None:
    """A lock belongs to the open file, which a forked child (a loader's worker) shares: it would outlive its holder. Closing the child's
    descriptor leaves the parent's lock alone."""
    for lock in list(_open):
        lock.release()


os.register_at_fork(after_in_child=_let_go_in_child)
