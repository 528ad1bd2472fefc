"""Decoded images that stay in memory between epochs: one array for a set whose images are all of one size.

Nothing is decoded for its own sake: a record's pixels are put there when it is first used, so that there is no wait at the
start, and a run that ends early has not decoded what it didn't need.
"""

import os
from pathlib import Path

import numpy as np

from stagerun.data import datum
from stagerun.data.picture import Image, Picture
from stagerun.data.records import Records, Room, spread
from stagerun.errors import DataError
from stagerun.recipe import Cache
from stagerun.text import size as size_text

_AUTO_SHARE = 8  # AUTO takes at most one part of so many of what is free
_LOOKED_AT = 32
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


class Decoded:
    """`images` is uint8[records, height, width, channels] (B, G, R), `labels` int64[records]; valid where `has` says so.

    From any number of threads: two that keep the same record write the same bytes, and one is marked as there after it was
    written. The system gives memory to pages that are written, not before.
    """

    def __init__(self, records: int, height: int, width: int, channels: int) -> None:
        self.images = np.empty((records, height, width, channels), np.uint8)
        self.labels = np.empty(records, np.int64)
        self._there = bytearray(records)

    def has(self, i: int) -> bool:
        return self._there[i] != 0

    def fits(self, picture: Picture) -> bool:
        """Whether the picture is of the size kept here; another is decoded each time."""
        return self.images.shape[1:3] == (picture.height, picture.width)

    def keep(self, i: int, image: Image, label: int) -> None:
        """Record i, decoded."""
        self.images[i] = image
        self.labels[i] = label
        self._there[i] = 1


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


def available_memory() -> int:
    """Bytes that this process may still take without swapping: of the machine, and of its control group where that has a limit."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in _lines(_MEMINFO):
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    limit, used = (_lines(_CGROUP / name)[:1] for name in ("memory.max", "memory.current"))
    if limit and used and limit[0].isdigit() and used[0].isdigit():
        free = min(free, max(0, int(limit[0]) - int(used[0])))
    return free


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:  # an old kernel or another control group version: there is nothing to know
        return []


def _size(records: Records, channels: int) -> tuple[int, int] | None:
    """(height, width) of all images as far as is known: from the side file, else from some records. None: they differ."""
    if records.index is not None:
        sizes = set(zip(records.index.heights.tolist(), records.index.widths.tolist(), strict=True))
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
