"""MXNet's RecordIO of images, as im2rec writes it: FILE.rec, with FILE.lst used where it is beside it.

    uint32 magic | uint32 part << 29 | length | data, filled up to a multiple of 4 bytes              (little-endian)

`part` is 0 for a whole record; a record in which the magic number stands (at a multiple of 4) is cut there into a first
(1), middle (2) and last (3) part, without it (dmlc/dmlc-core: include/dmlc/recordio.h). The data are flag (uint32),
label (float), id and id2 (uint64), then `flag` floats if the flag isn't 0, then the image's file
(apache/mxnet: python/mxnet/recordio.py). The .lst has the names by id.
"""

import os
import struct
from collections.abc import Iterator

import numpy as np

from stagerun.base.errors import DataError
from stagerun.data.importing.items import LARGEST_FILE
from stagerun.tools.data.sources.archive import DAMAGED, LARGEST_LABEL, Archive, Archived, read_text
from stagerun.tools.data.sources.format import Format, Sign, SourceOptions
from stagerun.tools.data.sources.truth import Mistakes, lines

MAGIC = struct.pack("<I", 0xCED7230A)
_PART = struct.Struct("<II")
_IMAGE = struct.Struct("<IfQQ")
_WHOLE, _FIRST, _MIDDLE, _LAST = 0, 1, 2, 3


class RecordIo(Archived):
    """A place is the offset of the record's first part, and the bytes of all its parts."""

    __slots__ = ()

    def read(self, i: int) -> bytes:
        data = _joined(self.archive, *(int(n) for n in self.places[i]))
        flag, *_ = _IMAGE.unpack_from(data)
        return data[_IMAGE.size + 4 * flag :]


def open_recordio(path: str, _: SourceOptions) -> RecordIo:
    """DataError if the file is damaged, or a record has more than one label."""
    archive = Archive(path)
    places, labels, ids = [], [], []
    for at, size, start in _records(archive):
        # In a record of several parts the header may lie across two of them.
        data = start if len(start) >= _IMAGE.size + 4 else _joined(archive, at, size)
        label, number = _label(data, f"{path}: the record at byte {at}")
        places.append((at, size))
        labels.append(label)
        ids.append(number)
    if not places:
        raise DataError(f"{path}: no records in it", DAMAGED)
    stem = path.removesuffix(".rec")
    named = _read_names(stem + ".lst") if os.path.isfile(stem + ".lst") else None
    if named is not None and (strange := [number for number in ids if number not in named]):
        raise DataError(f"{stem}.lst: no line with the index {strange[0]}, which {path} holds", "are they of one set?")
    folder = os.path.basename(stem)
    names = tuple(named[n] if named is not None else f"{folder}/{n:08d}" for n in ids)
    return RecordIo("recordio", (), archive, names, np.array(labels, np.int32), np.array(places, np.int64))


def _records(archive: Archive) -> Iterator[tuple[int, int, bytes]]:
    """(offset, bytes of all parts, the first bytes of the data) of each record."""
    at = 0
    while at < archive.size:
        first = at
        start = b""
        while True:
            part, length, head = _part(archive, at)
            if part not in ((_WHOLE, _FIRST) if at == first else (_MIDDLE, _LAST)):
                raise DataError(f"{archive.path}: the parts at byte {at} don't make up a record", DAMAGED)
            if at == first:
                start = head
            at += _PART.size + (length + 3) // 4 * 4
            if part in (_WHOLE, _LAST):
                break
            if at - first > LARGEST_FILE:
                raise DataError(f"{archive.path}: the record at byte {first} is too large for an image's", DAMAGED)
        yield first, at - first, start


def _part(archive: Archive, at: int) -> tuple[int, int, bytes]:
    """(which part, its length, the first bytes of its data). One pread."""
    ahead = min(_PART.size + _IMAGE.size + 4, archive.size - at)
    data = archive.read(at, max(ahead, _PART.size), f"the record at byte {at}")
    _, word = _PART.unpack_from(data)
    if data[:4] != MAGIC:
        raise DataError(f"{archive.path}: no record at byte {at}: the magic number is missing", DAMAGED)
    length = word & 0x1FFFFFFF
    end = at + _PART.size + (length + 3) // 4 * 4
    if end > archive.size:
        raise DataError(
            f"{archive.path}: the record at byte {at} goes to {end}, but the file ends at {archive.size}", DAMAGED
        )
    return word >> 29, length, data[_PART.size : _PART.size + length]


def _joined(archive: Archive, at: int, size: int) -> bytes:
    """A record's data: its parts, with the magic number between them that was taken out."""
    data = archive.read(at, size)
    parts = []
    place = 0
    while place + _PART.size <= size:
        length = _PART.unpack_from(data, place)[1] & 0x1FFFFFFF
        parts.append(data[place + _PART.size : place + _PART.size + length])
        place += _PART.size + (length + 3) // 4 * 4
    return MAGIC.join(parts)


def _label(data: bytes, place: str) -> tuple[int, int]:
    """(label, id)."""
    if len(data) < _IMAGE.size:
        raise DataError(f"{place} is too short for an image's", "is it a RecordIO of images?")
    flag, label, number, _ = _IMAGE.unpack_from(data)
    if flag == 1 and len(data) >= _IMAGE.size + 4:
        (label,) = struct.unpack_from("<f", data, _IMAGE.size)
    elif flag:
        raise DataError(f"{place} has {flag} labels", "images with one label are read")
    if not (0 <= label <= LARGEST_LABEL and label == int(label)):  # NaN fails the first
        raise DataError(f"{place} has the label {label:g}", "labels are 0, 1, 2, ...")
    return int(label), number


def _read_names(path: str) -> dict[int, str]:
    """id -> relative path, of `id label ... path` lines between tabs."""
    mistakes = Mistakes(path)
    names: dict[int, str] = {}
    for number, line in lines(read_text(path)):
        words = line.split("\t")
        if len(words) < 3 or not words[0].isascii() or not words[0].isdigit() or not words[-1].strip():
            mistakes.add(number, line, 0, "not a line of a .lst", "`id label path`, with tabs between")
        else:
            names[int(words[0])] = words[-1].strip()
    mistakes.stop()
    return names


FORMAT = Format(
    name="recordio",
    about="MXNet's .rec",
    open=open_recordio,
    file=Sign("a .rec", lambda place: place.start.startswith(MAGIC)),
)
