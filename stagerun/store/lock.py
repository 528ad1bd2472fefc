"""One run per output folder: a lock that dies with its process.

It is flock(2) on OUT/lock: the kernel gives it up when the process ends, however it ends, so there are no stale locks to
judge by age or process number. On NFS it reaches the other hosts too. Where a file system has no locks (Lustre mounted
without `flock`), `acquire` refuses: a run that goes on without would delete the other's unfinished snapshots, and a lock
by the mere existence of a file outlives a killed run, which is the common end of a job on a cluster.
"""

import errno
import fcntl
import os
import time
from pathlib import Path
from types import TracebackType

from stagerun.errors import FolderInUseError, StorageError
from stagerun.store.faults import reporting
from stagerun.store.layout import lock_file

_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})


class Lock:
    """The right to write into an output folder, which exists. For rank 0. A context manager, or `acquire` and `release`."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self._fd: int | None = None

    def acquire(self) -> None:
        """Doesn't wait. FolderInUseError names the holder; StorageError, PermissionDenied."""
        path = lock_file(self.out)
        with reporting("lock the output folder", path):
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        _open.add(self)
        try:
            self._take(self._fd)
            with reporting("write", path):
                # The file is never deleted: whoever opened it before would hold a lock on a file without a name.
                os.ftruncate(self._fd, 0)
                os.pwrite(self._fd, _myself().encode(), 0)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Does nothing if it isn't held."""
        fd, self._fd = self._fd, None
        _open.discard(self)
        if fd is not None:
            os.close(fd)

    def __enter__(self) -> "Lock":
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _take(self, fd: int) -> None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # A holder that has just started may not have written its name yet; then the line is its predecessor's.
            holder = os.pread(fd, 300, 0).decode(errors="replace").strip()
            who = "".join(c for c in holder if c.isprintable()) or "no name yet"
            raise FolderInUseError(
                f"another run holds {self.out}: {who}", "wait for it, stop it, or choose another folder with --out"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                with reporting("lock the output folder", lock_file(self.out)):
                    raise
            raise StorageError(
                f"the file system of {self.out} has no locks: {os.strerror(error.errno or 0)}",
                "choose a folder on another file system with --out, or have this one mounted with locks "
                "(Lustre: `flock`; NFS: a running lock service)",
            ) from error


def _myself() -> str:
    return f"process {os.getpid()} on {os.uname().nodename}, since {time.strftime('%Y-%m-%d %H:%M:%S %z')}\n"


_open: set[Lock] = set()


def _let_go_in_child() -> None:
    """A lock belongs to the open file, which a forked child (a loader's worker) shares: it would outlive its holder.

    Closing the child's descriptor leaves the parent's lock alone.
    """
    for lock in list(_open):
        lock.release()


os.register_at_fork(after_in_child=_let_go_in_child)
