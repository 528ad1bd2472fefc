"""Errors of the operating system, turned into errors that say what to do."""

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stagerun.base.errors import ExitCode, PermissionDenied, StagerunError, StorageError
from stagerun.base.text import size
from stagerun.system.files import why

_AWAY = (errno.ENOENT, errno.ESTALE, errno.ENODEV, errno.ENOTCONN, errno.ETIMEDOUT, errno.EHOSTDOWN)
_NO_PERMISSION = (errno.EACCES, errno.EPERM)

HINTS = {
    errno.ENOSPC: "free some space, or lower keep_snapshots; the snapshots before it are unharmed",
    errno.EDQUOT: "your quota is used up: delete something, or lower keep_snapshots; the snapshots before it are unharmed",
    errno.EROFS: "the file system is read-only (a disk with errors becomes so); choose another folder with --out",
    errno.EIO: "the disk or its server reports a fault; see the system's log (dmesg)",
    **dict.fromkeys(_NO_PERMISSION, "choose another folder with --out, or ask its owner for permission"),
    **dict.fromkeys(
        _AWAY, "see that its file system is mounted and its server answers, then run the same command again"
    ),
    errno.ENOTDIR: "a part of that path is a file: choose another folder with --out",
    errno.ELOOP: "a part of that path is a symbolic link that leads nowhere: choose another folder with --out",
    errno.ENAMETOOLONG: "give the stage or the output folder a shorter name",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENFILE: "the machine has too many open files",
    errno.EFBIG: "the file system, or the limit on file sizes (ulimit -f), doesn't allow files of that size",
}

# Reading one file gives one of these when that file is not what was written. EIO is among them, since a bad sector must
# not stop a run that has an older snapshot; when it is the whole disk that is gone, the next call on it says so.
DAMAGE = frozenset(
    {
        errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.EINVAL, errno.EFBIG,
        errno.ENAMETOOLONG, errno.EIO, errno.EBADMSG, errno.EUCLEAN,
    }
)  # fmt: skip


class Damaged(StagerunError):
    """Raised if the files of a snapshot differ from what was written: `reason` says which and how. Use an older snapshot."""

    exit_code = ExitCode.RESUME_REFUSED

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(
            f"snapshot {name} is damaged: {reason}",
            "use another snapshot, or delete this one to train from the one before",
        )
        self.name = name
        self.reason = reason

    @property
    def disk_fails(self) -> bool:
        """Return whether it couldn't be read at all: the file may be intact, and the disk or its server unreachable for a while."""
        return isinstance(self.__cause__, OSError) and self.__cause__.errno == errno.EIO


class TooLarge(Damaged):
    """A file of the snapshot is larger than the caller allows."""


def only_one(error: Damaged) -> StorageError:
    """The error for a disk that fails at the only snapshot from which a stage could resume."""
    return StorageError(
        f"can't read snapshot {error.name}, and no other of its stage can be read: {error.reason}",
        "see that the disk is well (dmesg) and run the same command again; move the snapshot away to train without it",
    )


def not_as_written(error: Damaged) -> StorageError:
    """The error for a snapshot that was written a moment ago without one."""
    how = "can't be read" if error.disk_fails else "reads back wrong"
    hint = HINTS[errno.EIO] if error.disk_fails else "don't trust that disk; choose another folder with --out"
    return StorageError(f"snapshot {error.name} was written without an error, but {how}: {error.reason}", hint)


def storage_failure(
    error: OSError, doing: str, path: Path, needed: int | None = None, free: int | None = None
) -> StorageError | PermissionDenied:
    """Return the error for `can't {doing}`. `needed` and `free` are bytes, for when the space, or a quota on it, ran out."""
    text = why(error, path)
    message = f"can't {doing} in {path}: {text}"
    spent = error.errno in (errno.ENOSPC, errno.EDQUOT) and text == os.strerror(error.errno)  # of bytes, not of inodes
    if spent and needed is not None:
        message += f" ({size(needed)} needed" + (f", {size(free)} free)" if free is not None else ")")
    hint = HINTS.get(error.errno or 0, "")
    if error.errno == errno.EFBIG and (most := resource.getrlimit(resource.RLIMIT_FSIZE)[0]) != resource.RLIM_INFINITY:
        hint = f"files may have {size(most)} at most here: raise that limit (ulimit -f) and run the same command again"
    kind = PermissionDenied if error.errno in _NO_PERMISSION else StorageError
    return kind(message, hint)


@contextmanager
def reporting(doing: str, path: Path) -> Iterator[None]:
    """An OSError inside becomes a StorageError or PermissionDenied: can't `doing` in `path`."""
    try:
        yield
    except OSError as error:
        raise storage_failure(error, doing, path) from error


@contextmanager
def reading(name: str, what: str, path: Path) -> Iterator[None]:
    """An OSError inside becomes Damaged, for `what` in snapshot `name`; if it says nothing about that file, what `reporting` makes of it."""
    try:
        yield
    except OSError as error:
        if error.errno in DAMAGE:
            raise Damaged(name, f"{what}: {error.strerror}") from error
        raise storage_failure(error, f"read {what} of snapshot {name}", path) from error
