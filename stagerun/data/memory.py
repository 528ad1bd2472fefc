"""Decoded images that stay in memory between epochs: one array for a set whose images are all of one size.

Nothing is decoded for its own sake: a record's pixels are put there when it is first used, so that there is no wait at the
start, and a run that ends early has not decoded what it didn't need.
"""

import numpy as np

from stagerun.data import datum
from stagerun.data.picture import Image, Picture
from stagerun.data.records import Records, Room, spread
from stagerun.errors import DataError
from stagerun.recipe import Cache
from stagerun.system.host import available_memory
from stagerun.text import size as size_text

_AUTO_SHARE = 8  # AUTO takes at most one part of so many of what is free
_LOOKED_AT = 32
_OTHER, _JPEG = 1, 2  # what is kept of a record


class Decoded:
    """`images` is uint8[records, height, width, channels] (B, G, R), `labels` int64[records]; valid where `has` says so.

    A JPEG is kept as it decodes at its full size, and is known as one: for a transform that reduces JPEGs while they are decoded
    (interp_mode AUTO) it is not what is wanted, whichever stage put it here.

    From any number of threads: two that keep the same record write the same bytes, and one is marked as there after it was
    written. The system gives memory to pages that are written, not before.
    """

    def __init__(self, records: int, height: int, width: int, channels: int) -> None:
        self.images = np.empty((records, height, width, channels), np.uint8)
        self.labels = np.empty(records, np.int64)
        self._there = bytearray(records)

    def has(self, i: int, jpegs: bool = True) -> bool:
        """Whether record i is here; without `jpegs` only if it isn't a JPEG."""
        there = self._there[i]
        return there == _OTHER or (jpegs and there == _JPEG)

    def fits(self, picture: Picture) -> bool:
        """Whether the picture is of the size kept here; another is decoded each time."""
        return self.images.shape[1:3] == (picture.height, picture.width)

    def keep(self, i: int, image: Image, label: int, *, jpeg: bool) -> None:
        """Record i, decoded as a whole."""
        self.images[i] = image
        self.labels[i] = label
        self._there[i] = _JPEG if jpeg else _OTHER


def make_memory(records: Records, channels: int, cache: Cache, sharers: int = 1) -> Decoded | None:
    """Room for the decoded images of `records`, or None if they are not to be kept. `sharers`: workers of this node.

    DISK keeps nothing; AUTO where it takes less than an eighth of this worker's share of what is free; MEMORY, and DEVICE, whose
    device is a CPU, in any case: DataError where the images are not of one size, or there isn't enough.
    """
    if cache is Cache.DISK:
        return None
    size, free = _size(records, channels), available_memory() // sharers
    if size is None:
        if cache is Cache.AUTO:
            return None
        raise DataError(
            f"{records.name}: its images are not of one size, which `cache: {cache.value}` needs",
            "set `cache: AUTO` under `data` in schedule.prototxt, or make the LMDB with images of one size",
        )
    needed = len(records) * size[0] * size[1] * channels
    if cache is Cache.AUTO and needed * _AUTO_SHARE > free:
        return None
    if needed > free:
        raise DataError(
            f"{records.name}: decoded it takes {size_text(needed)} of each worker, and {size_text(free)} are free",
            "set `cache: AUTO` under `data` in schedule.prototxt",
        )
    return Decoded(len(records), *size, channels)


def _size(records: Records, channels: int) -> tuple[int, int] | None:
    """(height, width) of all images as far as is known: from the side file, else from some records. None: they differ."""
    if records.index is not None:
        sizes = set(zip(records.index.heights.tolist(), records.index.widths.tolist(), strict=True))
        sizes.discard((0, 0))  # it can't be used; the one who meets it tells, or replaces it
    else:
        room = Room()
        sizes = set()
        for i in spread(len(records), _LOOKED_AT):
            try:
                picture = datum.picture_of(datum.parse(records.read(i, room)), channels)
            except DataError:  # the one who uses the record tells, or replaces it
                continue
            sizes.add((picture.height, picture.width))
    return sizes.pop() if len(sizes) == 1 else None
