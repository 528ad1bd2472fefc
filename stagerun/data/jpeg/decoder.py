"""A JPEG, or a part of one, to pixels: what the tiers have in common, and the tier that is always there.

The pixels are those of libjpeg-turbo's defaults (accurate DCT, smooth upsampling of colour), which every library named
here uses, so the tier never changes a picture, only the time it takes. What a tier can't do, cv2.imdecode does: the
whole picture, of which the part is cut out.

Damage is judged alike by all tiers, as 41,000 damaged files have shown. In a file of one scan, libjpeg makes up the pixels of what is
damaged, and goes on: they come out the same whether the rest is looked at or not. In a file of several scans the libraries differ in
when they give up: there OpenCV alone decides about a file that another one warns of. `stagerun data verify --decode` finds such files.
"""

from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from stagerun.base.errors import DataError
from stagerun.data.jpeg.header import BadImage, Buffer, Header, Reach, as_bytes

Pixels = NDArray[np.uint8]

_KEEP = 1 << 26  # bytes of scratch that are kept from one picture to the next

# OpenCV's flags of a grey and of a colour picture, by what it is reduced by.
_FLAGS = {
    1: (cv2.IMREAD_GRAYSCALE, cv2.IMREAD_COLOR),
    2: (cv2.IMREAD_REDUCED_GRAYSCALE_2, cv2.IMREAD_REDUCED_COLOR_2),
    4: (cv2.IMREAD_REDUCED_GRAYSCALE_4, cv2.IMREAD_REDUCED_COLOR_4),
    8: (cv2.IMREAD_REDUCED_GRAYSCALE_8, cv2.IMREAD_REDUCED_COLOR_8),
}


@dataclass(frozen=True, slots=True)
class Rectangle:
    """A part of an image, in pixels from the top left."""

    top: int
    left: int
    height: int
    width: int


@dataclass(frozen=True, slots=True)
class Request:
    """What is wanted: rows top .. top + height of the picture reduced `shrink` times, likewise columns."""

    channels: int
    shrink: int
    top: int
    left: int
    height: int
    width: int

    @property
    def bottom(self) -> int:
        return self.top + self.height

    @property
    def right(self) -> int:
        return self.left + self.width


class Scratch:
    """Memory that one thread uses again for the next picture or record; it grows to the largest but for giants."""

    def __init__(self) -> None:
        self._memory = np.empty(1 << 20, np.uint8)

    def of(self, size: int) -> Pixels:
        """uint8[size]; what was given before is overwritten."""
        if size > _KEEP:
            return np.empty(size, np.uint8)
        if size > self._memory.size:
            self._memory = np.empty(min(_KEEP, max(size, 2 * self._memory.size)), np.uint8)
        return self._memory[:size]


class Decoder:
    """Decodes with OpenCV alone. The other tiers override `fast`. One per thread: it isn't thread-safe."""

    tier = "opencv"

    def decode(
        self, data: Buffer, header: Header, channels: int, part: Rectangle | None = None, shrink: int = 1
    ) -> Pixels:
        """uint8[height, width, channels], valid until the next call. DataError, without a place, where libjpeg finds it beyond decoding.

        `channels` is 3 for B, G, R, or 1, for grey JPEGs only. `part` is in pixels of the file: exactly these pixels of the whole.
        `shrink` 2, 4 or 8 is libjpeg's reduced picture, ceil(height / shrink) x ceil(width / shrink) pixels, of which a part is rows
        top // shrink and the height // shrink - 1 after it, likewise columns. Where `data` can be written to, it may be meanwhile.
        """
        if part is None:
            part = Rectangle(0, 0, header.height, header.width)
            size = scaled(header.height, shrink), scaled(header.width, shrink)
        else:
            size = part.height // shrink, part.width // shrink
        request = Request(channels, shrink, part.top // shrink, part.left // shrink, *size)
        if header.reach is not Reach.ODD:
            pixels = self.fast(data, header, request)
            if pixels is not None:
                return pixels
        return by_opencv(data, header, request)

    def fast(self, data: Buffer, header: Header, request: Request) -> Pixels | None:
        """The request fulfilled, or None if this tier can't, or finds something odd in a file of several scans."""
        return None


# What no picture's row is likely to be. Of a library that warned and then stopped at an error the last row is still this.
_UNWRITTEN = (np.arange(3 * 65535) * 2654435761 >> 16).astype(np.uint8)


def mark(pixels: Pixels) -> None:
    """Prepares uint8[height, width, channels] for `is_written`."""
    last = pixels[-1].reshape(-1)
    last[:] = _UNWRITTEN[: last.size]


def is_written(pixels: Pixels) -> bool:
    """Whether the last row, and with it every one, was written since `mark`."""
    last = pixels[-1].reshape(-1)
    return not np.array_equal(last, _UNWRITTEN[: last.size])


def scaled(pixels: int, shrink: int) -> int:
    """Pixels of a side after the reduction."""
    return -(-pixels // shrink)


def imdecode(data: Buffer, flags: int) -> NDArray[Any]:
    """What OpenCV makes of an image's file. BadImage if it can't decode it."""
    try:
        image = cv2.imdecode(np.frombuffer(as_bytes(data), np.uint8), flags)
        why = "its file is damaged"
    except cv2.error as error:
        image, why = None, error.err
    if image is None:
        raise BadImage("damaged", f"the image can't be decoded: {why}", "make the LMDB again from its source")
    return image


def by_opencv(data: Buffer, header: Header, request: Request) -> Pixels:
    """The part cut from the whole picture; DataError if OpenCV can't decode it."""
    image = imdecode(data, _FLAGS[request.shrink][request.channels == 3] | cv2.IMREAD_IGNORE_ORIENTATION)
    size = scaled(header.height, request.shrink), scaled(header.width, request.shrink)
    if image.shape[:2] != size:
        raise DataError(
            f"the image can't be decoded: its header says {size[0]} x {size[1]} pixels (height x width), "
            f"the picture has {image.shape[0]} x {image.shape[1]}",
            "make the LMDB again from its source",
        )
    pixels = np.asarray(image, np.uint8).reshape(*size, request.channels)
    return pixels[request.top : request.bottom, request.left : request.right]
