"""The header of a JPEG, read without decoding; and its completeness.

The walk over the markers is as forgiving as libjpeg's, so that every picture passes that libjpeg decodes. The header only selects the
method: each decoder reads the header again, and must agree on the size.
"""

import enum
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stagerun.base.errors import DataError

Buffer = bytes | bytearray | memoryview | NDArray[np.uint8]

# A picture is 3 bytes per pixel in memory: a file of a few bytes that claims more than this would take it all.
MAX_PIXELS = 100_000_000
# A progressive picture is decoded scan by scan, and an empty scan takes a few bytes: a small file could keep a
# core busy for hours. Encoders write about 10.
MAX_SCANS = 100

# Within a scan FF 00 is a byte of data, FF D0 .. FF D7 a restart, FF FF filling; anything else is the next marker.
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]", re.DOTALL)
# Outside of one, bytes before a marker are skipped, as libjpeg does.
NEXT = re.compile(rb"\xff([^\x00\xff])", re.DOTALL)

_SOI, _EOI, _SOS, _DRI, _APP1, _TEM = 0xD8, 0xD9, 0xDA, 0xDD, 0xE1, 0x01
EXIF = b"Exif\0\0"
_BASELINE, _EXTENDED, _PROGRESSIVE, _ARITHMETIC_PROGRESSIVE = 0xC0, 0xC1, 0xC2, 0xCA
_USUAL = (_BASELINE, _EXTENDED, _PROGRESSIVE)
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # these three are tables and an extension
_ALONE = frozenset(range(0xD0, 0xD8)) | {_TEM}  # markers without a length

Sampling = tuple[tuple[int, int], ...]
# Sampling factors (horizontal, vertical) of Y, Cb, Cr whose parts decode as in the whole.
SAMPLINGS = {
    ((1, 1), (1, 1), (1, 1)): "4:4:4",
    ((2, 1), (1, 1), (1, 1)): "4:2:2",
    ((2, 2), (1, 1), (1, 1)): "4:2:0",
    ((1, 2), (1, 1), (1, 1)): "4:4:0",
    ((4, 1), (1, 1), (1, 1)): "4:1:1",
}


class BadImage(DataError):
    """An image that can't be used; the message has no place in it. `odd` lists the reasons."""

    def __init__(self, reason: str, message: str, hint: str = "get the file again, or leave it out") -> None:
        super().__init__(message, hint)
        self.reason = reason


class Reach(enum.Enum):
    """The part of a picture that can be decoded alone."""

    PART = "one scan, top to bottom: any part"
    WHOLE = "several scans, or an unusual sampling: only the whole"
    ODD = "CMYK, arithmetic coding and the like: only the whole, by OpenCV"


@dataclass(frozen=True, slots=True)
class Header:
    """`frame_at` is the offset of the FF of the marker with the size, `scan_at` of the scan's first byte."""

    height: int
    width: int
    sampling: Sampling  # (horizontal, vertical) factor of each component
    code: int  # of the frame's marker
    frame_at: int
    scan_at: int
    restart_interval: int  # MCUs between restart markers; 0: no markers
    reach: Reach

    @property
    def components(self) -> int:
        """1 (grey), 3 or 4 (CMYK)."""
        return len(self.sampling)

    @property
    def progressive(self) -> bool:
        return self.code in (_PROGRESSIVE, _ARITHMETIC_PROGRESSIVE)

    @property
    def unusual(self) -> bool:
        """Arithmetic coding, lossless, hierarchical."""
        return self.code not in _USUAL

    @property
    def kind(self) -> str:
        """Name the encoding: `baseline JPEG`, `progressive grey JPEG` ..."""
        colour = {1: "grey ", 3: "", 4: "CMYK "}[self.components]
        if self.unusual:
            return f"unusual {colour}JPEG"
        # "extended sequential" with 8 bits is baseline with more tables, and decoded alike
        return f"{'progressive ' if self.progressive else '' if colour else 'baseline '}{colour}JPEG"


def read_header(data: Buffer) -> Header:
    """Return the header of a JPEG.

    BadImage for another format, a file that is cut off, no pixels or more than MAX_PIXELS, other than 8 bits per channel, or more than
    MAX_SCANS scans.
    """
    view = as_bytes(data)
    if view[:3] != b"\xff\xd8\xff":
        raise BadImage("not an image", "the image is not a JPEG", "convert it before the LMDB is made")
    frame, interval = None, 0
    for code, at, length in _segments(view):
        if code in _FRAMES:
            if frame is not None:
                raise _damaged("it has two frame headers")
            frame = *_frame(view, at, length), code, at - 2
        elif code == _DRI:
            if length != 4:
                raise _damaged("its restart interval is malformed")
            interval = view[at + 2] << 8 | view[at + 3]
    if frame is None:
        raise _damaged("it has no frame header")
    height, width, sampling, code, frame_at = frame
    reach = _reach(code, sampling, view[at + 2])  # of the last segment, which begins the scan
    if reach is not Reach.PART and (scans := bytes(view).count(b"\xff\xda")) > MAX_SCANS:
        raise BadImage(
            "unsupported", f"the image has {scans} scans, more than {MAX_SCANS}", "leave it out, or encode it again"
        )
    return Header(height, width, sampling, code, frame_at, at + length, interval, reach)


def exif_of(data: Buffer) -> bytes:
    """Return the Exif data of a JPEG whose header `read_header` reads, or b''."""
    view = as_bytes(data)
    for code, at, length in _segments(view):
        if code == _APP1 and view[at + 2 : at + 8] == EXIF:
            return bytes(view[at + 2 : at + length])
    return b""


def _segments(view: memoryview) -> Iterator[tuple[int, int, int]]:
    """Yield (code, offset behind the marker, length) of the segments of a header; the last one begins the scan. BadImage."""
    code, at = 0, 2
    while code != _SOS:
        if at + 2 <= len(view) and view[at] == 0xFF and 0 < view[at + 1] < 0xFF:
            code, at = view[at + 1], at + 2  # nearly every marker, ten times faster
        else:
            marker = NEXT.search(view, at)
            if marker is None:
                raise cut_off("JPEG data ends within its header")
            code, at = view[marker.end() - 1], marker.end()
        if code in (_SOI, _EOI):
            raise _damaged("its header ends without a picture")
        if code in _ALONE:
            continue
        if at + 2 > len(view):
            raise cut_off("JPEG data ends within its header")
        length = view[at] << 8 | view[at + 1]
        if length < 2:
            raise _damaged("its header has a segment without a length")
        # One byte must follow: a scan comes behind the last segment.
        if at + length >= len(view):
            raise cut_off("JPEG data ends within its header")
        yield code, at, length
        at += length


def is_complete(data: Buffer) -> bool:
    """Return whether the data of a JPEG reach the picture's end marker.

    Bytes after it don't matter. A file that ends in FF D9 counts as complete at once: within a scan these bytes are always that
    marker, and `read_header` refuses a file cut behind a thumbnail's end, since it lacks a scan.
    """
    view = as_bytes(data)
    if view[-2:] == b"\xff\xd9":
        return True
    at = 2
    while True:
        marker = _MARKER.search(view, at)
        if marker is None:
            return False
        code, at = view[marker.end() - 1], marker.end()
        if code == _EOI:
            return True
        # Every other marker here has a length that counts itself. After SOS comes the scan, where the search continues.
        length = int.from_bytes(view[at : at + 2], "big")
        if length < 2:
            return False
        at += length


def as_bytes(data: Buffer) -> memoryview:
    """Return the buffer as a view of single bytes."""
    view = memoryview(data)  # type: ignore[arg-type]  # numpy's arrays are typed as buffers from Python 3.12 on
    return view if view.format == "B" and view.ndim == 1 and view.contiguous else view.cast("B")


def require_size(height: int, width: int) -> None:
    """Raise BadImage for more than MAX_PIXELS."""
    if height * width > MAX_PIXELS:
        raise BadImage(
            "too many pixels",
            f"the image is {height} x {width} pixels (height x width), more than {MAX_PIXELS:,}",
            "reduce it before the LMDB is made",
        )


def _frame(view: memoryview, at: int, length: int) -> tuple[int, int, Sampling]:
    """Return height, width and sampling."""
    if length < 8 or length != 8 + 3 * view[at + 7]:
        raise _damaged("its frame header is malformed")
    bits, height, width = view[at + 2], view[at + 3] << 8 | view[at + 4], view[at + 5] << 8 | view[at + 6]
    if bits != 8:
        raise BadImage(
            "unsupported", f"the image has {bits} bits per channel", "only images of 8 bits per channel are read"
        )
    if not height or not width:
        raise _damaged(f"it is {height} x {width} pixels (height x width)")
    require_size(height, width)
    factors = view[at + 9 : at + length : 3]
    if len(factors) not in (1, 3, 4):
        raise _damaged(f"it has {len(factors)} colour components", "unsupported")
    return height, width, tuple((f >> 4, f & 15) for f in factors)


def _reach(code: int, sampling: Sampling, in_scan: int) -> Reach:
    """`in_scan` is how many components the first scan holds."""
    if code not in _USUAL or len(sampling) == 4:
        return Reach.ODD
    usual = len(sampling) == 1 or sampling in SAMPLINGS
    return Reach.PART if code != _PROGRESSIVE and in_scan == len(sampling) and usual else Reach.WHOLE


def cut_off(end: str) -> BadImage:
    return BadImage(
        "truncated",
        f"the image is cut off: {end}",
        "its file was incomplete when the LMDB was made; make the LMDB again from complete files",
    )


def _damaged(why: str, reason: str = "damaged") -> BadImage:
    return BadImage(reason, f"the image can't be decoded: {why}", "make the LMDB again from its source")
