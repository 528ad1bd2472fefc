"""What is in an LMDB (`stagerun data info`), and whether every byte of it is what its side file says (`stagerun data verify`)."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stagerun.base.errors import DataError, StorageError
from stagerun.data import jpeg
from stagerun.data.index import Index, digest_of, fingerprint_of, foreign_record, is_stale, load_unsampled, read
from stagerun.data.indexing import in_order
from stagerun.data.lmdb_offsets import Offsets, offsets_in, printable
from stagerun.data.records import LmdbSource, spread
from stagerun.data.rows import ROW, Rows, decode_any, is_prepared, kinds_of, look, parse
from stagerun.system.lmdb_file import open_file, reading

SAMPLES = 500


@dataclass(frozen=True, slots=True)
class Size:
    width: int
    height: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """`looked_at` is how many records sizes, kinds and mistakes are of; labels and the mean need a side file."""

    path: str
    records: int
    file_size: int
    record_bytes: int
    looked_at: int
    index_state: str  # "up to date", or what is wrong with it
    fingerprint: str  # '' without a side file, as are those below
    classes: tuple[str, ...]
    labels: tuple[tuple[int, int], ...]  # (label, records of it), by label, every class that has a name too
    mean_bgr: tuple[float, ...]
    deviation_bgr: tuple[float, ...]
    smallest: Size | None  # by their number of pixels
    median: Size | None  # of widths, and of heights
    largest: Size | None
    kinds: tuple[tuple[str, int], ...]
    prepared: bool
    mistakes: tuple[str, ...]
    decoders: tuple[jpeg.TierState, ...]


def describe(path: str) -> Description:
    """DataError if the LMDB in folder `path` can't be read; `mistakes` lists the records that can't be."""
    fd, meta = open_file(path)
    try:
        offsets = offsets_in(fd, meta, path)
        index, state = _index(path, fd, offsets)
    finally:
        os.close(fd)
    mistakes: tuple[str, ...] = ()
    if index is not None:
        kinds, prepared = index.facts.kinds, index.facts.restart_interval > 0
        looked_at, sizes = len(index), _sizes(index.heights, index.widths)
    else:
        rows, mistakes = _sample(path) if len(offsets) else (np.empty(0, ROW), ())
        kinds, prepared = kinds_of(rows), is_prepared(rows)
        looked_at, sizes = len(rows) + len(mistakes), _sizes(rows["height"], rows["width"])
    return Description(
        path=path,
        records=len(offsets),
        file_size=offsets.file_size,
        record_bytes=int(offsets.lengths.sum()),
        looked_at=looked_at,
        index_state=state,
        fingerprint=index.facts.fingerprint if index else "",
        classes=index.facts.classes if index else (),
        labels=_labels(index) if index else (),
        mean_bgr=index.facts.mean_bgr if index else (),
        deviation_bgr=index.facts.deviation_bgr if index else (),
        smallest=sizes[0],
        median=sizes[1],
        largest=sizes[2],
        kinds=kinds,
        prepared=prepared,
        mistakes=mistakes,
        decoders=jpeg.tiers(),
    )


def _index(path: str, fd: int, offsets: Offsets) -> tuple[Index | None, str]:
    """The side file if it can be used, and what there is to say about it."""
    try:
        index = read(path)
    except DataError as error:
        return None, error.message
    if index is None:
        return None, f"there is none; `stagerun data index {path}` makes it"
    again = f"`stagerun data index --force {path}` makes it again"
    if is_stale(index, offsets.file_size, offsets.transaction):
        return None, f"of another state of the LMDB; {again}"
    with reading(path):
        foreign = foreign_record(index, fd)
    if foreign is not None:
        return None, f"of another LMDB, or record `{printable(index.key(foreign))}` is damaged; {again}"
    return index, "up to date"


def _sample(path: str) -> tuple[Rows, tuple[str, ...]]:
    """Rows of some records, and what is wrong with others of them."""
    source = LmdbSource(path, side_file=False)
    rows, mistakes = bytearray(), []
    for i in spread(len(source), SAMPLES):
        key, record = source.get(i)
        try:
            datum = parse(record)
            rows += look(datum, False).row(datum.label, 0)
        except DataError as error:
            mistakes.append(f"record `{printable(key)}`: {error.message}")
    return np.frombuffer(bytes(rows), ROW), tuple(mistakes)


def _sizes(heights: NDArray[np.int32], widths: NDArray[np.int32]) -> tuple[Size | None, Size | None, Size | None]:
    """Smallest, median, largest, of those that are known."""
    heights, widths = heights[heights > 0], widths[heights > 0]
    if not len(heights):
        return None, None, None
    area = heights.astype(np.int64) * widths
    small, large, middle = int(area.argmin()), int(area.argmax()), (len(area) - 1) // 2
    return (
        Size(int(widths[small]), int(heights[small])),
        Size(int(np.sort(widths)[middle]), int(np.sort(heights)[middle])),
        Size(int(widths[large]), int(heights[large])),
    )


def _labels(index: Index) -> tuple[tuple[int, int], ...]:
    labels, counts = np.unique(index.labels[index.labels >= 0], return_counts=True)
    found = dict.fromkeys(range(len(index.facts.classes)), 0)
    found.update(zip(labels.tolist(), counts.tolist(), strict=True))
    return tuple(sorted(found.items()))


def schedule_line(path: str, records: int) -> str:
    """What to write under `data` in schedule.prototxt."""
    name = str(Path(path).resolve()).replace("\\", "\\\\").replace('"', '\\"')
    return f'source: "{name}"  images: {records}'


@dataclass(frozen=True, slots=True)
class Verified:
    """`mistakes` is (key, what is wrong with it), in key order; the key is '' for what concerns the LMDB as a whole."""

    records: int
    size: int  # bytes of all records
    digests: bool  # whether there was a side file with them
    decoded: bool
    mistakes: tuple[tuple[str, str], ...]


def verify(
    path: str,
    progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    threads: int = 1,
    decode: bool = False,
) -> Verified:
    """Reads all records of the LMDB in folder `path`, and with `decode` decodes all images.

    DataError if it can't be read at all, or its side file is damaged or of another state of it.
    """
    fd, meta = open_file(path)
    try:
        index, offsets = load_unsampled(path, meta), offsets_in(fd, meta, path)
    finally:
        os.close(fd)
    source = LmdbSource(path, side_file=False)
    total = len(source)
    mistakes = [("", text) for text in _whole(index, offsets)] if index is not None else []
    known = index if index is not None and len(index) == total else None

    def look_at(i: int) -> list[tuple[str, str]]:
        key = printable(source.key(i))
        try:
            _, record = source.get(i)
        except (DataError, StorageError) as error:
            return [(key, error.message)]
        return [(key, text) for text in _record(record, i, known, decode)]

    for done, found in enumerate(in_order(look_at, 0, total, threads), start=1):
        mistakes += found
        progress(done, total)
    return Verified(total, int(offsets.lengths.sum()), index is not None, decode, tuple(mistakes))


def _whole(index: Index, offsets: Offsets) -> list[str]:
    if len(index) != len(offsets):
        return [f"the side file knows {len(index)} records, there are {len(offsets)}"]
    names = {"keys": "keys", "key_ends": "keys", "offsets": "places", "lengths": "lengths"}
    differ = {what for name, what in names.items() if not np.array_equal(getattr(index, name), getattr(offsets, name))}
    found = [f"the side file has other {what} than the records" for what in sorted(differ)]
    if fingerprint_of(index.keys, index.key_ends, index.digests) != index.facts.fingerprint:
        found.append("the side file's fingerprint is not that of its digests")
    return found


def _record(record: bytes, i: int, index: Index | None, decode: bool) -> list[str]:
    if index is not None and digest_of(record) != int(index.digests[i]):
        return ["its bytes are not those that its digest was made of"]
    try:
        datum = parse(record)
        found = look(datum, False)
        if decode and decode_any(datum).shape[:2] != (found.height, found.width):
            return [f"its header says {found.width} x {found.height} pixels, which is not what it decodes to"]
    except DataError as error:
        return [error.message]
    if index is None:
        return []
    if not index.heights[i]:
        return ["it can't be used, says the side file" + ("" if decode else "; --decode says why")]
    said = int(index.labels[i]), int(index.heights[i]), int(index.widths[i])
    if said != (datum.label, found.height, found.width):
        return ["the side file has another label or size than the record"]
    return []
