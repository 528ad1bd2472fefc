"""One record: the bytes of a Caffe Datum -> its fields, and through `picture` image and label.

Errors are DataErrors without a place; the loader puts the LMDB and the key in front.
"""

from dataclasses import dataclass

from google.protobuf.message import DecodeError

from stagerun.data.jpeg import make_decoder
from stagerun.data.picture import Image, MakeDecoder, OtherChannels, Picture, coded_picture, encoded_hint, raw_picture
from stagerun.errors import DataError
from stagerun.proto import caffe_pb2

__all__ = ["Fields", "Image", "check_label", "decode", "parse", "picture_of"]

# Tags of Datum's fields as they stand on the wire: number << 3 | wire type (0 varint, 2 bytes).
_CHANNELS, _HEIGHT, _WIDTH, _DATA, _LABEL, _ENCODED = 0x08, 0x10, 0x18, 0x22, 0x28, 0x38
_BYTES_OF_AN_INT32 = 5
_LAST_SHIFT = 63  # of the tenth byte of a varint, which has 64 bits


@dataclass(slots=True)
class Fields:
    """A Datum. `data` is a view of the record, valid as long as that."""

    data: memoryview
    channels: int = 0
    height: int = 0
    width: int = 0
    label: int = 0
    encoded: bool = False
    has_floats: bool = False


def decode(
    record: bytes | memoryview, channels: int, num_classes: int, decoder: MakeDecoder = make_decoder
) -> tuple[Image, int]:
    """The image as uint8[height, width, channels], channels in the order B, G, R, and its label, 0 .. num_classes-1.

    Raw bytes (channels x height x width) must have exactly `channels` channels. Encoded images are JPEG or PNG with 8
    bits per channel; where 3 channels are wanted a grey one is repeated three times (Caffe stops there; ILSVRC has
    some), and CMYK becomes B, G, R as OpenCV does it. Orientation in EXIF data is not applied, as in Caffe. A missing
    label is 0, as in Caffe. What can't be known: bytes changed inside a JPEG's scan, which decode to a wrong picture.
    With `decoder` the image is valid until its next use.
    """
    fields = parse(record)
    check_label(fields.label, num_classes)
    return picture_of(fields, channels, decoder).decode(), fields.label


def parse(record: bytes | memoryview) -> Fields:
    """The fields of a Datum. DataError for what is none."""
    view = memoryview(record)
    if not len(view):
        raise DataError("the record is empty", "make the LMDB again from its source")
    fields = _parse_usual(view)
    return _parse_any(view) if fields is None else fields


def _parse_usual(view: memoryview) -> Fields | None:
    """The fields, in any order, if all are as Caffe writes them; 3 us, where protobuf copies the image too. None: ask protobuf."""
    fields = Fields(view[:0])
    at, end = 0, len(view)
    try:
        while at < end:
            tag, value, shift, start = view[at], 0, 0, at + 1
            at = start
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
            if at - start > _BYTES_OF_AN_INT32 or value >= 1 << 31:
                return None
            if tag == _LABEL:
                fields.label = value
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
    except IndexError:  # it ends within a field
        return None
    return fields


def _parse_any(view: memoryview) -> Fields:
    try:
        datum = caffe_pb2.Datum.FromString(bytes(view))
    except DecodeError:
        raise DataError("the record is not a Caffe Datum", "stagerun reads LMDBs of Caffe's Datum messages") from None
    return Fields(
        memoryview(datum.data),
        datum.channels,
        datum.height,
        datum.width,
        datum.label,
        datum.encoded,
        bool(datum.float_data),
    )


def check_label(label: int, num_classes: int) -> None:
    """DataError for a label that isn't one of 0 .. num_classes-1."""
    if label < 0:
        raise DataError(
            f"the label is {label}, below 0", "labels count from 0; make the LMDB again with labels that do"
        )
    if label >= num_classes:
        raise DataError(
            f"the label is {label}, but num_classes is {num_classes}: labels go from 0 to {num_classes - 1}",
            "change `num_classes` under `model` in schedule.prototxt, or make the LMDB with labels that count from 0",
        )


def picture_of(fields: Fields, channels: int, decoder: MakeDecoder = make_decoder) -> Picture:
    """The Datum's picture, its size known, its pixels not yet decoded. DataError if it can't give `channels` channels."""
    if not len(fields.data):
        if fields.has_floats:
            raise DataError("the Datum holds float_data", "only images of 8 bits per channel (field `data`) are read")
        raise DataError("the Datum holds no image", "make the LMDB again from its source")
    if fields.encoded:
        return coded_picture(fields.data, channels, decoder)
    c, h, w = fields.channels, fields.height, fields.width
    if c < 1 or h < 1 or w < 1 or c * h * w != len(fields.data):
        raise DataError(
            f"the Datum says {c} x {h} x {w} (channels x height x width) bytes, but holds {len(fields.data)}",
            encoded_hint(fields.data),
        )
    if c != channels:
        raise OtherChannels(
            f"the image has {c} channel{'s' if c != 1 else ''}, the network takes {channels}",
            f"set `channels: {c}` under `model` in schedule.prototxt" if c in (1, 3) else "the network takes 1 or 3",
        )
    return raw_picture(fields.data, c, h, w)
