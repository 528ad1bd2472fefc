"""What the side file knows about one record: read from its header, and, where the mean is wanted, from its pixels."""

import hashlib
import math
from collections import Counter
from dataclasses import dataclass, replace

import cv2
import numpy as np
from numpy.typing import NDArray

from stagerun.base.errors import DataError
from stagerun.data import datum, jpeg
from stagerun.data.datum import Fields, Image, picture_of
from stagerun.data.index import Facts, Index
from stagerun.data.records import LmdbSource

# One record as an unfinished import keeps it; little-endian, without gaps. `channels` is 0 where the pixels weren't looked at.
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
UNUSABLE = "unusable"  # the kind of an image that can't be used


@dataclass(frozen=True, slots=True)
class Look:
    """How an image is stored: its kind in words, size in pixels as stored, and restart interval (JPEG; 0: none).

    `sums` are those of B, G and R over all pixels, three times the same for a grey image, `squares` those of their squares; `channels`
    is how many there really are, 1 or 3, or 0 where it was not decoded.
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
    """The Datum of a record. DataError without a place if it isn't one, holds no image, or has a label below 0 that is not SEVERAL."""
    fields = datum.parse(record)
    if not len(fields.data):
        raise DataError("the Datum holds no image")
    if fields.label < 0 and not fields.several:
        raise DataError(f"the label is {fields.label}, below 0")
    return fields


def look(fields: Fields, pixels: bool, image: Image | None = None) -> Look:
    """What there is to know about a Datum's image. With `pixels` it is decoded, unless the caller has done so: `image`.

    DataError without a place for what a loader couldn't use: damaged, cut off, neither JPEG nor PNG.
    """
    # As a loader decodes it, but by the one tier that needs no decoder of each thread's own; all judge alike.
    picture = picture_of(fields, None, jpeg.Decoder)
    found = Look(picture.kind, picture.height, picture.width, picture.interval)
    if not pixels:
        return found
    image = picture.decode() if image is None else image
    channels = 1 if image.ndim == 2 or image.shape[2] == 1 else 3
    # In double, exact far beyond 100 million pixels.
    sums = [round(value) for value in cv2.sumElems(image)[:channels]]
    squares = [round(cv2.norm(cv2.extractChannel(image, c), cv2.NORM_L2SQR)) for c in range(channels)]
    (b, g, r), (b2, g2, r2) = (values if channels == 3 else values * 3 for values in (sums, squares))
    return replace(found, channels=channels, sums=(b, g, r), squares=(b2, g2, r2))


# Mean and standard deviation of all pixels, per channel.
Statistics = tuple[tuple[float, ...], tuple[float, ...]]


def index_of(
    source: LmdbSource, rows: Rows, classes: tuple[str, ...], known: Statistics | None = None, prepared_from: str = ""
) -> Index:
    """The side file's content: rows of the stored records, in key order. `known`: the statistics, where they need not be computed."""
    mean_bgr, deviation_bgr = known or _statistics(rows)
    kinds = Counter(kind.decode() for kind in rows["kind"].tolist())
    places, digests = source.table, rows["digest"].astype(np.uint64)
    fingerprint = hashlib.sha256(places.key_ends.astype("<i8").tobytes() + places.keys.tobytes())
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
        offsets=places.offsets,
        lengths=places.lengths,
        keys=places.keys,
        key_ends=places.key_ends,
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
    """Whether nearly all JPEGs have a short restart interval. `prepare` can't do CMYK, and some that are damaged."""
    is_jpeg = np.array([b"JPEG" in kind for kind in rows["kind"].tolist()], bool)
    intervals = rows["interval"][is_jpeg]
    short = (intervals > 0) & (intervals <= _LARGEST_PREPARED)
    return len(intervals) > 0 and bool(short.mean() >= _NEARLY_ALL)
