"""The file of an LMDB, looked at before anyone maps or reads it: whether it is there and whole, how many records it has, and which.

All of it within a few reads, however large the file is, and without numpy: `plan` asks, too.
"""

import hashlib
import json
import os
import re
import struct
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from stagerun.base.errors import DataError, PermissionDenied, StagerunError
from stagerun.system.image_folder import class_folders, is_class_folder

if TYPE_CHECKING:
    from stagerun.base.recipe import Schedule, Source, Stage


# What is known of the LMDB beforehand: `data.index` reads and writes it.
SIDE_FILE = "stagerun-index.safetensors"
_LARGEST_HEADER = 1 << 26

# LMDB's file starts with two meta pages, of which the one with the larger transaction number counts. All little-endian
# here, as written by a 64-bit machine (LMDB/lmdb: libraries/liblmdb/mdb.c, MDB_meta): 16 bytes of page header, then magic,
# version, address, map size; the record of the free list (its first field is the page size); the record of the data: flags,
# depth, entries, root; last page, transaction.
_META = struct.Struct("<16x II QQ I44x 4xHH24xQQ QQ")
_MAGIC, _VERSION = 0xBEEFC0DE, 1
_PAGE_SIZES = {1 << n for n in range(8, 17)}

# Where the LMDB was named by ...
BY_COMMAND = "give the folder of an LMDB, in which its data.mdb is"
BY_SCHEDULE = "check `source` under `data` in schedule.prototxt"


def data_file(path: str, hint: str = BY_COMMAND) -> Path:
    """The file data.mdb of an LMDB's folder. DataError, with the hint, if either is missing."""
    folder = Path(path)
    try:
        if folder.is_file():
            raise DataError(f"{path}: is a file, not the folder of an LMDB", "give the folder that holds data.mdb")
        if not folder.is_dir():
            raise DataError(f"{path}: no such folder", hint)
        if hint in (BY_COMMAND, BY_SCHEDULE) and is_class_folder(path):
            hint = f"a run imports it when it first uses it; elsewhere make an LMDB: stagerun data import {path} LMDB"
            raise DataError(f"{path}: not an LMDB, but a folder of class folders", hint)
        if not (folder / "data.mdb").is_file():
            raise DataError(f"{path}: not an LMDB: it holds no data.mdb", hint)
    except PermissionError:
        raise PermissionDenied(f"{path}: may not be read", "ask its owner for read permission") from None
    except OSError as error:  # a name that is too long, or a file server that doesn't answer
        raise DataError(f"{path}: can't be looked at: {error.strerror}", hint) from None
    return folder / "data.mdb"


@dataclass(frozen=True, slots=True)
class Meta:
    """What the system says of the file, and, in the order of `_newest`, what the file says of itself."""

    file_size: int  # bytes
    changed: int  # when it was last written to, nanoseconds
    page_size: int
    flags: int  # of the tree of records
    depth: int  # its levels
    entries: int  # records
    root: int  # number of its page
    last_page: int
    transaction: int  # the newest one; each commit adds 1


def check_file(path: str, hint: str = BY_COMMAND) -> int:
    """Number of records of the LMDB in folder `path`, from its meta pages. DataError unless it is whole; `hint` if it isn't there."""
    fd, meta = open_file(path, hint)
    os.close(fd)
    return meta.entries


def open_file(path: str, hint: str = BY_COMMAND) -> tuple[int, Meta]:
    """(file descriptor to read data.mdb with, what it says). The caller closes it. Errors as in `check_file`."""
    file = data_file(path, hint)
    with reading(file):
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # else a FIFO waits for a writer
        try:
            return fd, _checked(fd, file)
        except BaseException:
            os.close(fd)
            raise


@contextmanager
def reading(file: Path | str) -> Iterator[None]:
    """Errors of reading a file of an LMDB: PermissionDenied, DataError."""
    try:
        yield
    except PermissionError:
        raise PermissionDenied(f"{file}: may not be read", "ask its owner for read permission") from None
    except OSError as error:
        raise DataError(f"{file}: can't be read: {error.strerror}", "check the disk or the file server") from None


def side_facts(folder: str, meta: Meta) -> Mapping[str, Any]:
    """`data.index.Facts` as its JSON in the side file's header, which is before its arrays: 106 MB for ILSVRC12. Empty without a side
    file, or where that is of another state of the LMDB or can't be read; a damaged one is reported when it is opened."""
    with _odd_side_file_ignored(), _side_file(folder) as stream:
        return _facts(_header(stream)[0], meta)
    return {}


def class_sizes(folder: str, classes: int, ignored: int | None = None) -> tuple[int, ...]:
    """How many records have the labels 0 .. classes-1, as the side file says; () where that is not known, or there are other labels. Those of
    the `ignored` label are of no class."""
    with suppress(StagerunError), _odd_side_file_ignored():
        fd, meta = open_file(folder)
        os.close(fd)
        header, (labels,) = _arrays(folder, "labels")
        counted: Counter[int | None] = Counter(labels)
        counted.pop(-1, None)  # records without one
        counted.pop(ignored, None)
        known = _facts(header, meta) and all(label is not None and 0 <= label < classes for label in counted)
        return tuple(counted[label] for label in range(classes)) if known else ()
    return ()


@contextmanager
def _odd_side_file_ignored() -> Iterator[None]:
    """It is as good as none here; whoever opens the LMDB to read it reports what is wrong."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        yield


def _side_file(folder: str) -> BinaryIO:
    file = Path(folder) / SIDE_FILE
    if not file.is_file():  # to open a FIFO would wait for a writer
        raise FileNotFoundError(file)
    return file.open("rb")


def _header(stream: BinaryIO) -> tuple[dict[str, Any], int]:
    """safetensors' header, and where the arrays begin."""
    length = int.from_bytes(stream.read(8), "little")
    header: dict[str, Any] = json.loads(stream.read(min(length, _LARGEST_HEADER)))
    return header, 8 + length


def _facts(header: Mapping[str, Any], meta: Meta) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(header["__metadata__"]["stagerun"].partition(" ")[2])
    same = (facts["file_size"], facts["transaction"]) == (meta.file_size, meta.transaction)
    return facts if same and isinstance(facts["fingerprint"], str) else {}


def class_names(folder: str) -> tuple[str, ...]:
    """The classes that the side file, or class folders, name, by label; () where they aren't known, or the LMDB is missing."""
    if is_class_folder(folder):
        with suppress(StagerunError):
            return class_folders(folder)
    names = _known_facts(folder).get("classes")
    return tuple(map(str, names)) if isinstance(names, list) else ()


def pixel_statistics(folder: str) -> list[tuple[float, float]]:
    """Mean and standard deviation of all pixels by channel (B, G, R), as the side file has them; empty where they aren't known."""
    with _odd_side_file_ignored():
        facts = _known_facts(folder)
        return [(float(m), float(d)) for m, d in zip(facts["mean_bgr"], facts["deviation_bgr"], strict=True)]
    return []


def _known_facts(folder: str) -> Mapping[str, Any]:
    """`side_facts`; empty without an LMDB, too."""
    with suppress(StagerunError):
        fd, meta = open_file(folder)
        os.close(fd)
        return side_facts(folder, meta)
    return {}


def stored_sides(folder: str) -> list[int]:
    """The shorter sides of the first images, as the side file has them, in pixels; empty where they aren't known."""
    with _odd_side_file_ignored():
        return sorted(map(min, *_arrays(folder, "heights", "widths", most=100)[1]))
    return []


def _arrays(folder: str, *names: str, most: int | None = None) -> tuple[dict[str, Any], list["array[int]"]]:
    """The side file's header, and the first `most` numbers of arrays of int32, or all."""
    found = []
    with _side_file(folder) as stream:
        header, start = _header(stream)
        for name in names:
            first, end = header[name]["data_offsets"]
            stream.seek(start + first)
            found.append(array("i", stream.read(end - first if most is None else min(end - first, 4 * most))))
            if sys.byteorder == "big":
                found[-1].byteswap()
    return header, found


def _checked(fd: int, file: Path) -> Meta:
    state = os.fstat(fd)  # first: what is committed from here on shows in the time
    newest = _newest(fd)
    if newest is None:
        raise DataError(f"{file}: not an LMDB of a 64-bit machine", "make it again, or copy it again")
    page_size, last_page = newest[0], newest[-2]
    needed = (last_page + 1) * page_size
    if state.st_size < needed:
        raise DataError(
            f"{file}: is cut off: {state.st_size} bytes, where its header says {needed}",
            "its copy or its making was interrupted; copy or make it again",
        )
    return Meta(state.st_size, state.st_mtime_ns, *newest)


def ends_of(fd: int, size: int) -> bytes:
    """The first and the last MB of data.mdb, which has so many bytes. Its first two pages change with every commit. OSError."""
    return os.pread(fd, _ENDS, 0) + os.pread(fd, _ENDS, max(0, size - _ENDS))


def transaction_of(fd: int) -> int | None:
    """The newest transaction of the open data.mdb; each commit adds 1. None where it isn't an LMDB. OSError."""
    newest = _newest(fd)
    return None if newest is None else newest[-1]


def _newest(fd: int) -> tuple[int, ...] | None:
    """(page size, flags, depth, entries, root, last page, transaction) of the newer meta page; None if one isn't one."""
    metas: list[tuple[int, ...]] = []
    at = 0
    while len(metas) < 2:
        header = os.pread(fd, _META.size, at)
        if len(header) < _META.size:
            return None
        magic, version, _, _, page, *rest = _META.unpack(header)
        if magic != _MAGIC or version != _VERSION or page not in _PAGE_SIZES:
            return None
        metas.append((page, *rest))
        at = page
    return max(metas, key=lambda meta: meta[-1])


# -- Which images it holds, as a short text that is compared between process lives.

_SAMPLES = 32
_LARGEST_VALUE = 1 << 20  # bytes of a sampled record that are digested, beside its length
DEEPEST = 32  # LMDB's own limit
_ENDS = 1 << 20


def with_sets(schedule: "Schedule", ignored: Callable[["Stage"], int | None]) -> "Schedule":
    """The schedule with what `set_of` says of its LMDBs, as far as they are on this machine (`recipe.Schedule.sets`, and `class_sizes`
    where a stage's sampling depends on them). `ignored`: the label that counts for nothing when a stage is trained."""
    found = {source.path: _set_of_source(schedule, source) for source in schedule.sources}
    sampled = [stage for stage in schedule.stages if stage.solver.sampling.value != "UNIFORM"]
    asked = {s.name: (s.data.train.path, s.model.num_classes, ignored(s)) for s in sampled}
    sizes = {one: _class_sizes(schedule, *one) for one in asked.values()}
    return replace(
        schedule,
        sets={path: text for path, text in found.items() if text},
        class_sizes={name: sizes[one] for name, one in asked.items()},
    )


def _set_of_source(schedule: "Schedule", source: "Source") -> str:
    """`set_of` its LMDB. Of class folders also `folder`, over the names and sizes of their images: that is known before they are imported,
    and afterwards `index`, over every byte, decides."""
    made, text = schedule.imports.get(source.path), set_of(schedule.lmdb(source))
    if made is None:
        return text
    return f"{text or f'{made.images} records'}, folder {made.files[:16]}"


def _class_sizes(schedule: "Schedule", path: str, classes: int, ignored: int | None) -> tuple[int, ...]:
    made = schedule.imports.get(path)
    if made is None:
        return class_sizes(path, classes, ignored)
    counts = tuple(0 if label == ignored else size for label, size in enumerate(made.counts))
    return counts + (0,) * (classes - len(counts)) if not any(counts[classes:]) else ()


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


def first_value(folder: str) -> bytes:
    """The value of the first record, 1 MB of it at most. Errors as of `check_file`."""
    fd, meta = open_file(folder)
    try:
        return _at(fd, meta, 0)[2]
    except (OSError, OverflowError, ValueError, struct.error):
        raise DataError(f"{folder}: its first record can't be read", "make it again, or copy it again") from None
    finally:
        os.close(fd)


def _record(fd: int, meta: Meta, place: float) -> bytes:
    """Digest of the key and value at `place`. Errors as of `_at`."""
    key, length, value = _at(fd, meta, place)
    return hashlib.sha256(b"%d %d " % (len(key), length) + key + value).digest()


def _at(fd: int, meta: Meta, place: float) -> tuple[bytes, int, bytes]:
    """(key, bytes of the value, the value up to _LARGEST_VALUE) at `place`, 0 (the first) to 1 (the last). The pages are as `lmdb_offsets`
    says; struct.error, OSError, OverflowError or ValueError where one is not."""
    number = meta.root
    for level in range(min(meta.depth, DEEPEST)):
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
        return page[at : at + key_size], length, value
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
    """Errors as in `check_file`."""
    fd, meta = open_file(folder, BY_SCHEDULE)
    try:
        with reading(data_file(folder)):
            digest = hashlib.blake2b(ends_of(fd, meta.file_size), digest_size=16)
    finally:
        os.close(fd)
    fingerprint = str(side_facts(folder, meta).get("fingerprint", ""))
    return Glance(records=meta.entries, size=meta.file_size, fingerprint=fingerprint, ends=digest.hexdigest())
