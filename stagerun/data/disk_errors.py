"""What to do about a file that can't be written, by what the system says is wrong."""

import errno
import os

import lmdb

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


def hint_for(error: OSError | lmdb.Error) -> str:
    if isinstance(error, OSError):
        return _HINTS.get(error.errno or 0, _OTHER)
    # The binding keeps no number: the system's own words stand at the end of its text.
    return next((hint for number, hint in _HINTS.items() if os.strerror(number) in str(error)), _OTHER)
