"""A rectangle of a JPEG with restart markers, as a JPEG of its own.

A restart marker stands after every so many MCUs (blocks of 8 to 32 pixels). What lies between two is a segment that can be decoded alone.
If the segments make a grid (a row of MCUs holds a whole number of them, or each holds whole rows), those that touch the part, a smaller
size in the header and restart markers numbered anew are a valid file. Its pixels are those of the whole, except along the cut edges, where
libjpeg smooths the colour with the neighbours: one pixel more than the part is taken. A damaged segment decodes alike in both, as long as
the markers up to the part's end are all there and numbered in order; else nothing is cut.
"""

from dataclasses import dataclass

import numpy as np
import simplejpeg
from numpy.typing import NDArray

from stagerun.data.jpeg.decoder import Decoder, Pixels, Rectangle, Request, Scratch, is_written, mark, scaled
from stagerun.data.jpeg.header import Buffer, Header, Reach, as_bytes

# Reduced pixels across from which libjpeg always smooths the colour: it wants more than 2 of colour, one for every 1 or
# 2 pixels (libjpeg-turbo/libjpeg-turbo: `jdsample.c`, `do_fancy && compptr->downsampled_width > 2`).
NARROWEST = 8

MARKER = 2  # bytes of one


@dataclass(frozen=True, slots=True)
class Grid:
    """Segments as a grid: each (but those at the right and bottom edge) is `height` x `width` pixels."""

    height: int
    width: int
    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class Window:
    """The cells of a grid that are cut out, and the part of the picture that they are."""

    cells: Grid
    first_row: int
    rows: int
    first_column: int
    columns: int
    part: Rectangle


def grid(header: Header) -> Grid | None:
    """None if the segments make no grid, or there is only one."""
    interval = header.restart_interval
    if not interval or header.reach is not Reach.PART:
        return None
    across, down = header.sampling[0] if header.components > 1 else (1, 1)
    width, height = 8 * across, 8 * down
    columns, rows = -(-header.width // width), -(-header.height // height)
    if columns % interval == 0:
        found = Grid(height, width * interval, rows, columns // interval)
    elif interval % columns == 0:
        each = interval // columns
        found = Grid(height * each, width * columns, -(-rows // each), 1)
    else:
        return None
    return found if found.rows * found.columns > 1 else None


def window(header: Header, request: Request) -> Window | None:
    """The cells around the part; None if there is no grid, or it would be all of it."""
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
    """(first, count) of the cells under reduced pixels begin - 1 .. end, one more than the part on each side."""
    first = max(0, begin - 1) * shrink // cell
    return first, min(cells, ((end + 1) * shrink - 1) // cell + 1) - first


def _widened(first: int, count: int, cells: Grid, width: int, shrink: int) -> tuple[int, int]:
    """(first, count) of columns: more of them where the cut would be so narrow that its colour isn't smoothed."""
    while min((first + count) * cells.width, width) - first * cells.width < NARROWEST * shrink:
        if count == cells.columns:
            break
        first, count = max(0, first - 1), count + 1
    return first, count


def write_size(data: Pixels, frame_at: int, height: int, width: int) -> None:
    """Puts the size into the frame header that begins at `frame_at`."""
    data[frame_at + 5 : frame_at + 9] = height >> 8, height & 255, width >> 8, width & 255


def cut(source: Pixels, header: Header, window: Window, scratch: Scratch) -> Pixels | None:
    """The window as a file, in `scratch`; None if the restart markers aren't those of the grid."""
    cells, columns = window.cells, window.columns
    last = (window.first_row + window.rows) * cells.columns
    edges = find_edges(source, header.scan_at, last, cells.rows * cells.columns)
    if edges is None:
        return None
    # Row by row of the grid: `columns` segments stand one after the other in the file.
    first = (window.first_row + np.arange(window.rows)) * cells.columns + window.first_column
    starts, ends = edges[first], edges[first + columns]
    sizes = ends - starts
    places = header.scan_at + np.cumsum(sizes) - sizes
    data = scratch.of(header.scan_at + int(sizes.sum()))
    data[: header.scan_at] = source[: header.scan_at]
    write_size(data, header.frame_at, window.part.height, window.part.width)
    for place, start, size in zip(places.tolist(), starts.tolist(), sizes.tolist(), strict=True):
        data[place : place + size] = source[start : start + size]
    marks = edges[first[:, None] + np.arange(1, columns + 1)] - 1 + (places - starts)[:, None]
    data[marks.ravel()] = 0xD0 | (np.arange(marks.size) & 7)
    data[-2:] = 0xFF, 0xD9
    return data


def find_edges(source: Pixels, scan_at: int, wanted: int, count: int) -> NDArray[np.int64] | None:
    """int64[wanted + 1]: where segments 0 .. wanted begin, each behind the marker before it.

    None if the markers up to there are not those of `count` segments in order. The last segment of a picture ends at a
    marker of another kind.
    """
    at = np.flatnonzero(source[scan_at:-1] == 0xFF) + scan_at
    code = source[at + 1]
    marker = (code != 0) & (code != 0xFF)
    at, code = at[marker][:wanted], code[marker][:wanted]
    if at.size < wanted:
        return None
    in_order = 0xD0 | (np.arange(wanted) & 7)
    if wanted == count:
        if code[-1] & 0xF8 == 0xD0:
            return None
        in_order[-1] = code[-1]
    if not np.array_equal(code, in_order):
        return None
    edges = np.empty(wanted + 1, np.int64)
    edges[0], edges[1:] = scan_at, at + MARKER
    return edges


# -- The tier of the required dependencies: simplejpeg, which decodes whole files, given smaller files.
#
# In a file with restart markers, the segments around the part make a file of their own. In any other, a smaller height in the header
# leaves out the rows below the part: a scan runs from top to bottom, so libjpeg stops early and skips the rest.

# Reduced pictures of two scales of libjpeg may have one size, if this is all they have: which one is meant isn't sure.
_TINY = 8


class SimpleDecoder(Decoder):
    tier = "simplejpeg"

    def __init__(self) -> None:
        self._scratch, self._pixels = Scratch(), Scratch()

    def fast(self, data: Buffer, header: Header, request: Request) -> Pixels | None:
        source, y, x = np.frombuffer(as_bytes(data), np.uint8), request.top, request.left
        found = window(header, request)
        sliced = cut(source, header, found, self._scratch) if found else None
        if found and sliced is not None:
            part = found.part
            pixels = self._decode(sliced, part.height, part.width, request, strict=False)
            y, x = y - part.top // request.shrink, x - part.left // request.shrink
        else:
            pixels = self._decode_upper(source, header, request)
        return None if pixels is None else pixels[y : y + request.height, x : x + request.width]

    def _decode_upper(self, source: Pixels, header: Header, request: Request) -> Pixels | None:
        """The picture down to below the part, where that leaves something out."""
        height = (request.bottom + 1) * request.shrink  # one row more: the colour is smoothed with it
        if height >= header.height or header.reach is not Reach.PART:
            return self._decode(source, header.height, header.width, request, header.reach is not Reach.PART)
        if not source.flags.writeable:
            data = self._scratch.of(source.size)
            data[:] = source
            source = data
        # In memory that may be written to, the height is put right again: the next call may ask for another part.
        write_size(source, header.frame_at, height, header.width)
        try:
            return self._decode(source, height, header.width, request, strict=False)
        finally:
            write_size(source, header.frame_at, header.height, header.width)

    def _decode(self, source: Pixels, height: int, width: int, request: Request, strict: bool) -> Pixels | None:
        """The whole of a file that should be height x width; None if simplejpeg thinks otherwise or can't, or, if `strict`,
        warns. In a file of one scan warnings are not errors, among them the one about the rows left out."""
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
