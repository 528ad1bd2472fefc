"""What of an LMDB can be known within a few reads, however large it is: enough to see that two hosts have different ones."""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from stagerun.data.index import SIDE_FILE
from stagerun.errors import DataError
from stagerun.lmdb_file import BY_SCHEDULE, open_file

_ENDS = 1 << 20
_LARGEST_HEADER = 1 << 26


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
    fingerprint = _fingerprint(Path(folder) / SIDE_FILE, meta.file_size, meta.transaction)
    return Glance(records=meta.entries, size=meta.file_size, fingerprint=fingerprint, ends=digest.hexdigest())


def _fingerprint(file: Path, size: int, transaction: int) -> str:
    """Of the side file's header alone, which is before its arrays: 106 MB for ILSVRC12. A damaged one is told when it is opened."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(min(length, _LARGEST_HEADER)))
        facts = json.loads(header["__metadata__"]["stagerun"].partition(" ")[2])
        if (facts["file_size"], facts["transaction"]) != (size, transaction):
            return ""
        return str(facts["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ""
