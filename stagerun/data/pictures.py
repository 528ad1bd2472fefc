"""Record numbers -> pictures -> finished images, with errors that name the LMDB and the key."""

import threading

from stagerun.data import datum, jpeg, transform
from stagerun.data.bad_records import Undecodable
from stagerun.data.memory import Decoded
from stagerun.data.picture import Image, OtherChannels, Picture, decoded_picture
from stagerun.data.records import Records, Room, printable
from stagerun.data.rectangle import Rectangle
from stagerun.data.transform import Draw
from stagerun.errors import DataError
from stagerun.order import UInt64
from stagerun.recipe import InterpMode, Transform


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


class Pictures:
    """The records of one LMDB under one transform. From any number of threads; a thread's picture is valid until its next.

    Undecodable for a record whose bytes give no picture, DataError for one that isn't what recipe or transform need,
    StorageError where it can't be read.
    """

    def __init__(
        self,
        records: Records,
        transform_param: Transform,
        channels: int,
        num_classes: int,
        memory: Decoded | None = None,
        tier: str | None = None,
    ) -> None:
        self.records, self.channels = records, channels
        self._transform, self._num_classes = transform_param, num_classes
        self._memory = memory
        # A JPEG that AUTO decodes at a reduced scale has other pixels than one that is reduced from its full size. So this
        # transform neither puts JPEGs into memory, nor takes those that another stage's has put there: a run that goes on
        # after that stage finds none.
        self._keeps_jpegs = InterpMode.AUTO not in _interp_modes(transform_param)
        self._hand = _Hand(tier)

    def expect(self, indices: list[int]) -> None:
        """These records will be used soon."""
        memory = self._memory
        self.records.expect(indices if memory is None else [i for i in indices if not memory.has(i, self._keeps_jpegs)])

    def open(self, i: int) -> tuple[Picture, int]:
        """Record i's picture, its pixels not yet decoded unless they are in memory, and its label."""
        memory = self._memory
        if memory is not None and memory.has(i, self._keeps_jpegs):
            return decoded_picture(memory.images[i]), int(memory.labels[i])
        record = self.records.read(i, self._hand.room)
        try:
            fields = datum.parse(record)
            picture = datum.picture_of(fields, self.channels, self._hand.decoder)
        except OtherChannels as error:
            raise DataError(f"{self.place(i)}: {error.message}", error.hint) from None
        except DataError as error:
            raise Undecodable(f"{self.place(i)}: {error.message}", error.hint) from None
        try:
            datum.check_label(fields.label, self._num_classes)
        except DataError as error:
            raise DataError(f"{self.place(i)}: {error.message}", error.hint) from None
        if memory is not None and memory.fits(picture) and (self._keeps_jpegs or not picture.reducible):
            image = self._decode(i, picture, None, 1)
            memory.keep(i, image, fields.label, jpeg=picture.reducible)
            picture = decoded_picture(image)
        return picture, fields.label

    def draw(self, i: int, picture: Picture, numbers: UInt64 | None, param: Transform | None = None) -> Draw:
        """What is done to record i's picture; `transform.draw`. `param` is the transform with another crop_size."""
        try:
            return transform.draw(param or self._transform, numbers, picture.height, picture.width)
        except DataError as error:
            raise DataError(f"{self.place(i)}: {error.message}", error.hint) from None

    def finish(self, i: int, picture: Picture, draw: Draw, out: Image | None = None) -> Image:
        """The finished image, in `out` where that is given; `transform.finish`."""
        shrunk = transform.shrink(draw, picture.height, picture.width) if picture.reducible else 1
        return transform.finish(self._decode(i, picture, transform.region(draw), shrunk), draw, out, shrunk)

    def place(self, i: int) -> str:
        """Record i, as a message names it."""
        return f"{self.records.name}: record `{printable(self.records.key(i))}`"

    def _decode(self, i: int, picture: Picture, part: Rectangle | None, shrunk: int) -> Image:
        try:
            return picture.decode(part, shrunk)
        except DataError as error:
            raise Undecodable(f"{self.place(i)}: {error.message}", error.hint) from None


def finished_size(draw: Draw, picture: Picture) -> tuple[int, int]:
    """(height, width) of what the draw makes of the picture."""
    if draw.crop is not None:
        return draw.crop.height, draw.crop.width
    return draw.size or (picture.height + 2 * draw.pad, picture.width + 2 * draw.pad)


def _interp_modes(param: Transform) -> set[InterpMode]:
    geometries = (param.random_resize, param.random_aspect_ratio, param.random_resized_crop)
    return {geometry.interp_mode for geometry in geometries if geometry is not None}
