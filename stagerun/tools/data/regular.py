"""An opener for files that somebody else named: a pipe or a device among them would be waited for without end."""

import errno
import os
import stat

from stagerun.errors import DataError


def regular(path: str, flags: int) -> int:
    """For `open(..., opener=regular)`. DataError unless it is a file, linked to or not; OSError."""
    # Opening a pipe waits for a writer, and is started again after a signal, unless it is told not to wait. A file doesn't mind.
    fd = os.open(path, flags | os.O_NONBLOCK)
    try:
        mode = os.fstat(fd).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if not stat.S_ISREG(mode):
            kind = "pipe" if stat.S_ISFIFO(mode) else "device"
            raise DataError(f"{path}: is no regular file, but a {kind}", "give a file, or leave it out")
    except BaseException:
        os.close(fd)
        raise
    return fd
