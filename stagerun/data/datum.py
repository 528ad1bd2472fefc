"""One record: the bytes of a Caffe Datum -> image and label.

Errors are DataErrors without a place; the loader puts the LMDB and the key in front.
"""

import re

import cv2
import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from stagerun.errors import DataError
from stagerun.proto import caffe_pb2

Image = NDArray[np.uint8]

_JPEG, _PNG = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"

# Within a scan FF 00 is a byte of data, FF D0 .. FF D7 a restart, FF FF filling; anything else is the next marker.
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]", re.DOTALL)
_EOI = 0xD9


def decode(record: bytes, channels: int, num_classes: int) -> tuple[Image, int]:
    """The image as uint8[height, width, channels], channels in the order B, G, R, and its label, 0 .. num_classes-1.

    Raw bytes (channels x height x width) must have exactly `channels` channels. Encoded images are JPEG or PNG with 8
    bits per channel; where 3 channels are wanted a grey one is repeated three times (Caffe stops there; ILSVRC has
    some), and CMYK becomes B, G, R as OpenCV does it. Orientation in EXIF data is not applied, as in Caffe. A missing
    label is 0, as in Caffe. What can't be told: bytes changed inside a JPEG's scan, which decode to a wrong picture.
    """
    if not record:
        raise DataError("the record is empty", "make the LMDB again from its source")
    try:
        datum = caffe_pb2.Datum.FromString(record)
    except DecodeError:
        raise DataError("the record is not a Caffe Datum", "stagerun reads LMDBs of Caffe's Datum messages") from None
    _check_label(datum.label, num_classes)
    if not datum.data:
        if datum.float_data:
            raise DataError("the Datum holds float_data", "only images of 8 bits per channel (field `data`) are read")
        raise DataError("the Datum holds no image", "make the LMDB again from its source")
    image = _decode_image(datum.data, channels) if datum.encoded else _raw_image(datum, channels)
    return image, datum.label


def _check_label(label: int, num_classes: int) -> None:
    if label < 0:
        raise DataError(
            f"the label is {label}, below 0", "labels count from 0; make the LMDB again with labels that do"
        )
    if label >= num_classes:
        raise DataError(
            f"the label is {label}, but num_classes is {num_classes}: labels go from 0 to {num_classes - 1}",
            "change `num_classes` under `model` in schedule.prototxt, or make the LMDB with labels that count from 0",
        )


def _raw_image(datum: caffe_pb2.Datum, channels: int) -> Image:
    c, h, w = datum.channels, datum.height, datum.width
    if c < 1 or h < 1 or w < 1 or c * h * w != len(datum.data):
        raise DataError(
            f"the Datum says {c} x {h} x {w} (channels x height x width) bytes, but holds {len(datum.data)}",
            _encoded_hint(datum.data),
        )
    if c != channels:
        raise DataError(
            f"the image has {c} channel{'s' if c != 1 else ''}, the network takes {channels}",
            f"set `channels: {c}` under `model` in schedule.prototxt" if c in (1, 3) else "the network takes 1 or 3",
        )
    planes = np.frombuffer(datum.data, np.uint8).reshape(c, h, w)
    # cv2.merge interleaves ten times faster than numpy copies a transposed array.
    return planes.reshape(h, w, 1) if c == 1 else np.asarray(cv2.merge(list(planes)), np.uint8)


def _encoded_hint(data: bytes) -> str:
    if data.startswith((_JPEG, _PNG)):
        return "the bytes are a JPEG or PNG file: the Datum lacks `encoded: true`"
    return "make the LMDB again from its source"


def _decode_image(data: bytes, channels: int) -> Image:
    _check_complete(data)
    try:
        # UNCHANGED as in Caffe: no EXIF rotation, and nothing dropped without a word (alpha, 16 bits).
        image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)
    except cv2.error as error:
        raise DataError(f"the image can't be decoded: {error.err}") from None
    if image is None:
        raise DataError("the image can't be decoded: its file is damaged", "make the LMDB again from its source")
    if image.dtype != np.uint8:
        raise DataError("the image has 16 bits per channel", "only images of 8 bits per channel are read")
    found = 1 if image.ndim == 2 else image.shape[2]
    if found == channels:
        return np.asarray(image, np.uint8).reshape(image.shape[0], image.shape[1], channels)
    if found == 1:
        return np.asarray(cv2.cvtColor(image, cv2.COLOR_GRAY2BGR), np.uint8)
    if found == 4:
        raise DataError("the image has an alpha channel", "make the LMDB from images without transparency")
    raise DataError(
        f"the image has {found} channels, the network takes {channels}",
        f"set `channels: {found}` under `model` in schedule.prototxt, or make the LMDB from grey images",
    )


def _check_complete(data: bytes) -> None:
    """DataError for a JPEG or PNG that ends early: OpenCV fills what is missing of it with grey and says nothing."""
    if data.startswith(_JPEG):
        complete = _jpeg_is_complete(data)
    elif data.startswith(_PNG):
        complete = _png_is_complete(data)
    else:
        raise DataError("the encoded image is neither JPEG nor PNG", "convert it before the LMDB is made")
    if not complete:
        raise DataError(
            f"the image is cut off: {'JPEG' if data.startswith(_JPEG) else 'PNG'} data ends before its end marker",
            "its file was incomplete when the LMDB was made; make the LMDB again from complete files",
        )


def _jpeg_is_complete(data: bytes) -> bool:
    """Whether the markers lead to the picture's EOI. Bytes after it don't matter; a thumbnail's EOI doesn't count."""
    at = 2
    while True:
        marker = _MARKER.search(data, at)
        if marker is None:
            return False
        code, at = data[marker.end() - 1], marker.end()
        if code == _EOI:
            return True
        # Every other marker here has a length that counts itself. After SOS comes the scan, where the search goes on.
        length = int.from_bytes(data[at : at + 2], "big")
        if length < 2:
            return False
        at += length


def _png_is_complete(data: bytes) -> bool:
    """Whether the chunks lead to IEND."""
    at = len(_PNG)
    while at + 12 <= len(data):  # a chunk: length, type, so many bytes, checksum
        length, kind = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        at += 12 + length
        if kind == b"IEND":
            return at <= len(data)
    return False
