"""Finished images of records, with errors that name the LMDB and the key; and the decoded images that stay in memory."""

import threading
from dataclasses import dataclass

import numpy as np

from stagerun.base.errors import DataError
from stagerun.base.recipe import Cache, InterpMode, Transform
from stagerun.base.text import size as size_text
from stagerun.data import datum, jpeg, pixels
from stagerun.data.datum import Image, Picture, decoded
from stagerun.data.index import printable
from stagerun.data.jpeg import Rectangle
from stagerun.data.pixels import Draw
from stagerun.data.records import Records, Room, spread
from stagerun.data.weights import mean_image
from stagerun.system.host import available_memory

# -- Decoded images that stay in memory between epochs: one array for a set whose images have one size. A record's pixels are stored when
# it is first used, so that training starts at once.

_AUTO_SHARE = 8  # AUTO takes at most one part of so many of what is free
_LOOKED_AT = 32
_OTHER, _JPEG = 1, 2


class Decoded:
    """`images` is uint8[records, height, width, channels] (B, G, R), `labels` int64[records]; valid for records that it `has`.

    A JPEG is kept at its full size, and marked: a transform that reduces JPEGs while decoding (interp_mode AUTO) can't use it.

    From any number of threads: two that keep the same record write the same bytes, and a record is marked after it was written. The
    system allocates pages when they are written.
    """

    def __init__(self, records: int, height: int, width: int, channels: int) -> None:
        self.images = np.empty((records, height, width, channels), np.uint8)
        self.labels = np.empty(records, np.int64)
        self._state = bytearray(records)

    def has(self, i: int, jpegs: bool = True) -> bool:
        """Return whether record i is kept; without `jpegs` only if it isn't a JPEG."""
        state = self._state[i]
        return state == _OTHER or (jpegs and state == _JPEG)

    def fits(self, picture: Picture) -> bool:
        """Return whether the picture has the size of this array; others are decoded each time."""
        return self.images.shape[1:3] == (picture.height, picture.width)

    def keep(self, i: int, image: Image, label: int, *, jpeg: bool) -> None:
        """Keep record i, decoded as a whole."""
        self.images[i] = image
        self.labels[i] = label
        self._state[i] = _JPEG if jpeg else _OTHER


def make_memory(records: Records, channels: int, cache: Cache, sharers: int = 1) -> Decoded | None:
    """Return room for the decoded images of `records`, or None. `sharers`: workers of this node.

    DISK keeps nothing; AUTO keeps them if they take less than an eighth of this worker's share of the free memory; MEMORY, and DEVICE on a
    CPU, in any case: DataError if sizes differ, or without enough memory.
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
    """Return (height, width) of all images, from the side file, else from some records. None: they differ."""
    if records.index is not None:
        sizes = set(zip(records.index.heights.tolist(), records.index.widths.tolist(), strict=True))
        sizes.discard((0, 0))  # an unusable image, which its user reports
    else:
        room = Room()
        sizes = set()
        for i in spread(len(records), _LOOKED_AT):
            try:
                picture = datum.picture_of(datum.parse(records.read(i, room)), channels)
            except DataError:  # its user reports it
                continue
            sizes.add((picture.height, picture.width))
    return sizes.pop() if len(sizes) == 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkInput:
    """A network's demands on records. `numbered`: the record's number replaces its label. `ignored`: a label without a class that the loss
    ignores."""

    channels: int
    num_classes: int
    numbered: bool = False
    ignored: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderOptions:
    """Options that change no batch. A stream keeps `depth` batches ready, 1 or more (more of batches smaller than 16 images per thread),
    made by `threads` threads. `memory` keeps pixels between epochs. `tier` selects a decoder."""

    threads: int = 1
    depth: int = 4
    memory: Decoded | None = None
    tier: str | None = None


class _Hand(threading.local):
    """Buffers and decoder of each thread."""

    def __init__(self, tier: str | None) -> None:
        self.room = Room()
        self._tier = tier
        self._decoder: jpeg.Decoder | None = None

    def decoder(self) -> jpeg.Decoder:
        if self._decoder is None:
            self._decoder = jpeg.make_decoder(self._tier)
        return self._decoder


class Pictures:
    """The records of one LMDB under one transform. From any number of threads; a thread's picture is valid until its next.

    DataError for a record without a usable picture or label, StorageError if it can't be read.
    """

    def __init__(self, records: Records, param: Transform, network: NetworkInput, options: LoaderOptions) -> None:
        self._records, self._param, self._network, self._memory = records, param, network, options.memory
        # A JPEG decoded at a reduced scale by AUTO has other pixels than one reduced from its full size: this transform neither puts JPEGs
        # into memory, nor uses another stage's. A user's function (`python`) gets whole images.
        geometries = (param.random_resize, param.random_aspect_ratio, param.random_resized_crop)
        reduces = any(geometry and geometry.interp_mode is InterpMode.AUTO for geometry in geometries)
        self._keeps_jpegs = not reduces or param.python is not None
        self._hand = _Hand(options.tier)
        mean = mean_image(param, network.channels)
        self._size = mean.shape[:2] if mean is not None else None

    def expect(self, indices: list[int]) -> None:
        """Prepare for using these records soon."""
        memory = self._memory
        if memory is not None:
            indices = [i for i in indices if not memory.has(i, self._keeps_jpegs)]
        self._records.expect(indices)

    def open(self, i: int) -> tuple[Picture, int]:
        """Return record i's picture, decoded only if it is in memory, and its label."""
        memory, network = self._memory, self._network
        if memory is not None and memory.has(i, self._keeps_jpegs):
            label = i if network.numbered else int(memory.labels[i])
            if not network.numbered and label != network.ignored:  # the stage that put it here may have ignored it
                self._check(i, label)
            return decoded(memory.images[i]), label
        record = self._records.read(i, self._hand.room)
        try:
            fields = datum.parse(record)
            picture = datum.picture_of(fields, network.channels, self._hand.decoder)
        except DataError as error:
            raise self._placed(i, error) from None
        label = i if network.numbered else fields.label
        # An ignored label may be -1, which also marks several labels.
        if not network.numbered and (label != network.ignored or (fields.several and fields.floats)):
            self._check(i, label, fields.several)
        if memory is not None and memory.fits(picture) and (self._keeps_jpegs or not picture.reducible):
            image = self.decode(i, picture)
            memory.keep(i, image, label, jpeg=picture.reducible)
            picture = decoded(image)
        return picture, label

    def require_mean(self, picture: Picture) -> None:
        """Raise DataError if the transform's mean image has another size."""
        if self._size is not None and self._size != (picture.height, picture.width):
            raise DataError(
                f"the record is {picture.height} x {picture.width}, and `mean_file` {self._size[0]} x {self._size[1]}",
                "a mean image is for records of its size: write `mean_value` for others",
            )

    def finish(self, i: int, picture: Picture, draw: Draw, out: Image | None = None) -> Image:
        """Return the finished image, in `out` if it is passed, as `pixels.finish`."""
        shrunk = pixels.shrink(draw, picture.height, picture.width) if picture.reducible else 1
        return pixels.finish(self.decode(i, picture, pixels.region(draw), shrunk), draw, out, shrunk)

    def name(self, i: int) -> str:
        """Return record i's name for messages."""
        return f"{self._records.name}: record `{printable(self._records.key(i))}`"

    def _placed(self, i: int, error: DataError) -> DataError:
        return DataError(f"{self.name(i)}: {error.message}", error.hint)

    def _check(self, i: int, label: int, several: bool = False) -> None:
        """Raise DataError for a label that training can't use."""
        classes = self._network.num_classes
        if several:
            text = "the label is -1, below 0, or the Datum has several labels, or none, in float_data"
            hint = 'one label alone counts from 0; for several write `labels: "float_data"` next to `source`'
        elif label < 0:
            text, hint = (
                f"the label is {label}, below 0",
                "labels count from 0; make the LMDB again with labels that do",
            )
        elif label >= classes:
            text = f"the label is {label}, but num_classes is {classes}: labels go from 0 to {classes - 1}"
            hint = "change `num_classes` of the network, or make the LMDB with labels that count from 0"
        else:
            return
        raise self._placed(i, DataError(text, hint))

    def decode(self, i: int, picture: Picture, part: Rectangle | None = None, shrunk: int = 1) -> Image:
        """Decode record i's picture, by default the whole at its full size."""
        try:
            return picture.decode(part, shrunk)
        except DataError as error:
            raise self._placed(i, error) from None


def finished_size(draw: Draw, picture: Picture) -> tuple[int, int]:
    """Return (height, width) of the finished image."""
    if draw.crop is not None:
        return draw.crop.height, draw.crop.width
    return draw.size or (picture.height + 2 * draw.pad, picture.width + 2 * draw.pad)
