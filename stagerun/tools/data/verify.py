"""Every byte of an LMDB against what its side file says."""

import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from stagerun.data.index import Index, digest_of, fingerprint_of, load_unsampled
from stagerun.data.lmdb_offsets import Offsets, offsets_in
from stagerun.data.lmdb_source import LmdbSource
from stagerun.data.parallel import in_order
from stagerun.data.records import printable
from stagerun.data.rows import decode_any, look, parse
from stagerun.errors import DataError, StorageError
from stagerun.lmdb_file import open_file


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
        return ["it can't be used, says the side file" + ("" if decode else "; --decode tells why")]
    said = int(index.labels[i]), int(index.heights[i]), int(index.widths[i])
    if said != (datum.label, found.height, found.width):
        return ["the side file has another label or size than the record"]
    return []
