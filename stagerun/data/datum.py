"""Records: the bytes of a Caffe Datum become its fields, and a picture that has its size before it is decoded: raw planes, JPEG, or PNG.

A JPEG is decoded only as far as the requested part reaches, at a reduced scale if requested. DataErrors name no record; the loader
prepends the LMDB and the key.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import cv2
import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from stagerun.base.errors import DataError
from stagerun.base.text import count
from stagerun.data import jpeg
from stagerun.data.headers import family, png_chunks, read_png
from stagerun.data.jpeg import MakeDecoder, Rectangle, make_decoder
from stagerun.data.jpeg.decoder import imdecode
from stagerun.data.jpeg.header import cut_off, require_size
from stagerun.language.proto import caffe_pb2

Image = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture of `height` x `width` pixels. `kind` names its storage; `interval` is the restart interval of a JPEG, 0 without one.

    `decode` returns uint8[height, width, channels], B, G, R, of a part (None: the whole), at 1 / shrink of its size (`jpeg.Decoder.decode`);
    only a `reducible` picture takes a `shrink` other than 1. The pixels are valid until the decoder's next picture, or until the record's
    memory is reused. DataError for a damaged file.
    """

    height: int
    width: int
    decode: Callable[[Rectangle | None, int], Image]
    kind: str = ""
    interval: int = 0
    reducible: bool = False


def decoded(image: Image) -> Picture:
    """Return a picture in decoded form."""
    height, width = image.shape[:2]
    return Picture(height, width, lambda part, shrink: cut(image, part))


def _raw(planes: Image) -> Picture:
    """Return the picture of raw bytes, colour by colour: uint8[channels, height, width]."""

    def decode(part: Rectangle | None, shrink: int) -> Image:
        wanted = [cut(plane, part) for plane in planes]
        # cv2.merge interleaves ten times faster than numpy copies a transposed array.
        return wanted[0][:, :, None] if len(wanted) == 1 else np.asarray(cv2.merge(wanted), np.uint8)

    _, height, width = planes.shape
    return Picture(height, width, decode, "raw")


def _jpeg(data: memoryview, channels: int | None, make: MakeDecoder) -> Picture:
    if not jpeg.is_complete(data):
        raise cut_off("JPEG data ends before its end marker")
    header = jpeg.read_header(data)
    wanted, decoder = _channels(1 if header.components == 1 else 3, channels), make()  # CMYK: 3, too

    def decode(part: Rectangle | None, shrink: int) -> Image:
        return decoder.decode(data, header, wanted, part, shrink)

    return Picture(header.height, header.width, decode, header.kind, header.restart_interval, reducible=True)


def _png(data: memoryview, channels: int | None) -> Picture:
    chunks = list(png_chunks(data))
    # A chunk's checksum, 4 bytes, follows its data.
    if not chunks or chunks[0][0] != b"IHDR" or chunks[-1][0] != b"IEND" or sum(chunks[-1][1:]) + 4 > len(data):
        raise cut_off("PNG data ends before its end marker")
    header = read_png(data)
    if not header.height or not header.width:
        raise cut_off("PNG data ends before its end marker")
    require_size(header.height, header.width)
    # Nothing is dropped silently, neither alpha nor bits. OpenCV ignores the one transparent grey of a grey PNG.
    if "16 bits" in header.oddities:
        raise DataError("the image has 16 bits per channel", "only images of 8 bits per channel are read")
    if "alpha" in header.oddities and header.channels != 1:
        raise DataError("the image has an alpha channel", "make the LMDB from images without transparency")
    shape = header.height, header.width, _channels(header.channels, channels)

    def decode(part: Rectangle | None, shrink: int) -> Image:
        image = imdecode(data, cv2.IMREAD_UNCHANGED)  # as in Caffe: no EXIF rotation
        if image.ndim == 2 and shape[2] == 3:
            image = cv2.cvtColor(image, cv2.COLOR_GRAY2BGR)
        if image.dtype != np.uint8 or image.size != math.prod(shape):
            raise DataError(
                "the image can't be decoded: it isn't what its header says", "make the LMDB again from its source"
            )
        return cut(np.asarray(image, np.uint8).reshape(shape), part)

    return Picture(header.height, header.width, decode, header.kind)


def _channels(stored: int, wanted: int | None) -> int:
    """Return the channels to decode to: grey images expand to three."""
    if wanted in (None, stored) or stored == 1:
        return wanted or stored
    raise DataError(
        f"the image has {stored} channels, the network takes {wanted}",
        f"convert that file to grey; or set `channels: {stored}` under `model` in schedule.prototxt, which takes grey ones, too",
    )


def cut(image: Image, part: Rectangle | None) -> Image:
    """Return a view of the part of an image or a plane; None: of all of it."""
    return image if part is None else image[part.top : part.bottom, part.left : part.right]


# -- The Datum.

# Datum's tags on the wire: number << 3 | wire type (0 varint, 2 bytes).
_DATA = 0x22
_NUMBERS = {0x08: "channels", 0x10: "height", 0x18: "width", 0x28: "label", 0x38: "encoded"}
SEVERAL = -1  # the label of an image with any number of labels, even none, in float_data
_LAST_SHIFT = 28  # of the fifth byte of an int32


@dataclass(slots=True)
class Fields:
    """A Datum. `data` may be a view of the record, valid as long as it. `floats`: the classes of an image with several labels."""

    data: memoryview
    channels: int = 0
    height: int = 0
    width: int = 0
    label: int = 0
    encoded: bool = False

    floats: tuple[float, ...] = ()

    @property
    def several(self) -> bool:
        """Return whether `floats` are its labels."""
        return self.label == SEVERAL


def parse(record: bytes | memoryview) -> Fields:
    """Return the fields of a Datum. DataError for anything else."""
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
    floats = tuple(datum.float_data)
    label = SEVERAL if floats and not datum.HasField("label") else datum.label
    return Fields(memoryview(datum.data), *shape, label, datum.encoded, floats)


def _parse_usual(view: memoryview) -> Fields | None:
    """Return the fields of a Datum with at most one label, as Caffe writes it, in 3 us; protobuf copies the image. None: ask protobuf."""
    fields = Fields(view[:0])
    at, end = 0, len(view)
    try:
        while at < end:
            tag, value, shift = view[at], 0, 0
            at += 1
            while True:
                byte = view[at]
                at += 1
                value |= (byte & 0x7F) << shift
                if byte < 0x80:
                    break
                shift += 7
                if shift > _LAST_SHIFT:
                    return None
            if tag == _DATA and value <= end - at:
                fields.data = view[at : at + value]
                at += value
            elif tag in _NUMBERS and value < 1 << 31:
                setattr(fields, _NUMBERS[tag], value)
            else:
                return None
    except IndexError:  # it ends within a field
        return None
    fields.encoded = bool(fields.encoded)
    return fields


def raw_datum(image: Image, label: int) -> caffe_pb2.Datum:
    """Return a Datum of the raw pixels of an image, uint8[height, width, channels]."""
    height, width, channels = image.shape
    data = np.ascontiguousarray(image.transpose(2, 0, 1)).tobytes()
    return caffe_pb2.Datum(channels=channels, height=height, width=width, data=data, label=label)


def picture_of(fields: Fields, channels: int | None, decoder: MakeDecoder = make_decoder) -> Picture:
    """Return the Datum's picture, not yet decoded. DataError if it can't give `channels` channels (None: 1 or 3).

    Raw bytes (channels x height x width) must have exactly `channels` channels. A grey JPEG or PNG expands to three (Caffe stops there;
    ILSVRC has some), CMYK becomes B, G, R as in OpenCV. EXIF's orientation is not applied, as in Caffe. Changed bytes inside a JPEG's
    scan go unnoticed. `decoder` is called for a JPEG alone: loading and testing the fastest takes half a second.
    """
    if not len(fields.data):
        if fields.floats:
            raise DataError("the Datum holds float_data", "only images of 8 bits per channel (field `data`) are read")
        raise DataError("the Datum holds no image", "make the LMDB again from its source")
    if fields.encoded:
        encoding = family(fields.data)
        if encoding == "JPEG":
            return _jpeg(fields.data, channels, decoder)
        if encoding == "PNG":
            return _png(fields.data, channels)
        but = f", but {encoding}" if encoding else ""
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
    return _raw(np.frombuffer(fields.data, np.uint8).reshape(c, h, w))
