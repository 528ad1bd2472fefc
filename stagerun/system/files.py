"""Files and folders: atomic writes, syncing, file systems, owners, and hints for errors of the system."""

import contextlib
import errno
import mmap
import os
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from stagerun.base.errors import PermissionDenied, StorageError

_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH

_FEW_INODES = 32

_OTHER = "check the disk and its server; the same command resumes"
_HINTS = {
    errno.ENOSPC: "free some space; the same command resumes",
    errno.EDQUOT: "your quota is used up: free some space; the same command resumes",
    errno.EFBIG: "the file is too large: see `ulimit -f`, or choose a folder on another file system",
    errno.EROFS: "the file system is read-only: choose a folder on another one",
    errno.ENOENT: "the folder can't be made: choose another one",
    errno.ENOTDIR: "a part of the path is a file: choose another folder",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ELOOP: "a link in the path leads to itself: choose another folder",
    errno.EMFILE: "raise the limit on open files (`ulimit -n`); the same command resumes",
}


def why(error: OSError, path: Path) -> str:
    """Return the system's text for an error, with the number of inodes if these are used up."""
    text = error.strerror or str(error)
    if error.errno == errno.ENOSPC:
        with contextlib.suppress(OSError):
            system = os.statvfs(path)
            if system.f_files and system.f_favail < _FEW_INODES:  # the failed file may have released its inode
                text += f": {system.f_favail} of {system.f_files:,} inodes are left for new files"
    return text


def hint_for(error: Exception) -> str:
    """Return a hint for a failed write: an OSError, or lmdb's error."""
    if isinstance(error, OSError):
        return _HINTS.get(error.errno or 0, _OTHER)
    # lmdb's errors have no number; their text ends with the system's.
    return next((hint for number, hint in _HINTS.items() if os.strerror(number) in str(error)), _OTHER)


def write_whole(path: Path, data: bytes, sync: bool = True, aside: Path | None = None) -> None:
    """Write or replace a file: readers see the old bytes or the new. With `sync` it is on the disk, under its name, on return. `aside`: its
    temporary name, if another process cleans up after a kill. OSError."""
    # A unique name: a handler that ends the process may interrupt a write of the same file.
    aside = aside or path.with_name(f".{path.name}-{os.getpid()}-{time.monotonic_ns()}")
    try:
        with open(aside, "wb") as file:
            file.write(data)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        try:
            aside.rename(path)
        except FileNotFoundError:
            # NFS repeats a request after a lost answer, and the repeated rename misses the file.
            if aside.exists() or path.read_bytes() != data:
                raise
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise
    if sync:
        sync_folder(path.parent)


@contextlib.contextmanager
def writing(file: str | Path, hint: str = "") -> Iterator[None]:
    """Turn an OSError inside into PermissionDenied or StorageError, which name the file."""
    try:
        yield
    except PermissionError as error:
        raise PermissionDenied(f"may not write {file}", hint) from error
    except OSError as error:
        raise StorageError(f"can't write {file}: {why(error, Path(file).parent)}", hint) from error


def require_writable(file: str | Path) -> None:
    """Check, before the work, that its result can be written; an existing file keeps its content. PermissionDenied, StorageError."""
    with writing(file):
        open(file, "ab").close()


def write_output(path: Path, data: bytes) -> None:
    """Write a file for the user, atomically; its folder is made. PermissionDenied, StorageError."""
    with writing(path, "choose another file with --output"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, data)


def upward(folder: str) -> Iterator[str]:
    """Yield the folders above an absolute path, the nearest first."""
    while folder != (folder := os.path.dirname(folder)):
        yield folder


def sync_folder(folder: Path) -> None:
    """Sync a folder's list of names, so that a rename or new file outlives a power cut. OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        # Some network file systems lack this call for folders (EINVAL). No write has failed, and refusing would leave a run without
        # snapshots.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(fd)


def private_folder(folder: Path, content: str, instead: str) -> Path:
    """Return `folder`, made if it is missing. PermissionDenied if another user owns it or others may write to it, so that its `content` can't be
    trusted; `instead`: the alternative. OSError."""
    folder.mkdir(mode=0o700, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise PermissionDenied(f"{folder}: belongs to another user, or is not a folder", f"remove it, or {instead}")
        if status.st_mode & _OTHERS_MAY_WRITE:
            raise PermissionDenied(
                f"{folder}: others may write to it (mode {stat.S_IMODE(status.st_mode):04o}), so its {content} can't be trusted",
                f"`chmod 700 {folder}` if its {content} are yours, or remove it: they are made again",
            )
    return folder


def open_shared(path: Path, flags: int = os.O_RDONLY) -> int:
    """Return a descriptor of a file in a folder that others may write to. OSError for a link, by which another user may redirect the
    access, and unless it is a regular file: opening a FIFO would block."""
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a link, which is not followed", str(path)) from error
        if error.errno == errno.ENXIO:
            raise OSError(errno.EINVAL, "it is not a regular file", str(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return fd


class LineFile:
    """An append-only file of lines in a folder that others may write to. A kill or a full disk cuts short at most the newest line, and the next
    one starts on a new line. OSError."""

    def __init__(self, path: Path) -> None:
        self._file = os.fdopen(open_shared(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), "a+b", buffering=0)
        size = self._file.seek(0, os.SEEK_END)
        self._file.seek(max(0, size - 1))
        self._torn = size > 0 and self._file.read(1) != b"\n"

    def append(self, lines: bytes) -> None:
        """Append whole lines with one call."""
        data = b"\n" * self._torn + lines
        self._torn = self._file.write(data) != len(data)
        if self._torn:  # a full disk takes a part of the line
            raise OSError(errno.ENOSPC, "only a part of the line was written")

    def close(self) -> None:
        self._file.close()


def untrusted_links(folder: Path) -> list[Path]:
    """Return the links in a folder that belong to another user, who would choose where a write ends up."""
    return sorted(
        Path(entry.path)
        for entry in os.scandir(folder)
        if entry.is_symlink() and entry.stat(follow_symlinks=False).st_uid not in (0, os.geteuid())
    )


def who_else_writes(folder: Path) -> str:
    """Describe who besides this user may put files into a folder; '' if only this user may. OSError."""
    status = folder.stat()
    if status.st_uid not in (0, os.geteuid()):
        return "another user owns it"
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        return f"every user may write to it (mode {stat.S_IMODE(status.st_mode):04o})"
    return ""


def open_lock(path: Path) -> int:
    """Open a lock file, made if missing. flock(2) needs only a readable descriptor, so the file is private to its owner, and to the group that
    may write to its folder. OSError."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    folder = os.stat(path.parent)
    shared = folder.st_mode & stat.S_IWGRP
    with contextlib.suppress(OSError):  # another member of the group made it; a file system without modes
        if shared:
            os.fchown(fd, -1, folder.st_gid)
    if not shared or os.fstat(fd).st_gid == folder.st_gid:
        with contextlib.suppress(OSError):
            os.fchmod(fd, 0o660 if shared else 0o600)  # earlier versions set other modes
    return fd


# Kernel names of local file systems; all others (nfs, lustre, gpfs, beegfs, ceph, fuse ...) may be shared.
LOCAL = frozenset(
    {"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "overlay", "ramfs", "reiserfs", "tmpfs", "xfs", "zfs"}
)


def local_kind(path: Path, mounts: Iterable[tuple[str, str]] | None = None) -> str:
    """Return the kind of the local file system of `path`, which need not exist; '' for a shared or unknown one."""
    kind = mounted(path, mounts)
    return kind if kind in LOCAL else ""


def mounted(path: Path, mounts: Iterable[tuple[str, str]] | None = None) -> str:
    """Return the kind of the file system of `path`, which need not exist; '' if unknown. `mounts`: mount points with kinds, in the order of
    mounting."""
    if mounts is None:
        import psutil  # as in `system.host`

        try:
            mounts = [(one.mountpoint, one.fstype) for one in psutil.disk_partitions(all=True)]
        except OSError:  # no Linux, or a box that hides it
            return ""
    real = os.path.realpath(path)
    # A later mount covers an earlier one at the same point.
    above = [(len(at), n, kind) for n, (at, kind) in enumerate(mounts) if f"{real}/".startswith(at.rstrip("/") + "/")]
    return max(above, default=(0, 0, ""))[2]


def mapped(path: Path) -> memoryview:
    """Map the file's bytes, unmapped with the last reference. OSError."""
    with open(path, "rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
