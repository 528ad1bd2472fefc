"""Decoding of JPEGs, whole or in part: the base of all tiers, and the tiers of the required dependencies.

Every library here uses libjpeg-turbo's defaults (accurate DCT, smooth upsampling of colour), so the tier changes only the time, never
a picture. What a tier can't do, cv2.imdecode does, by decoding the whole picture.

All tiers judge damage alike, as 41,000 damaged files have shown. In a file of one scan libjpeg invents the damaged pixels and
continues, with the same pixels whether the rest is decoded or not. In a file of several scans the libraries give up at different
points: if one warns, OpenCV alone decides. `stagerun data verify --decode` finds such files.
"""

from dataclasses import dataclass
from itertools import islice
from typing import Any

import cv2
import numpy as np
import simplejpeg
from numpy.typing import NDArray

from stagerun.base.errors import DataError
from stagerun.data.jpeg.header import NEXT, BadImage, Buffer, Header, Reach, as_bytes

Pixels = NDArray[np.uint8]

_KEEP = 1 << 26  # bytes of scratch that are kept from one picture to the next

# OpenCV's flags of a grey and of a colour picture, by reduction.
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

    @property
    def bottom(self) -> int:
        return self.top + self.height

    @property
    def right(self) -> int:
        return self.left + self.width


@dataclass(frozen=True, slots=True)
class Request(Rectangle):
    """A requested part: rows top .. top + height of the picture reduced `shrink` times, likewise columns."""

    shrink: int
    channels: int


class Scratch:
    """Memory that one thread reuses for the next picture or record; it grows to the largest, up to 64 MiB."""

    def __init__(self) -> None:
        self._memory = np.empty(1 << 20, np.uint8)

    def of(self, size: int) -> Pixels:
        """Return uint8[size], which the next call overwrites."""
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
        """Return uint8[height, width, channels], valid until the next call. DataError if libjpeg can't decode it.

        `channels` is 3 for B, G, R, or 1, for grey JPEGs only. `part` is in pixels of the file: exactly these pixels of the whole.
        `shrink` 2, 4 or 8 gives libjpeg's reduced picture, ceil(height / shrink) x ceil(width / shrink) pixels; its part is rows
        top // shrink and the height // shrink - 1 after it, likewise columns. Writable `data` may be changed during the call.
        """
        if part is None:
            wanted = 0, 0, scaled(header.height, shrink), scaled(header.width, shrink)
        else:
            wanted = part.top // shrink, part.left // shrink, part.height // shrink, part.width // shrink
        request = Request(*wanted, shrink, channels)
        pixels = None if header.reach is Reach.ODD else self.fast(data, header, request)
        return by_opencv(data, header, request) if pixels is None else pixels

    def fast(self, data: Buffer, header: Header, request: Request) -> Pixels | None:
        """Return the requested pixels; None if this tier can't, or if the library warns about a file of several scans."""
        return None


# An unlikely row of a picture. If a library warned and then stopped at an error, the last row is still this.
_UNWRITTEN = (np.arange(3 * 65535) * 2654435761 >> 16).astype(np.uint8)


def mark(pixels: Pixels) -> None:
    """Prepare uint8[height, width, channels] for `is_written`."""
    last = pixels[-1].reshape(-1)
    last[:] = _UNWRITTEN[: last.size]


def is_written(pixels: Pixels) -> bool:
    """Return whether the last row, and so every row, was written since `mark`."""
    last = pixels[-1].reshape(-1)
    return not np.array_equal(last, _UNWRITTEN[: last.size])


def scaled(pixels: int, shrink: int) -> int:
    """Return the pixels of a side after the reduction."""
    return -(-pixels // shrink)


def imdecode(data: Buffer, flags: int) -> NDArray[Any]:
    """Decode an image file by OpenCV. BadImage."""
    try:
        image = cv2.imdecode(np.frombuffer(as_bytes(data), np.uint8), flags)
        why = "its file is damaged"
    except cv2.error as error:
        image, why = None, error.err
    if image is None:
        raise BadImage("damaged", f"the image can't be decoded: {why}", "make the LMDB again from its source")
    return image


def by_opencv(data: Buffer, header: Header, request: Request) -> Pixels:
    """Cut the part from the whole picture. DataError if OpenCV can't decode it."""
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


# -- Cutting a rectangle of a JPEG with restart markers into a separate JPEG.
#
# A restart marker follows every so many MCUs (blocks of 8 to 32 pixels). Between two is a segment that can be decoded alone.
# If the segments make a grid (a row of MCUs holds a whole number of them, or each holds whole rows), the segments that touch the part,
# a smaller size in the header and renumbered restart markers make a valid file. Its pixels equal the whole's, except along the cut edges,
# where libjpeg smooths the colour with the neighbours: one more pixel than the part is taken. A damaged segment decodes alike in both
# if all markers up to the part's end are in order; else nothing is cut.

# Reduced pixels across from which libjpeg always smooths the colour: it wants more than 2 of colour, one for every 1 or
# 2 pixels (libjpeg-turbo/libjpeg-turbo: `jdsample.c`, `do_fancy && compptr->downsampled_width > 2`).
NARROWEST = 8

_RESTARTS = bytes(range(0xD0, 0xD8))  # codes of restart markers, in their order


@dataclass(frozen=True, slots=True)
class Grid:
    """Segments as a grid: each (except at the right and bottom edges) is `height` x `width` pixels."""

    height: int
    width: int
    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class Window:
    """The cells of a grid to cut out, and their part of the picture."""

    cells: Grid
    first_row: int
    rows: int
    first_column: int
    columns: int
    part: Rectangle


def grid(header: Header) -> Grid | None:
    """Return the grid of segments; None if they make none, or for a single segment."""
    interval = header.restart_interval
    if not interval or header.reach is not Reach.PART:
        return None
    across, down = header.sampling[0] if header.components > 1 else (1, 1)
    width, height = 8 * across, 8 * down
    columns, rows = -(-header.width // width), -(-header.height // height)
    if columns % interval == 0:
        cells = Grid(height, width * interval, rows, columns // interval)
    elif interval % columns == 0:
        each = interval // columns
        cells = Grid(height * each, width * columns, -(-rows // each), 1)
    else:
        return None
    return cells if cells.rows * cells.columns > 1 else None


def window(header: Header, request: Request) -> Window | None:
    """Return the cells around the part; None without a grid, or if it would be the whole."""
    cells = grid(header)
    if cells is None:
        return None
    shrink = request.shrink
    first_row, rows = _touched(request.top, request.bottom, shrink, cells.height, cells.rows)
    first_column, columns = _touched(request.left, request.right, shrink, cells.width, cells.columns)
    first_column, columns = _widened(first_column, columns, cells, header.width, shrink)
    if rows == cells.rows and columns == cells.columns:
        return None
    top, left = first_row * cells.height, first_column * cells.width
    height, width = min(rows * cells.height, header.height - top), min(columns * cells.width, header.width - left)
    return Window(cells, first_row, rows, first_column, columns, Rectangle(top, left, height, width))


def _touched(begin: int, end: int, shrink: int, cell: int, cells: int) -> tuple[int, int]:
    """Return (first, count) of the cells under reduced pixels begin - 1 .. end, one more than the part on each side."""
    first = max(0, begin - 1) * shrink // cell
    return first, min(cells, ((end + 1) * shrink - 1) // cell + 1) - first


def _widened(first: int, count: int, cells: Grid, width: int, shrink: int) -> tuple[int, int]:
    """Return (first, count) of columns, more of them if the cut would be so narrow that its colour isn't smoothed."""
    while min((first + count) * cells.width, width) - first * cells.width < NARROWEST * shrink:
        if count == cells.columns:
            break
        first, count = max(0, first - 1), count + 1
    return first, count


def write_size(data: Pixels | bytearray, frame_at: int, height: int, width: int) -> None:
    """Write the size into the frame header that begins at `frame_at`."""
    data[frame_at + 5 : frame_at + 9] = height >> 8, height & 255, width >> 8, width & 255


def cut(source: Buffer, header: Header, window: Window) -> bytearray | None:
    """Return the window as a file. None unless the markers up to its end number the segments in order, and the picture's last segment ends
    at a marker of another kind."""
    view, cells, columns = as_bytes(source), window.cells, window.columns
    wanted = (window.first_row + window.rows) * cells.columns
    # The offset of each segment, behind the previous marker.
    edges = [header.scan_at, *(marker.end() for marker in islice(NEXT.finditer(view, header.scan_at), wanted))]
    codes, in_order = bytes(view[edge - 1] for edge in edges[1:]), (_RESTARTS * (wanted // 8 + 1))[:wanted]
    if wanted == cells.rows * cells.columns:
        if codes[-1:] in _RESTARTS:
            return None
        codes, in_order = codes[:-1], in_order[:-1]
    if codes != in_order:
        return None
    data, number = bytearray(view[: header.scan_at]), 0
    write_size(data, header.frame_at, window.part.height, window.part.width)
    # Row by row of the grid: `columns` consecutive segments of the file, with new numbers.
    for row in range(window.first_row, window.first_row + window.rows):
        first = row * cells.columns + window.first_column
        moved = len(data) - edges[first]
        data += view[edges[first] : edges[first + columns]]
        for edge in edges[first + 1 : first + columns + 1]:
            data[edge + moved - 1] = 0xD0 | number & 7
            number += 1
    data[-1] = 0xD9
    return data


# -- The tier of the required dependencies: simplejpeg, which decodes whole files, gets smaller files.
#
# In a file with restart markers, the segments around the part make a smaller file. In any other, a smaller height in the header
# leaves out the rows below the part: a scan runs from top to bottom, so libjpeg stops early and skips the rest.

# Two of libjpeg's scales may give reduced pictures of this size: the scale would be ambiguous.
_TINY = 8


class SimpleDecoder(Decoder):
    tier = "simplejpeg"

    def __init__(self) -> None:
        self._scratch, self._pixels = Scratch(), Scratch()

    def fast(self, data: Buffer, header: Header, request: Request) -> Pixels | None:
        source, y, x = np.frombuffer(as_bytes(data), np.uint8), request.top, request.left
        area = window(header, request)
        sliced = cut(source, header, area) if area else None
        if area and sliced is not None:
            part = area.part
            pixels = self._decode(sliced, part.height, part.width, request, strict=False)
            y, x = y - part.top // request.shrink, x - part.left // request.shrink
        else:
            pixels = self._decode_upper(source, header, request)
        return None if pixels is None else pixels[y : y + request.height, x : x + request.width]

    def _decode_upper(self, source: Pixels, header: Header, request: Request) -> Pixels | None:
        """Decode the picture down to below the part."""
        height = (request.bottom + 1) * request.shrink  # one row more: the colour is smoothed with it
        if height >= header.height or header.reach is not Reach.PART:
            return self._decode(source, header.height, header.width, request, header.reach is not Reach.PART)
        if not source.flags.writeable:
            data = self._scratch.of(source.size)
            data[:] = source
            source = data
        # The height in writable memory is restored: the next call may ask for another part.
        write_size(source, header.frame_at, height, header.width)
        try:
            return self._decode(source, height, header.width, request, strict=False)
        finally:
            write_size(source, header.frame_at, header.height, header.width)

    def _decode(
        self, source: Pixels | bytearray, height: int, width: int, request: Request, strict: bool
    ) -> Pixels | None:
        """Decode a whole file of height x width; None if simplejpeg disagrees, fails, or, if `strict`, warns. In a file of one scan
        warnings are not errors, among them the one about omitted rows."""
        shape = scaled(height, request.shrink), scaled(width, request.shrink), request.channels
        reduce = {} if request.shrink == 1 else {"min_height": shape[0], "min_width": shape[1]}
        if reduce and max(height, width) <= _TINY:
            return None
        pixels = self._pixels.of(shape[0] * shape[1] * shape[2])
        mark(pixels.reshape(shape))
        try:
            decoded = simplejpeg.decode_jpeg(
                source, "BGR" if request.channels == 3 else "GRAY", buffer=pixels, strict=strict, **reduce
            )
        except ValueError:
            return None
        return decoded if decoded.shape == shape and is_written(decoded) else None
