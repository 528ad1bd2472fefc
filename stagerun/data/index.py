"""The side file of an LMDB: facts about each record, so that nobody needs to walk the LMDB.

    LMDB/data.mdb                       the records, in Caffe's format
    LMDB/stagerun-index.safetensors     this file: arrays with one row per record in key order, and facts as JSON

It carries its digest, and the size and transaction of the data.mdb that it was made from: a damaged side file, or one for another
state of the LMDB, is refused. Two LMDBs made in the same way may be equal in both, so the digests of three records are compared too.
"""

import hashlib
import json
import math
import os
import uuid
from array import array
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load as from_safetensors
from safetensors.numpy import save as to_safetensors

from stagerun.base.errors import DataError, PermissionDenied, StorageError
from stagerun.data import datum, jpeg
from stagerun.data.datum import Fields, Image, picture_of
from stagerun.system.files import hint_for, why, write_whole
from stagerun.system.image_sets import SIDE_FILE
from stagerun.system.lmdb_file import LmdbFile, reading
from stagerun.system.typed import json_object, read_as

if TYPE_CHECKING:
    from stagerun.data.records import LmdbSource

_VERSION = 1
_MADE_AGAIN = "make it again with `stagerun data verify --index {folder}`"

# The arrays of the file. `key_ends` is one longer than the records, `keys` as long as all keys.
_ARRAYS = {
    "offsets": "<i8", "lengths": "<i8", "labels": "<i4", "heights": "<i4", "widths": "<i4", "digests": "<u8", "keys": "u1", "key_ends": "<i8"
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Table:
    """The locations of records in data.mdb, one row each, in key order."""

    offsets: NDArray[np.int64]  # of the value's (the Datum's) first byte
    lengths: NDArray[np.int64]  # of the value, bytes
    keys: NDArray[np.uint8]  # all keys, one after the other
    key_ends: NDArray[np.int64]  # [records + 1]; key i is keys[key_ends[i] : key_ends[i + 1]]

    def __len__(self) -> int:
        return len(self.offsets)

    def key(self, i: int) -> bytes:
        return self.keys[self.key_ends[i] : self.key_ends[i + 1]].tobytes()


def table_of(lmdb: LmdbFile) -> Table:
    """Walk the file's tree. Errors as in `LmdbFile.records`."""
    offsets, lengths, ends, keys = array("q"), array("q"), array("q", [0]), bytearray()
    for offset, length, key in lmdb.records():
        offsets.append(offset)
        lengths.append(length)
        keys += key
        ends.append(len(keys))
    return Table(
        offsets=np.array(offsets, np.int64),
        lengths=np.array(lengths, np.int64),
        keys=np.frombuffer(bytes(keys), np.uint8),
        key_ends=np.array(ends, np.int64),
    )


def printable(key: bytes) -> str:
    """Return a key for a message: bytes that are not UTF-8 are escaped."""
    return key.decode("utf-8", "backslashreplace")


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts about an LMDB as a whole."""

    records: int
    file_size: int  # of data.mdb in bytes, and its newest transaction: another value means that it was changed since
    transaction: int
    fingerprint: str  # sha256 over key_ends, keys and digests, in hex: the same for every LMDB of the same records
    classes: tuple[str, ...] = ()  # names by label; () where unknown
    # Mean of all pixels per channel (B, G, R; or one of grey images); () where unknown.
    mean_bgr: tuple[float, ...] = ()
    # ("baseline JPEG", 1281145), ("PNG", 1) ...: kinds of images, most frequent first.
    kinds: tuple[tuple[str, int], ...] = ()
    deviation_bgr: tuple[float, ...] = ()  # standard deviation of all pixels, as mean_bgr; () in an older side file
    restart_interval: int = 0  # 4 where the JPEGs (99 % of them) are as `prepare` makes them, 0 else
    prepared_from: str = ""  # `image_sets.set_of` the LMDB that `prepare` made this one from: the same pixels


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Index(Table):
    """Facts about each record, and about all of them."""

    facts: Facts
    labels: NDArray[np.int32]  # -1: unreadable
    # Pixels of the image, as stored (EXIF rotation not applied); 0 x 0 of an unusable one.
    heights: NDArray[np.int32]
    widths: NDArray[np.int32]
    digests: NDArray[np.uint64]  # blake2b of 8 bytes, little-endian, over the Datum


def digest_of(record: bytes) -> int:
    """Return the digest of a Datum, as in `Index.digests`."""
    return int.from_bytes(hashlib.blake2b(record, digest_size=8).digest(), "little")


def save(index: Index, folder: str) -> None:
    """Write or replace the side file of the LMDB in `folder`, whole or not at all. StorageError, PermissionDenied."""
    file = Path(folder) / SIDE_FILE
    arrays = {name: np.ascontiguousarray(getattr(index, name), kind) for name, kind in _ARRAYS.items()}
    # One entry of metadata, since safetensors writes several in no order: the same index is the same bytes.
    values = asdict(index.facts)
    if not values["prepared_from"]:  # omitted for the same bytes as before this field existed
        del values["prepared_from"]
    facts = json.dumps({"version": _VERSION, **values})
    partial = file.with_name(f"{file.name}.partial-{uuid.uuid4().hex}")
    try:
        write_whole(file, to_safetensors(arrays, {"stagerun": f"{_digest(facts, arrays)} {facts}"}), aside=partial)
    except PermissionError:
        raise PermissionDenied(f"{folder}: may not be written", "ask the owner of the LMDB to make its index") from None
    except OSError as error:
        raise StorageError(f"{file}: can't be written: {why(error, file.parent)}", hint_for(error)) from None


def load(folder: str, lmdb: LmdbFile | None = None, sampled: bool = True) -> Index | None:
    """Return the side file of the LMDB in `folder`, which may be open already; None if it is missing. `sampled`: compare three records.

    DataError if it is damaged, or was made for another LMDB, or another state of this one. The arrays can't be written to.
    """
    lmdb = lmdb or LmdbFile(folder)
    index = read(folder)
    if index is None:
        return None
    if (lmdb.size, lmdb.meta.transaction) != (index.facts.file_size, index.facts.transaction):
        raise DataError(
            f"{Path(folder) / SIDE_FILE}: belongs to another state of data.mdb: the LMDB was changed after its index was made",
            f"if the change was meant, {_MADE_AGAIN.format(folder=folder)}",
        )
    for i in sorted({0, len(index) // 2, len(index) - 1}) if sampled and len(index) else ():
        at, length = int(index.offsets[i]), int(index.lengths[i])
        with reading(lmdb.file):
            whole = 0 <= at <= at + length <= index.facts.file_size
            same = whole and digest_of(os.pread(lmdb.fd, length, at)) == index.digests[i]
        if not same:
            raise DataError(
                f"{Path(folder) / SIDE_FILE}: record `{printable(index.key(i))}` is not the one that it was made of: "
                "it belongs to another LMDB, or the record is damaged",
                f"copy both files again from where they were made together, or {_MADE_AGAIN.format(folder=folder)}",
            )
    return index


def read(folder: str) -> Index | None:
    """Return the side file whatever the state of data.mdb."""
    file = Path(folder) / SIDE_FILE
    try:
        # Read, not mapped: copying a file over it while it is in use would end the process with a SIGBUS. This takes each worker
        # 106 MB and 0.15 s for ILSVRC12's 1,281,167 records.
        with reading(file), suppress(FileNotFoundError):
            return _parse(file.read_bytes())
        return None
    except ValueError as error:
        raise DataError(f"{file}: is damaged: {error}", _MADE_AGAIN.format(folder=folder)) from None


def _parse(data: bytes) -> Index:
    """ValueError if it is not what `save` writes."""
    size = int.from_bytes(data[:8], "little")
    try:
        stored = from_safetensors(data)
        header: Any = json_object(data[8 : 8 + size])
        digest, _, text = header["__metadata__"]["stagerun"].partition(" ")
        arrays = {name: stored[name] for name in _ARRAYS}
    except (SafetensorError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"its header is malformed: {error}") from None
    values = json_object(text.encode())
    if values.get("version") != _VERSION:
        raise ValueError(f"its version is {values.get('version')}, this stagerun reads {_VERSION}")
    if (
        any((arrays[name].dtype, arrays[name].ndim) != (kind, 1) for name, kind in _ARRAYS.items())
        or _digest(text, arrays) != digest
    ):
        raise ValueError("its bytes differ from the bytes that were written")
    for numbers in arrays.values():
        numbers.flags.writeable = False
    facts = read_as(Facts, values)
    per_record = {len(array) for name, array in arrays.items() if name not in ("keys", "key_ends")}
    if per_record != {facts.records} or len(arrays["key_ends"]) != facts.records + 1:
        raise ValueError("its arrays are not of one length")
    return Index(facts=facts, **arrays)


def _digest(facts: str, arrays: Mapping[str, NDArray[Any]]) -> str:
    digest = hashlib.blake2b(facts.encode(), digest_size=16)
    for name in _ARRAYS:
        digest.update(arrays[name].data)
    return digest.hexdigest()


# -- Records in an import: facts from the header, and, for the mean, sums of pixels.

# A record in an unfinished import; little-endian, without gaps. `channels` is 0 if the pixels weren't decoded.
ROW = np.dtype(
    [
        ("stored", "u1"),  # 0: left out; the rest is 0 then
        ("channels", "u1"),
        ("interval", "<u2"),
        ("label", "<i4"),
        ("height", "<i4"),
        ("width", "<i4"),
        ("digest", "<u8"),
        ("sums", "<u8", (3,)),
        ("squares", "<u8", (3,)),
        ("kind", "S32"),
    ]
)
Rows = NDArray[np.void]

_LARGEST_PREPARED = 7  # MCUs: the divisor of any number that is nearest to 4 is one of 1 .. 7

_NEARLY_ALL = 0.99
UNUSABLE = "unusable"  # a kind of image


@dataclass(frozen=True, slots=True)
class Look:
    """Facts about an image: its kind, size in pixels as stored, and restart interval (JPEG; 0: none).

    `sums` are the sums of B, G and R over all pixels, the same three times for a grey image, `squares` the sums of squares; `channels`
    is 1 or 3, or 0 if it was not decoded.
    """

    kind: str
    height: int
    width: int
    interval: int = 0
    channels: int = 0
    sums: tuple[int, int, int] = (0, 0, 0)
    squares: tuple[int, int, int] = (0, 0, 0)

    def row(self, label: int, digest: int) -> bytes:
        size = label, self.height, self.width
        row = 1, self.channels, self.interval, *size, digest, self.sums, self.squares, self.kind.encode()
        return np.array([row], ROW).tobytes()


LEFT_OUT = np.zeros(1, ROW).tobytes()


def parse(record: bytes) -> Fields:
    """Return the Datum of a record. DataError if it isn't one, holds no image, or has a label below 0 that is not SEVERAL."""
    fields = datum.parse(record)
    if not len(fields.data):
        raise DataError("the Datum holds no image")
    if fields.label < 0 and not fields.several:
        raise DataError(f"the label is {fields.label}, below 0")
    return fields


def look(fields: Fields, pixels: bool, image: Image | None = None) -> Look:
    """Return facts about a Datum's image. `pixels`: decode it for the sums, unless the caller passes `image`.

    DataError for what a loader couldn't use: damaged, cut off, neither JPEG nor PNG.
    """
    # Decoded by OpenCV's tier, which threads may share; all tiers judge alike.
    picture = picture_of(fields, None, jpeg.Decoder)
    facts = Look(picture.kind, picture.height, picture.width, picture.interval)
    if not pixels:
        return facts
    image = picture.decode(None, 1) if image is None else image
    channels = 1 if image.ndim == 2 or image.shape[2] == 1 else 3
    # In double, exact far beyond 100 million pixels.
    sums = [round(value) for value in cv2.sumElems(image)[:channels]]
    squares = [round(cv2.norm(cv2.extractChannel(image, c), cv2.NORM_L2SQR)) for c in range(channels)]
    (b, g, r), (b2, g2, r2) = (values if channels == 3 else values * 3 for values in (sums, squares))
    return replace(facts, channels=channels, sums=(b, g, r), squares=(b2, g2, r2))


# Mean and standard deviation of all pixels, per channel.
Statistics = tuple[tuple[float, ...], tuple[float, ...]]


def index_of(
    source: "LmdbSource",
    rows: Rows,
    classes: tuple[str, ...],
    statistics: Statistics | None = None,
    prepared_from: str = "",
) -> Index:
    """Return the side file's content from rows of the stored records, in key order; compute the statistics unless they are passed."""
    mean_bgr, deviation_bgr = statistics or _statistics(rows)
    kinds = Counter(kind.decode() for kind in rows["kind"].tolist())
    table, digests = source.table, rows["digest"].astype(np.uint64)
    fingerprint = hashlib.sha256(table.key_ends.astype("<i8").tobytes() + table.keys.tobytes())
    fingerprint.update(digests.astype("<u8").tobytes())
    facts = Facts(
        records=len(rows),
        file_size=source.lmdb.size,
        transaction=source.lmdb.meta.transaction,
        fingerprint=fingerprint.hexdigest(),
        classes=classes,
        mean_bgr=mean_bgr,
        deviation_bgr=deviation_bgr,
        kinds=tuple(sorted(kinds.items(), key=lambda kind: (-kind[1], kind[0]))),  # most first
        restart_interval=4 if _is_prepared(rows) else 0,
        prepared_from=prepared_from,
    )
    return Index(
        facts=facts,
        offsets=table.offsets,
        lengths=table.lengths,
        keys=table.keys,
        key_ends=table.key_ends,
        labels=rows["label"].astype(np.int32),
        heights=rows["height"].astype(np.int32),
        widths=rows["width"].astype(np.int32),
        digests=digests,
    )


def _statistics(rows: Rows) -> Statistics:
    rows = rows[rows["kind"] != UNUSABLE.encode()]
    if not len(rows) or not rows["channels"].all():
        return (), ()
    pixels = int((rows["height"].astype(np.int64) * rows["width"]).sum())
    totals = [(int(s), int(q)) for s, q in zip(rows["sums"].sum(axis=0), rows["squares"].sum(axis=0), strict=True)]
    totals = totals if (rows["channels"] == 3).any() else totals[:1]
    # The variance in whole numbers: a difference of two large ones that are nearly equal.
    deviation = tuple(math.sqrt(pixels * q - s * s) / pixels for s, q in totals)
    return tuple(s / pixels for s, _ in totals), deviation


def _is_prepared(rows: Rows) -> bool:
    """Return whether nearly all JPEGs have a short restart interval. `prepare` skips CMYK and some damaged ones."""
    intervals = rows["interval"][np.char.find(rows["kind"], b"JPEG") >= 0]
    short = (intervals > 0) & (intervals <= _LARGEST_PREPARED)
    return len(intervals) > 0 and bool(short.mean() >= _NEARLY_ALL)
