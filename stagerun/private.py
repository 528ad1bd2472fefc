"""Files and folders where others could have made some of the same name: whose they are, and who may open them."""

import contextlib
import os
import stat
from pathlib import Path

from stagerun.errors import PermissionDenied

_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


def private_folder(folder: Path, content: str, instead: str, make: bool = True) -> Path:
    """`folder`, made with `make`. PermissionDenied where it isn't this user's, or others may write to it: `content`, what is in it, can't be
    trusted then. `instead`: what else to do. OSError."""
    if make:
        folder.mkdir(mode=0o700, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise PermissionDenied(f"{folder}: belongs to another user, or is not a folder", f"remove it, or {instead}")
        if found.st_mode & _OTHERS_MAY_WRITE:
            raise PermissionDenied(
                f"{folder}: others may write to it (mode {stat.S_IMODE(found.st_mode):04o}), so its {content} can't be trusted",
                f"`chmod 700 {folder}` if no one did, or remove it: its {content} are made again",
            )
    return folder


def open_lock(path: Path) -> int:
    """A descriptor of a lock file, which is made where there is none. flock(2) needs no more than a descriptor to read, so the file is for
    its owner alone, and for those who may write to its folder as its group. OSError."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    folder = os.stat(path.parent)
    shared = folder.st_mode & stat.S_IWGRP
    with contextlib.suppress(OSError):  # another member of the group made it; a file system without modes
        if shared:
            os.fchown(fd, -1, folder.st_gid)
    if not shared or os.fstat(fd).st_gid == folder.st_gid:
        with contextlib.suppress(OSError):
            os.fchmod(fd, 0o660 if shared else 0o600)  # one of a version before had other modes
    return fd


def gone(pid: int, host: str) -> bool:
    """Whether a process is known to have ended: its number is none of this host's. False where that can't be known."""
    if host != os.uname().nodename:
        return False
    try:
        os.kill(pid, 0)  # not by /proc, which may hide the processes of others (hidepid)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        pass  # it lives and is another user's, or it can't be known
    return False
