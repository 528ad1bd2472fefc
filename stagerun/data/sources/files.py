"""Reading: whole files, and pieces of archives by offset, with errors that name the place."""

import errno
import hashlib
import os
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from stagerun.data.regular import regular
from stagerun.errors import DataError, PermissionDenied, StorageError
from stagerun.system.host import open_files

LARGEST_FILE = 1 << 28  # bytes of one image's file; what is larger isn't an image, and would fill memory
LARGEST_TEXT = 1 << 30
_OTHER_FILES = 256

_HERE_ONLY = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG)


def read_whole(path: str, largest: int = LARGEST_FILE) -> bytes:
    """A file's bytes. DataError if this file can't be read or is larger than `largest`, StorageError if the disk fails."""
    return read_with_state(path, largest)[0]


def read_with_state(path: str, largest: int = LARGEST_FILE) -> tuple[bytes, int]:
    """As `read_whole`; and which state of the file that is, as `state_of` has it."""
    try:
        data, state = _bytes(path, largest)
    except OSError as error:
        _one_file(path, error)
    if data is None:
        raise DataError(f"{path}: larger than {largest >> 20} MiB", "is it one image?")
    return data, state


def state_of(path: str) -> int:
    """64 bits over a file's size and time of change; 0 if there is none, or it may not be asked. StorageError."""
    try:
        return _state(os.stat(path))
    except OSError as error:
        if error.errno in _HERE_ONLY:
            return 0
        _one_file(path, error)


def _state(found: os.stat_result) -> int:
    digest = hashlib.blake2b(f"{found.st_size} {found.st_mtime_ns}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") | 1


def _bytes(path: str, largest: int) -> tuple[bytes | None, int]:
    """Without bytes if they are more than `largest`. OSError, DataError."""
    # Unbuffered: Python then takes as much memory as the file is long. Asked for so many bytes, it takes that many first.
    with open(path, "rb", buffering=0, opener=regular) as stream:
        found = os.fstat(stream.fileno())
        data = stream.readall() if found.st_size <= largest else None
    return data if data is None or len(data) <= largest else None, _state(found)


def read_text(path: str) -> str:
    """A text file that the user named; bytes that are no UTF-8 are surrogates, as in file names."""
    try:
        data, _ = _bytes(path, LARGEST_TEXT)
    except OSError as error:
        can_not_open(path, error)
    if data is None:
        raise DataError(f"{path}: larger than {LARGEST_TEXT >> 20} MiB", "is it a list?")
    if b"\0" in data:
        raise DataError(f"{path}: holds NUL bytes, so it is no text", "give the text file")
    return data.decode(errors="surrogateescape").removeprefix("\N{BYTE ORDER MARK}")


def _one_file(path: str, error: OSError) -> NoReturn:
    if error.errno in _HERE_ONLY:
        raise DataError(f"{path}: can't be read: {error.strerror}", "check the file, or leave it out") from None
    raise StorageError(f"{path}: can't be read: {error.strerror}", "check the disk; the same command goes on") from None


def can_not_open(path: str, error: OSError) -> NoReturn:
    """The error for a path that the user named."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        raise DataError(f"{path}: no such file or folder", "check the name") from None
    if isinstance(error, IsADirectoryError):
        raise DataError(f"{path}: is a folder, not a file", "give the file in it") from None
    if isinstance(error, PermissionError):
        raise PermissionDenied(f"{path}: may not be read", "ask its owner, or copy it") from None
    raise StorageError(f"{path}: can't be read: {error.strerror}", "check the disk") from None


def may_keep_open(files: int) -> bool:
    """Whether so many may be open at once, beside the others of this process. Raises its own limit as far as that takes."""
    needed = files + _OTHER_FILES
    return open_files(needed) >= needed


@dataclass(frozen=True, slots=True)
class State:
    """Which file, and which state of it."""

    path: str  # the real one
    size: int
    changed: int  # ns


class Archive:
    """A large file that is read in pieces, by any number of threads. Closed when no one refers to it any more.

    With `keep_open=False` each read opens it: thousands of shards can be more files than a process may have open. That costs
    a file server's client a question for each image.
    """

    def __init__(self, path: str, keep_open: bool = True) -> None:
        self.path = path
        fd = self._open()
        found = os.fstat(fd)
        self.size = found.st_size
        self.state = State(os.path.realpath(path), found.st_size, found.st_mtime_ns)
        self._fd = fd if keep_open else None
        if keep_open:
            weakref.finalize(self, os.close, fd)
        else:
            os.close(fd)

    @property
    def name(self) -> str:
        return Path(self.path).name

    def read(self, at: int, length: int, what: str = "") -> bytes:
        """Exactly `length` bytes from offset `at`. DataError if the file ends before, or `length` is no image's."""
        place = f"{self.path}: {what}" if what else f"{self.path} at byte {at}"
        if not 0 <= length <= LARGEST_FILE:
            raise DataError(f"{place}: {length} bytes, more than one image can have", "is the file damaged?")
        if at < 0 or at + length > self.size:
            raise DataError(
                f"{place}: wants bytes {at} to {at + length}, but the file ends at {self.size}",
                "it is damaged or cut off; get it again",
            )
        fd = self._open() if self._fd is None else self._fd
        try:
            data = _pread(fd, at, length)
        except OSError as error:
            _one_file(self.path, error)
        finally:
            if self._fd is None:
                os.close(fd)
        if len(data) < length:  # cut off while we read
            raise DataError(f"{place}: the file became shorter", "is something still writing it?")
        return data

    def _open(self) -> int:
        try:
            return regular(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            can_not_open(self.path, error)


def _pread(fd: int, at: int, length: int) -> bytes:
    """What there is of `length` bytes; one pread gives at most 2 GiB, and on some file systems less."""
    data = os.pread(fd, length, at)
    while len(data) < length and (more := os.pread(fd, length - len(data), at + len(data))):
        data += more
    return data
