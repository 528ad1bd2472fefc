"""One record: the bytes of a Caffe Datum -> its fields -> a picture whose size is known before its pixels: raw planes, JPEG, or PNG.

A JPEG is decoded no further than the part that is wanted reaches, and at a reduced scale where that is asked for. Errors are
DataErrors without a place; the loader puts the LMDB and the key in front.
"""

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import cv2
import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from stagerun.base.errors import DataError
from stagerun.base.text import count
from stagerun.data import jpeg
from stagerun.data.headers import family, png_chunks, read_png
from stagerun.data.jpeg import Rectangle, make_decoder
from stagerun.data.jpeg.decoder import imdecode
from stagerun.language.proto import caffe_pb2

Image = NDArray[np.uint8]
# Called when the first JPEG is met: to load and try the fastest decoder takes half a second, which raw images don't need.
MakeDecoder: TypeAlias = Callable[[], jpeg.Decoder]


class Picture(Protocol):
    """`height` and `width` in pixels. `reducible`: whether `decode` takes a `shrink` other than 1."""

    height: int
    width: int
    reducible: bool

    def decode(self, part: Rectangle | None = None, shrink: int = 1) -> Image:
        """uint8[height, width, channels] in the order B, G, R of `part` (None: the whole), at 1 / shrink of its size.

        A part at 1 / shrink is the pixels that `jpeg.Decoder.decode` says. Valid until the decoder's next picture, or
        until the record's memory is used again. DataError if the file is damaged.
        """
        ...


class StoredPicture(Picture, Protocol):
    """A record's. `kind` says how it is stored, in words; `interval` is the restart interval of a JPEG, 0 without one."""

    kind: str
    interval: int


class DecodedPicture:
    """A picture that is decoded already."""

    reducible = False

    def __init__(self, image: Image) -> None:
        self._image = image
        self.height, self.width = image.shape[:2]

    def decode(self, part: Rectangle | None = None, shrink: int = 1) -> Image:
        return self._image if part is None else cut(self._image, part)


class _Planes:
    """Raw bytes, one colour after the other: uint8[channels, height, width]."""

    kind, interval, reducible = "raw", 0, False

    def __init__(self, planes: NDArray[np.uint8]) -> None:
        self._planes = planes
        self.height, self.width = planes.shape[1:]

    def decode(self, part: Rectangle | None = None, shrink: int = 1) -> Image:
        planes = [plane if part is None else cut(plane, part) for plane in self._planes]
        # cv2.merge interleaves ten times faster than numpy copies a transposed array.
        return planes[0][:, :, None] if len(planes) == 1 else np.asarray(cv2.merge(planes), np.uint8)


class _Jpeg:
    reducible = True

    def __init__(self, data: memoryview, channels: int | None, decoder: MakeDecoder) -> None:
        if not jpeg.is_complete(data):
            raise _cut_off("JPEG")
        self._header = header = jpeg.read_header(data)
        own = 1 if header.components == 1 else 3  # CMYK is decoded to three as well
        self._data, self._channels = data, _channels(own, channels)
        self.height, self.width = header.height, header.width
        self.kind, self.interval = header.kind, header.restart_interval
        self._decoder = decoder()

    def decode(self, part: Rectangle | None = None, shrink: int = 1) -> Image:
        return self._decoder.decode(self._data, self._header, self._channels, part, shrink)


class _Png:
    """It is decoded as a whole."""

    interval, reducible = 0, False

    def __init__(self, data: memoryview, channels: int | None) -> None:
        chunks = list(png_chunks(data))
        # A chunk's checksum, 4 bytes, follows its data.
        if not chunks or chunks[0][0] != b"IHDR" or chunks[-1][0] != b"IEND" or sum(chunks[-1][1:]) + 4 > len(data):
            raise _cut_off("PNG")
        header = read_png(data)
        self.height, self.width, self.kind = header.height, header.width, header.kind
        if not self.height or not self.width:
            raise _cut_off("PNG")
        if self.height * self.width > jpeg.MAX_PIXELS:
            raise DataError(
                f"the image is {self.height} x {self.width} pixels (height x width), more than {jpeg.MAX_PIXELS:,}",
                "reduce it before the LMDB is made",
            )
        # What isn't said stays: no alpha is dropped, and no bits. OpenCV doesn't see the one transparent grey of a grey PNG.
        if "16 bits" in header.oddities:
            raise DataError("the image has 16 bits per channel", "only images of 8 bits per channel are read")
        if "alpha" in header.oddities and header.channels != 1:
            raise DataError("the image has an alpha channel", "make the LMDB from images without transparency")
        self._data, self._channels = data, _channels(header.channels, channels)

    def decode(self, part: Rectangle | None = None, shrink: int = 1) -> Image:
        image = imdecode(self._data, cv2.IMREAD_UNCHANGED)  # as in Caffe: no EXIF rotation
        if image.ndim == 2 and self._channels == 3:
            image = cv2.cvtColor(image, cv2.COLOR_GRAY2BGR)
        shape = self.height, self.width, self._channels
        if image.dtype != np.uint8 or image.size != math.prod(shape):
            raise DataError(
                "the image can't be decoded: it isn't what its header says", "make the LMDB again from its source"
            )
        image = np.asarray(image, np.uint8).reshape(shape)
        return image if part is None else cut(image, part)


def _channels(own: int, wanted: int | None) -> int:
    """What an encoded image of `own` channels is decoded to: a grey one becomes three where they are wanted."""
    if wanted in (None, own) or own == 1:
        return wanted or own
    raise DataError(
        f"the image has {own} channels, the network takes {wanted}",
        f"convert that file to grey; or set `channels: {own}` under `model` in schedule.prototxt, which takes grey ones, too",
    )


def cut(image: NDArray[np.uint8], part: Rectangle) -> NDArray[np.uint8]:
    """The part of an image or a plane, a view."""
    return image[part.top : part.top + part.height, part.left : part.left + part.width]


def _cut_off(kind: str) -> DataError:
    return DataError(
        f"the image is cut off: {kind} data ends before its end marker",
        "its file was incomplete when the LMDB was made; make the LMDB again from complete files",
    )


# -- The Datum.

# Tags of Datum's fields as they stand on the wire: number << 3 | wire type (0 varint, 2 bytes).
_CHANNELS, _HEIGHT, _WIDTH, _DATA, _LABEL, _ENCODED = 0x08, 0x10, 0x18, 0x22, 0x28, 0x38
_FLOAT, _ONE_FLOAT = 0x35, struct.Struct("<f")  # wire type 5, 4 bytes: one of float_data, as proto2 writes them
_MOST_FLOATS = 1000
_BYTES_OF_AN_INT32 = 5
_MINUS_ONE = (1 << 64) - 1  # as a varint, of ten bytes
SEVERAL = -1  # the label of an image that has any number of them, in float_data: none, too
_LAST_SHIFT = 63  # of the tenth byte of a varint, which has 64 bits


@dataclass(slots=True)
class Fields:
    """A Datum. `data` is a view of the record, valid as long as that. `floats`: the classes of an image with several labels."""

    data: memoryview
    channels: int = 0
    height: int = 0
    width: int = 0
    label: int = 0
    encoded: bool = False
    labelled: bool = False  # `label` is written
    floats: tuple[float, ...] = ()

    @property
    def several(self) -> bool:
        """Whether it has any number of labels, `floats`, in place of one: as `data import` writes it, which tells an image with none
        from one of class 0, or without a `label`."""
        return self.label == SEVERAL or (bool(self.floats) and not self.labelled)

    @property
    def one_label(self) -> int:
        """The label, or SEVERAL."""
        return SEVERAL if self.several else self.label


def parse(record: bytes | memoryview) -> Fields:
    """The fields of a Datum. DataError for anything else."""
    view = memoryview(record)
    if not len(view):
        raise DataError("the record is empty", "make the LMDB again from its source")
    if (fields := _parse_usual(view)) is not None:
        return fields
    try:
        datum = caffe_pb2.Datum.FromString(bytes(view))
    except DecodeError:
        raise DataError("the record is not a Caffe Datum", "stagerun reads LMDBs of Caffe's Datum messages") from None
    shape = datum.channels, datum.height, datum.width
    labelled, floats = datum.HasField("label"), tuple(datum.float_data)
    return Fields(memoryview(datum.data), *shape, datum.label, datum.encoded, labelled, floats)


def _parse_usual(view: memoryview) -> Fields | None:
    """The fields, in any order, if all are as Caffe writes them; 3 us, where protobuf copies the image too. None: ask protobuf."""
    fields = Fields(view[:0])
    at, end = 0, len(view)
    try:
        while at < end:
            tag, value, shift, start = view[at], 0, 0, at + 1
            at = start
            if tag == _FLOAT:
                if len(fields.floats) >= _MOST_FLOATS:  # an image's pixels, say
                    return None
                fields.floats += _ONE_FLOAT.unpack_from(view, at)
                at += _ONE_FLOAT.size
                continue
            while True:
                byte = view[at]
                at += 1
                value |= (byte & 0x7F) << shift
                if byte < 0x80:
                    break
                shift += 7
                if shift > _LAST_SHIFT:  # no varint is longer; a million such bytes would take a minute
                    return None
            if tag == _DATA:
                if value > end - at:
                    return None
                fields.data = view[at : at + value]
                at += value
                continue
            if tag == _LABEL and value == _MINUS_ONE:
                value = SEVERAL
            elif at - start > _BYTES_OF_AN_INT32 or value >= 1 << 31:
                return None
            if tag == _LABEL:
                fields.label, fields.labelled = value, True
            elif tag == _HEIGHT:
                fields.height = value
            elif tag == _WIDTH:
                fields.width = value
            elif tag == _CHANNELS:
                fields.channels = value
            elif tag == _ENCODED:
                fields.encoded = value != 0
            else:
                return None
    except (IndexError, struct.error):  # it ends within a field
        return None
    return fields


def raw_datum(image: Image, label: int) -> caffe_pb2.Datum:
    """A Datum that holds the pixels of an image, uint8[height, width, channels], as they are."""
    height, width, channels = image.shape
    data = np.ascontiguousarray(image.transpose(2, 0, 1)).tobytes()
    return caffe_pb2.Datum(channels=channels, height=height, width=width, data=data, label=label)


def wrong_label(label: int, num_classes: int) -> DataError | None:
    """What is wrong with a label that isn't one of 0 .. num_classes-1."""
    if label < 0:
        return DataError(
            f"the label is {label}, below 0", "labels count from 0; make the LMDB again with labels that do"
        )
    if label < num_classes:
        return None
    return DataError(
        f"the label is {label}, but num_classes is {num_classes}: labels go from 0 to {num_classes - 1}",
        "change `num_classes` of the network, or make the LMDB with labels that count from 0",
    )


def picture_of(fields: Fields, channels: int | None, decoder: MakeDecoder = make_decoder) -> StoredPicture:
    """The Datum's picture, its size known, its pixels not yet decoded. DataError if it can't give `channels` channels (None: 1 or 3).

    Raw bytes (channels x height x width) must have exactly `channels` channels. A grey JPEG or PNG is repeated where three are wanted (Caffe
    stops there; ILSVRC has some), CMYK becomes B, G, R as OpenCV does it. EXIF's orientation is not applied, as in Caffe. Bytes that were
    changed inside a JPEG's scan go unnoticed.
    """
    if not len(fields.data):
        if fields.floats:
            raise DataError("the Datum holds float_data", "only images of 8 bits per channel (field `data`) are read")
        raise DataError("the Datum holds no image", "make the LMDB again from its source")
    if fields.encoded:
        found = family(fields.data)
        if found == "JPEG":
            return _Jpeg(fields.data, channels, decoder)
        if found == "PNG":
            return _Png(fields.data, channels)
        but = f", but {found}" if found else ""
        raise DataError(f"the encoded image is neither JPEG nor PNG{but}", "convert it before the LMDB is made")
    c, h, w = fields.channels, fields.height, fields.width
    if c < 1 or h < 1 or w < 1 or c * h * w != len(fields.data):
        raise DataError(
            f"the Datum says {c} x {h} x {w} (channels x height x width) bytes, but holds {len(fields.data)}",
            "the bytes are a JPEG or PNG file: the Datum lacks `encoded: true`"
            if family(fields.data) in ("JPEG", "PNG")
            else "make the LMDB again from its source",
        )
    if c not in ((1, 3) if channels is None else (channels,)):
        raise DataError(
            f"the image has {count(c, 'channel')}, the network takes {channels or '1 or 3'}",
            f"set `channels: {c}` under `model` in schedule.prototxt" if c in (1, 3) else "the network takes 1 or 3",
        )
    return _Planes(np.frombuffer(fields.data, np.uint8).reshape(c, h, w))
