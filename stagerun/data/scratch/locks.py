"""Locks that die with their holder: flock(2), which the kernel gives up when the process ends, however it ends."""

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

# Between two looks at a lock that another process has: no one waits inside the kernel, where a request to stop isn't heard.
_PAUSE_S = 0.1


class CopyStopped(Exception):
    """Told to stop before the copies were there. What was copied stays, and the next job goes on from it."""


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
    """Whether no one reads the copy; and no one begins to, until the end. Call it while holding the copy's lock. OSError."""
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
