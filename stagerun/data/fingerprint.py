"""What of an LMDB can be known within a few reads, however large it is: which images it holds, as a short text that is compared
between process lives, and whether another host has the same file. No numpy: `plan` asks, too."""

import hashlib
import os
import re
import struct
from dataclasses import dataclass, replace

from stagerun.errors import DataError, StagerunError
from stagerun.lmdb_file import BY_SCHEDULE, Meta, open_file, side_facts
from stagerun.recipe import Schedule

_SAMPLES = 32
_LARGEST_VALUE = 1 << 20  # bytes of a sampled record that are digested, beside its length
_DEEPEST = 32  # LMDB's own limit
_ENDS = 1 << 20


def with_sets(schedule: Schedule) -> Schedule:
    """The schedule with what `set_of` says of its LMDBs, as far as they are on this machine (`recipe.Schedule.sets`)."""
    sources = {"train": schedule.data.train, "val": schedule.data.val}
    found = {role: set_of(source.path) for role, source in sources.items() if source is not None}
    return replace(schedule, sets={role: text for role, text in found.items() if text})


def set_of(folder: str) -> str:
    """`60000 records, sample 0123456789abcdef, index 0123456789abcdef`: the images in the LMDB in `folder`; '' where they can't be read,
    which is reported when they are opened. To be compared by `snapshots.same_set`.

    `index` is the fingerprint in the side file, over every key and record; without a side file it is missing. `sample` covers the
    number of records and 32 of them, key and value, at even distances in the tree of pages: it needs no walk over all of that, but it is
    that of the same records in another tree only if that was filled in the same order. Of a prepared copy it is what it was prepared
    from: the pixels are the same.
    """
    try:
        fd, meta = open_file(folder)
    except StagerunError:
        return ""
    try:
        facts = side_facts(folder, meta)
        if re.fullmatch(r"\d+ records(, (sample|index) \w+)+", source := str(facts.get("prepared_from"))):
            return source
        digest = hashlib.sha256(b"%d" % meta.entries)
        for n in range(_SAMPLES):
            digest.update(_record(fd, meta, n / (_SAMPLES - 1)))
    except (OSError, OverflowError, ValueError, struct.error):
        return ""
    finally:
        os.close(fd)
    index = f", index {str(facts['fingerprint'])[:16]}" if "fingerprint" in facts else ""
    return f"{meta.entries} records, sample {digest.hexdigest()[:16]}{index}"


def _record(fd: int, meta: Meta, place: float) -> bytes:
    """Digest of the key and value at `place`, 0 (the first) to 1 (the last). The pages are as `lmdb_offsets` says; struct.error,
    OSError, OverflowError or ValueError where one is not."""
    number = meta.root
    for level in range(min(meta.depth, _DEEPEST)):
        page = os.pread(fd, meta.page_size, number * meta.page_size)
        nodes = (struct.unpack_from("<H", page, 12)[0] - 16) // 2
        if nodes < 1:
            break
        place *= nodes
        node = min(int(place), nodes - 1)
        place -= node
        at = struct.unpack_from("<H", page, 16 + 2 * node)[0]
        low, high, flags, key_size = struct.unpack_from("<4H", page, at)
        at += 8
        if level < meta.depth - 1:
            number = low | high << 16 | flags << 32
            continue
        length, begin = low | high << 16, number * meta.page_size + at + key_size
        if flags & 1:  # the value is in pages of its own
            begin = struct.unpack_from("<Q", page, at + key_size)[0] * meta.page_size + 16
        value = os.pread(fd, min(length, _LARGEST_VALUE), begin)
        return hashlib.sha256(b"%d %d " % (key_size, length) + page[at : at + key_size] + value).digest()
    raise ValueError("not a tree of records")


# -- enough to see that two hosts have different ones


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
