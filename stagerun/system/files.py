"""Files and folders: written whole, put on the disk, on which file system, and whose they are; and what to do when the system refuses."""

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

_OTHER = "check the disk and its server; the same command goes on"
_HINTS = {
    errno.ENOSPC: "free some space there; the same command goes on",
    errno.EDQUOT: "your quota is used up: free some space there; the same command goes on",
    errno.EFBIG: "no file may be so large there: see `ulimit -f`, or give a folder on another file system",
    errno.EROFS: "that file system can only be read: give a folder on another one",
    errno.ENOENT: "no folder can be made there: give another one",
    errno.ENOTDIR: "a part of that path is a file: give another folder",
    errno.ENAMETOOLONG: "give a shorter name",
    errno.ELOOP: "a link in that path leads back to itself: give another folder",
    errno.EMFILE: "raise the limit on open files (`ulimit -n`); the same command goes on",
}


def why(error: OSError, path: Path) -> str:
    """What the system says of `path`, in its words; a file system may have room for bytes and none for another file."""
    text = error.strerror or str(error)
    if error.errno == errno.ENOSPC:
        with contextlib.suppress(OSError):
            found = os.statvfs(path)
            if found.f_files and found.f_favail < _FEW_INODES:  # what failed may have given its own back
                text += f": {found.f_favail} of {found.f_files:,} inodes are left for new files"
    return text


def hint_for(error: Exception) -> str:
    """What to do about a file that can't be written: an OSError, or lmdb's error."""
    if isinstance(error, OSError):
        return _HINTS.get(error.errno or 0, _OTHER)
    # The binding keeps no number: the system's own words stand at the end of its text.
    return next((hint for number, hint in _HINTS.items() if os.strerror(number) in str(error)), _OTHER)


def write_whole(path: Path, data: bytes, sync: bool = True, aside: Path | None = None) -> None:
    """Writes a file, over an old one if there is one: readers see the old bytes or the new. With `sync` they are on the disk, under this
    name, when it returns. `aside`: what it is called until then, where someone clears away what a killed process leaves. OSError."""
    # A name of its own for each call: a handler that ends a process may interrupt it while it writes the same file.
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
            # NFS sends a request again when the answer is lost, and the second one doesn't find what the first one has renamed.
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
    """PermissionDenied or StorageError, which name the file, for what goes wrong inside."""
    try:
        yield
    except PermissionError as error:
        raise PermissionDenied(f"may not write {file}", hint) from error
    except OSError as error:
        raise StorageError(f"can't write {file}: {why(error, Path(file).parent)}", hint) from error


def require_writable(file: str | Path) -> None:
    """Before the work whose result goes there. What it holds stays: should the work come to nothing, that is better than nothing.
    PermissionDenied, StorageError."""
    with writing(file):
        open(file, "ab").close()


def write_output(path: Path, data: bytes) -> None:
    """A file that the user asked for, old bytes or new; its folder is made. PermissionDenied, StorageError."""
    with writing(path, "choose another place with --output"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, data)


def upward(folder: str) -> Iterator[str]:
    """The folders above one, given as an absolute path, the nearest first."""
    while folder != (folder := os.path.dirname(folder)):
        yield folder


def sync_folder(folder: Path) -> None:
    """Puts a folder's list of names on the disk, so that a rename or a new file in it outlives a power cut. OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        # Some network file systems don't have this call for folders, and say so with EINVAL. No write has failed, and to
        # refuse would leave a run there without any snapshot.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(fd)


def own_folder(found: os.stat_result) -> bool:
    """Whether what `lstat` gave is a folder of this user, and not a link to one."""
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def private_folder(folder: Path, content: str, instead: str, make: bool = True) -> Path:
    """`folder`, made with `make`. PermissionDenied where it isn't this user's, or others may write to it: `content`, what is in it, can't be
    trusted then. `instead`: what else to do. OSError."""
    if make:
        folder.mkdir(mode=0o700, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        found = folder.lstat()
        if not own_folder(found):
            raise PermissionDenied(f"{folder}: belongs to another user, or is not a folder", f"remove it, or {instead}")
        if found.st_mode & _OTHERS_MAY_WRITE:
            raise PermissionDenied(
                f"{folder}: others may write to it (mode {stat.S_IMODE(found.st_mode):04o}), so its {content} can't be trusted",
                f"`chmod 700 {folder}` if no one did, or remove it: its {content} are made again",
            )
    return folder


def open_shared(path: Path, flags: int = os.O_RDONLY) -> int:
    """Return a descriptor of a file in a folder that others may write to. OSError for a link, which another user may have put there to have
    something else read or written, and for what is no regular file: opening a FIFO would wait for its other end."""
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
    """A file of lines in a folder that others may write to, which is only appended to. A kill or a full disk cuts short at most the newest line,
    and the next one starts on a line of its own. OSError."""

    def __init__(self, path: Path) -> None:
        self._file = os.fdopen(open_shared(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), "a+b", buffering=0)
        size = self._file.seek(0, os.SEEK_END)
        self._file.seek(max(0, size - 1))
        self._torn = size > 0 and self._file.read(1) != b"\n"

    def append(self, lines: bytes) -> None:
        """Append whole lines with one call."""
        data = b"\n" * self._torn + lines
        self._torn = self._file.write(data) != len(data)
        if self._torn:  # a disk with room for a part takes that part, and says so
            raise OSError(errno.ENOSPC, "the disk took a part of a line only")

    def close(self) -> None:
        self._file.close()


def untrusted_links(folder: Path) -> list[Path]:
    """Return the links in a folder that are another user's: what is written there would land where they say."""
    return sorted(
        Path(entry.path)
        for entry in os.scandir(folder)
        if entry.is_symlink() and entry.stat(follow_symlinks=False).st_uid not in (0, os.geteuid())
    )


def who_else_writes(folder: Path) -> str:
    """Return who besides this user may put files into a folder, in words; '' for nobody. OSError."""
    found = folder.stat()
    if found.st_uid not in (0, os.geteuid()):
        return "another user owns it"
    if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        return f"every user may write to it (mode {stat.S_IMODE(found.st_mode):04o})"
    return ""


def open_lock(path: Path) -> int:
    """A descriptor of a lock file, which is made where there is none. flock(2) needs no more than a descriptor to read, so the file is for
    its owner alone, and for those who may write to its folder as its group. OSError."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    folder = os.stat(path.parent)
    shared = folder.st_mode & stat.S_IWGRP
    with contextlib.suppress(OSError):  # another member of the group made it; a file system without modes
        if shared:
            os.fchown(fd, -1, folder.st_gid)
    if not shared or os.fstat(fd).st_gid == folder.st_gid:
        with contextlib.suppress(OSError):
            os.fchmod(fd, 0o660 if shared else 0o600)  # one of a version before had other modes
    return fd


# As the kernel names them. Nothing is claimed of any other (nfs, lustre, gpfs, beegfs, ceph, fuse of any kind ...).
LOCAL = frozenset(
    {"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "overlay", "ramfs", "reiserfs", "tmpfs", "xfs", "zfs"}
)


def local_kind(path: Path, mounts: Iterable[tuple[str, str]] | None = None) -> str:
    """The kind of file system that `path` is, or would be made, on, where it is a host's own; '' where it isn't, or can't be known."""
    kind = mounted(path, mounts)
    return kind if kind in LOCAL else ""


def mounted(path: Path, mounts: Iterable[tuple[str, str]] | None = None) -> str:
    """The kind of file system that `path` is, or would be made, on; '' where that can't be known. `mounts`: by place, in the order in which they
    were made."""
    if mounts is None:
        import psutil  # as in `system.host`

        try:
            mounts = [(one.mountpoint, one.fstype) for one in psutil.disk_partitions(all=True)]
        except OSError:  # no Linux, or a box that hides it
            return ""
    real = os.path.realpath(path)
    above = [(len(at), kind) for at, kind in mounts if real == at or real.startswith(at.rstrip("/") + "/")]
    deepest = max((depth for depth, _ in above), default=0)
    # Of two at one place the later one covers the other.
    return next((kind for depth, kind in reversed(above) if depth == deepest), "")


def mapped(path: Path) -> memoryview:
    """The file's bytes where they lie. They are given back when nothing looks into them any more. OSError."""
    with open(path, "rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
