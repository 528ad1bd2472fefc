"""Record numbers -> pictures -> finished images, with errors that name the LMDB and the key; and the decoded images that stay in memory."""

import threading
from dataclasses import dataclass

import numpy as np

from stagerun.base.errors import DataError
from stagerun.base.recipe import Cache, InterpMode, Transform
from stagerun.base.text import size as size_text
from stagerun.data import datum, jpeg, pixels
from stagerun.data.datum import DecodedPicture, Image, Picture, wrong_label
from stagerun.data.index import printable
from stagerun.data.jpeg import Rectangle
from stagerun.data.pixels import Draw
from stagerun.data.records import Records, Room, spread
from stagerun.data.weights import mean_image
from stagerun.system.host import available_memory

# -- Decoded images that stay in memory between epochs: one array for a set whose images are all of one size. Nothing is decoded for
# its own sake: a record's pixels are put there when it is first used, so that there is no wait at the start.

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
        sizes.discard((0, 0))  # it can't be used; the one who meets it reports or replaces it
    else:
        room = Room()
        sizes = set()
        for i in spread(len(records), _LOOKED_AT):
            try:
                picture = datum.picture_of(datum.parse(records.read(i, room)), channels)
            except DataError:  # the one who uses the record reports or replaces it
                continue
            sizes.add((picture.height, picture.width))
    return sizes.pop() if len(sizes) == 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkInput:
    """What a network takes of the records. `numbered`: a record's number stands for its label, and what it says itself isn't looked at.
    `ignored`: a label that counts for nothing, and need be no class. `by_some`: labels that only part of a net ignores."""

    channels: int
    num_classes: int
    numbered: bool = False
    ignored: int | None = None
    by_some: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderOptions:
    """How batches are made; nothing of it changes one. `depth` is how many batches a stream may hold ready, 1 or more (of batches smaller
    than 16 images per thread more), `threads` how many make them. `memory` keeps pixels between epochs. `tier` forces a way of decoding."""

    threads: int = 1
    depth: int = 4
    memory: Decoded | None = None
    tier: str | None = None


class _Hand(threading.local):
    """What each thread has of its own."""

    def __init__(self, tier: str | None) -> None:
        self.room = Room()
        self._tier = tier
        self._decoder: jpeg.Decoder | None = None

    def decoder(self) -> jpeg.Decoder:
        if self._decoder is None:
            self._decoder = jpeg.make_decoder(self._tier)
        return self._decoder


_MINUS_ONE = "the label is -1, below 0, or the Datum has"  # which `data import` writes then
_BY_SOME = (
    "only part of the net ignores it: a `loss` of the stage's own knows no `ignore_label`, and each SoftmaxWithLoss and Accuracy "
    "needs its own; make the LMDB without such images, or have all of them ignore it"
)


class Pictures:
    """The records of one LMDB under one transform. From any number of threads; a thread's picture is valid until its next.

    DataError for a record whose bytes give no picture, or that isn't what recipe or transform need,
    StorageError where it can't be read.
    """

    def __init__(self, records: Records, param: Transform, network: NetworkInput, options: LoaderOptions) -> None:
        self._records, self._param, self._network, self._memory = records, param, network, options.memory
        # A JPEG that AUTO decodes at a reduced scale has other pixels than one that is reduced from its full size: this transform neither
        # puts JPEGs into memory, nor takes another stage's. A function of the user's (`python`) gets whole images.
        geometries = (param.random_resize, param.random_aspect_ratio, param.random_resized_crop)
        reduces = any(geometry and geometry.interp_mode is InterpMode.AUTO for geometry in geometries)
        self._keeps_jpegs = not reduces or param.python is not None
        self._hand = _Hand(options.tier)
        mean = mean_image(param, network.channels)
        self._size = mean.shape[:2] if mean is not None else None

    def expect(self, indices: list[int]) -> None:
        """These records will be used soon."""
        memory = self._memory
        if memory is not None:
            indices = [i for i in indices if not memory.has(i, self._keeps_jpegs)]
        self._records.expect(indices)

    def open(self, i: int) -> tuple[Picture, int]:
        """Record i's picture, its pixels not yet decoded unless they are in memory, and its label."""
        memory, network = self._memory, self._network
        if memory is not None and memory.has(i, self._keeps_jpegs):
            label = i if network.numbered else int(memory.labels[i])
            if not network.numbered and label != network.ignored:  # the stage that put it here may have ignored it
                self._check(i, label)
            return DecodedPicture(memory.images[i]), label
        record = self._records.read(i, self._hand.room)
        try:
            fields = datum.parse(record)
            picture: Picture = datum.picture_of(fields, network.channels, self._hand.decoder)
        except DataError as error:
            raise self._placed(i, error) from None
        label = i if network.numbered else fields.label
        # An ignored label may be -1, by which a Datum says that it has several.
        if not network.numbered and (label != network.ignored or (fields.several and fields.floats)):
            self._check(i, label, ("the Datum has" if fields.floats else _MINUS_ONE) if fields.several else "")
        if memory is not None and memory.fits(picture) and (self._keeps_jpegs or not picture.reducible):
            image = self.decode(i, picture)
            memory.keep(i, image, label, jpeg=picture.reducible)
            picture = DecodedPicture(image)
        return picture, label

    def require_mean(self, picture: Picture) -> None:
        """DataError, without a place, where the transform's mean image is of another size."""
        if self._size not in (None, (picture.height, picture.width)):
            assert self._size is not None
            raise DataError(
                f"the record is {picture.height} x {picture.width}, and `mean_file` {self._size[0]} x {self._size[1]}",
                "a mean image is for records of its size: write `mean_value` for others",
            )

    def finish(self, i: int, picture: Picture, draw: Draw, out: Image | None = None) -> Image:
        """The finished image, in `out` where that is given; `pixels.finish`."""
        shrunk = pixels.shrink(draw, picture.height, picture.width) if picture.reducible else 1
        return pixels.finish(self.decode(i, picture, pixels.region(draw), shrunk), draw, out, shrunk)

    def place(self, i: int) -> str:
        """Record i, as a message names it."""
        return f"{self._records.name}: record `{printable(self._records.key(i))}`"

    def _placed(self, i: int, error: DataError) -> DataError:
        return DataError(f"{self.place(i)}: {error.message}", error.hint)

    def _check(self, i: int, label: int, several: str = "") -> None:
        """DataError for a label that training can't take. `several`: what has several, or none."""
        error = wrong_label(label, self._network.num_classes)
        if several:
            error = DataError(
                f"{several} several labels, or none, in float_data",
                'one label alone counts from 0; for several write `labels: "float_data"` beside `source`',
            )
        if error is not None and label in self._network.by_some:
            error = DataError(error.message, _BY_SOME)
        if error is not None:
            raise self._placed(i, error)

    def decode(self, i: int, picture: Picture, part: Rectangle | None = None, shrunk: int = 1) -> Image:
        """Record i's picture, by default the whole at its full size."""
        try:
            return picture.decode(part, shrunk)
        except DataError as error:
            raise self._placed(i, error) from None


def finished_size(draw: Draw, picture: Picture) -> tuple[int, int]:
    """(height, width) of what the draw makes of the picture."""
    if draw.crop is not None:
        return draw.crop.height, draw.crop.width
    return draw.size or (picture.height + 2 * draw.pad, picture.width + 2 * draw.pad)
