"""Hears from the kernel that files in a folder change. Waiting for that takes no processor time, which looking again and again does.

What another machine changes on a network file system it doesn't hear: who needs that looks now and then besides.
"""

import ctypes
import os
from contextlib import suppress
from pathlib import Path

# IN_MODIFY, IN_CLOSE_WRITE, IN_MOVED_FROM, IN_MOVED_TO, IN_CREATE, IN_DELETE, IN_DELETE_SELF, IN_MOVE_SELF of <sys/inotify.h>.
_CHANGES = 0x2 | 0x8 | 0x40 | 0x80 | 0x100 | 0x200 | 0x400 | 0x800


class Inotify:
    """`fileno` can be read, as select and asyncio have it, once something has changed; it is -1 where the kernel has none left."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd: int = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)

    def fileno(self) -> int:
        return self._fd

    def add(self, folder: Path) -> None:
        """Also hears of what changes in this folder, while it is there. The same folder again changes nothing."""
        if self._fd >= 0:
            self._libc.inotify_add_watch(self._fd, os.fsencode(folder), _CHANGES)

    def drain(self) -> None:
        """Forgets what has changed so far."""
        with suppress(OSError):
            while os.read(self._fd, 1 << 16):
                pass

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
