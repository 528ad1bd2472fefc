"""The file system, behind a small interface, so that tests can make any call of it fail or be the last one."""

import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from stagerun.system.files import sync_folder

_T = TypeVar("_T")

PIECE = 1 << 20  # bytes read at a time where a file is not read whole


@dataclass(frozen=True, slots=True)
class File:
    """A new file, open for writing. Every method raises OSError."""

    fd: int

    def write(self, data: memoryview) -> None:
        """Append all of it."""
        while data:  # a full disk first writes less than all, then fails
            data = data[os.write(self.fd, data) :]

    def sync(self) -> None:
        """Return when the file is on the disk. After an error the file is lost: a second sync proves nothing."""
        os.fsync(self.fd)

    def close(self) -> None:
        os.close(self.fd)


class LocalDisk:
    """The file system of this machine. Modes come from the umask, so that a group can share an output folder.

    Every method raises OSError. `create`, `size`, `read`, `digest`, `unlink`, `rename` and `link` don't follow a link at the path's end."""

    __slots__ = ()

    mkdir, rename, names = staticmethod(os.mkdir), staticmethod(os.rename), staticmethod(os.listdir)
    unlink, rmdir = staticmethod(os.unlink), staticmethod(os.rmdir)
    sync_folder = staticmethod(sync_folder)  # returns when the names in the folder are on the disk

    def create(self, path: Path) -> File:
        """Create an empty file. FileExistsError if the name is taken."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return File(os.open(path, flags, 0o666))

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name. FileExistsError if that is taken."""
        os.link(source, target, follow_symlinks=False)

    def size(self, path: Path) -> int:
        """Return the bytes of a regular file; EINVAL if it is anything else."""
        status = os.stat(path, follow_symlinks=False)
        _require_regular(status, path)
        return status.st_size

    def read(self, path: Path, limit: int) -> bytes:
        """Return all of a regular file. Neither it nor its folder may be a symbolic link (ELOOP, ENOTDIR). EINVAL if it isn't a regular file,
        without waiting for the other end of a pipe; EFBIG, unread, above `limit` bytes."""
        with _opened(path, limit) as (fd, size), os.fdopen(fd, "rb", closefd=False) as file:
            return file.read(size)

    def digest(self, path: Path, limit: int) -> tuple[int, str]:
        """Return the bytes and sha256, in hex, of a regular file, read from the disk and not from the system's cache, where that can be
        dropped. In little memory. Raises as `read` does."""
        digest, total = hashlib.sha256(), 0
        with _opened(path, limit) as (fd, size), os.fdopen(fd, "rb", buffering=0, closefd=False) as file:
            # Drop synced pages, so that they are read from the disk, or the server. It is only advice: a file system in memory has no
            # other copy.
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            buffer = memoryview(bytearray(min(PIECE, size + 1)))
            while total <= limit and (count := file.readinto(buffer)):
                digest.update(buffer[:count])
                total += count
        return total, digest.hexdigest()

    def free(self, path: Path) -> int:
        """Return the free bytes of the file system that holds the folder."""
        return shutil.disk_usage(path).free


Disk = LocalDisk


@contextmanager
def _opened(path: Path, limit: int) -> Iterator[tuple[int, int]]:
    """Open a regular file for reading: (descriptor, bytes). Raises as `Disk.read` does."""
    with ExitStack() as files:
        # O_NONBLOCK: opening a named pipe would wait for a writer. It means nothing for a regular file.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        folder = os.open(path.parent, flags | os.O_DIRECTORY)
        files.callback(os.close, folder)
        fd = os.open(path.name, flags, dir_fd=folder)
        files.callback(os.close, fd)
        status = os.fstat(fd)
        _require_regular(status, path)
        if status.st_size > limit:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
        yield fd, status.st_size


def _require_regular(status: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))


def twice(look: Callable[[], _T], code: int = errno.EIO) -> _T:
    """Call the disk, and again after error `code`: a bad sector fails again, a server or a cable that failed once does not. Else a good
    snapshot would be discarded."""
    try:
        return look()
    except OSError as error:
        if error.errno != code:
            raise
        return look()


def names_in(disk: Disk, folder: Path) -> list[str]:
    """Return the names in a folder, in no order; empty if it is missing."""
    try:
        return disk.names(folder)
    except FileNotFoundError:
        return []


def make_folder(disk: Disk, path: Path) -> None:
    """Make a folder and its missing parents, so that they outlast a power cut."""
    try:
        disk.mkdir(path)
    except FileExistsError:
        return
    except FileNotFoundError:
        make_folder(disk, path.parent)
        with suppress(FileExistsError):  # another run, which starts at this moment, was faster
            disk.mkdir(path)
    disk.sync_folder(path.parent)


def rename(disk: Disk, source: Path, target: Path) -> None:
    """Rename within one folder: a directory to a name that was free when the caller, who holds the lock, looked; or a file with a
    temporary name over another.

    NFS sends a request again when the answer is lost, and the second one fails because the first one was carried out.
    So an error is looked up: what was renamed has left its old name, and is under the new one."""
    try:
        disk.rename(source, target)
    except OSError as error:
        if not was_renamed(disk, source, target):
            raise error from None


def was_renamed(disk: Disk, source: Path, target: Path) -> bool:
    """Return whether a rename that gave an error was carried out all the same, going by the names; False if these can't be read."""
    try:
        names = disk.names(target.parent)
    except OSError:
        return False
    return source.name not in names and target.name in names


_LEFT = frozenset({errno.EBUSY, errno.ENOTEMPTY, errno.EEXIST, errno.EISDIR, errno.ENOENT})


def delete(disk: Disk, path: Path) -> bool:
    """Delete a file, a link, or a folder with the files in it. Return whether nothing is left.

    What is left is not an error: a file that is still open somewhere (NFS keeps it under another name until then), or a folder
    inside, which stagerun has not made."""
    try:
        disk.unlink(path)  # first, since `names` would follow a link
        return True
    except FileNotFoundError:
        return True
    except IsADirectoryError:
        pass
    for name in disk.names(path):
        try:
            disk.unlink(path / name)
        except OSError as error:
            if error.errno not in _LEFT:
                raise
    try:
        disk.rmdir(path)
    except OSError as error:
        if error.errno not in _LEFT:
            raise
        return error.errno == errno.ENOENT
    return True
