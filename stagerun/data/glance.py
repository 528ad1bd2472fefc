"""What of an LMDB can be known within a few reads, however large it is: enough to see that two hosts have different ones."""

import hashlib
import os
from dataclasses import dataclass

from stagerun.errors import DataError
from stagerun.lmdb_file import BY_SCHEDULE, open_file, side_facts

_ENDS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Glance:
    """`size` of data.mdb, bytes. `fingerprint` is that of the side file, '' without one, or where that is of another state of the LMDB.
    `ends`: a digest of data.mdb's first and last MB, in hex. Copies of one file are alike in all; LMDBs made separately of the same
    records in `records` and `fingerprint` alone."""

    records: int
    size: int
    fingerprint: str
    ends: str


def glance(folder: str) -> Glance:
    """Errors as of `lmdb_file.check_file`."""
    fd, meta = open_file(folder, BY_SCHEDULE)
    try:
        digest = hashlib.blake2b(os.pread(fd, _ENDS, 0), digest_size=16)
        digest.update(os.pread(fd, _ENDS, max(0, meta.file_size - _ENDS)))
    except OSError as error:
        raise DataError(
            f"{folder}: data.mdb can't be read: {error.strerror}", "check the disk or the file server"
        ) from None
    finally:
        os.close(fd)
    fingerprint = str(side_facts(folder, meta).get("fingerprint", ""))
    return Glance(records=meta.entries, size=meta.file_size, fingerprint=fingerprint, ends=digest.hexdigest())
