"""The fastest tier: cutting and decoding compiled, without the GIL. Imports numba: a quarter of a second; so only making a decoder does.

The compiled code calls the functions of libjpeg-turbo and two of libc by private names, never another library's functions of the same
name. It is compiled in every process (0.4 seconds) and not kept on disk, where numba would pickle it. Its arguments are numbers and
arrays: Python would unpack an object at each call. The kernels check every bound.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import llvmlite.binding
import numba
import numpy as np
from numba.core import types

from stagerun.data.jpeg import BGR, DECOMPRESS, FUNCTIONS, GREY, HEIGHT, WARNING, WIDTH, Library, decoder
from stagerun.data.jpeg.decoder import NARROWEST, Decoder, Pixels, Rectangle, Request, Scratch, is_written, mark, scaled
from stagerun.data.jpeg.header import Buffer, Header, Reach, as_bytes

Kernel = Callable[..., int]
DECODED, WARNED, FAILED = 0, 1, 2  # how decoding ended

_i32, _i64, _address = types.int32, types.int64, types.intp
_read = types.Array(types.uint8, 1, "C", readonly=True)  # takes writable arrays too
_write = types.Array(types.uint8, 1, "C")


def _external(name: str, signature: Any) -> Any:
    return types.ExternalFunction(f"stagerun_{name}", signature)


# Structures of up to 16 bytes travel as whole 64-bit words in both calling conventions (x86-64 System V, AArch64).
_init = _external("tj3Init", _address(_i32))
_destroy = _external("tj3Destroy", types.void(_address))
_get = _external("tj3Get", _i32(_address, _i32))
_error_code = _external("tj3GetErrorCode", _i32(_address))
_header = _external("tj3DecompressHeader", _i32(_address, _address, types.uintp))
_scale = _external("tj3SetScalingFactor", _i32(_address, _i64))
_region = _external("tj3SetCroppingRegion", _i32(_address, _i64, _i64))
_decompress = _external("tj3Decompress8", _i32(_address, _address, types.uintp, _address, _i32, _i32))
_find = _external("memchr", _address(_address, _i32, types.uintp))
_copy = _external("memcpy", _address(_address, _address, types.uintp))


def _bind(library: Library) -> None:
    """Bind the functions for code compiled from now on."""
    libc = ctypes.CDLL(None)
    for calls, names in ((library.calls, FUNCTIONS), (libc, ("memchr", "memcpy"))):
        for name in names:
            address = ctypes.cast(getattr(calls, name), ctypes.c_void_p).value
            llvmlite.binding.add_symbol(f"stagerun_{name}", address)


def _cut(
    source: Any,
    scratch: Any,
    scan_at: int,
    frame_at: int,
    grid_rows: int,
    grid_columns: int,
    first_row: int,
    rows: int,
    first_column: int,
    columns: int,
    height: int,
    width: int,
) -> int:
    """Cut as `decoder.cut` does; return the bytes written to `scratch`, 0 if the restart markers don't fit the grid."""
    # A cut is at most as long as its file, but for the marker at its end.
    if scan_at > source.size or frame_at + 9 > scan_at or scratch.size < source.size + 2:
        return 0
    data, out = source.ctypes.data, scratch.ctypes.data
    _copy(out, data, np.uint64(scan_at))
    scratch[frame_at + 5], scratch[frame_at + 6] = height >> 8, height & 255
    scratch[frame_at + 7], scratch[frame_at + 8] = width >> 8, width & 255
    count, wanted, last = grid_rows * grid_columns, (first_row + rows) * grid_columns, source.size - 1
    at = begin = target = scan_at
    row = column = number = 0
    for segment in range(wanted):
        code: Any = 0
        while code == 0 or code == 0xFF:
            if at >= last:
                return 0
            hit = _find(data + at, np.int32(0xFF), np.uint64(last - at))
            if hit == 0:
                return 0
            at = hit - data
            code = np.int64(source[at + 1])
            at += 2 if code == 0 else (1 if code == 0xFF else 0)
        if segment == count - 1:
            if code & 0xF8 == 0xD0:
                return 0
        elif code != 0xD0 | (segment & 7):
            return 0
        if row >= first_row and first_column <= column < first_column + columns:
            _copy(out + target, data + begin, np.uint64(at - begin))
            target += at - begin + 2
            scratch[target - 2], scratch[target - 1] = 0xFF, 0xD0 | (number & 7)
            number += 1
        at += 2
        begin = at
        column += 1
        if column == grid_columns:
            row, column = row + 1, 0
    scratch[target - 1] = 0xD9
    return target


def _decode(
    source: Any,
    size: int,
    height: int,
    width: int,
    shrink: int,
    x: int,
    y: int,
    region_width: int,
    region_height: int,
    pixels: Any,
    channels: int,
    pixel_format: int,
) -> int:
    """Decode the region of the file in source[:size] into `pixels`. Return DECODED, WARNED, or FAILED if the library fails or reads
    another size, for which `pixels` has no room. A region of the width 0 is the whole.

    Each picture gets a new handle (1 us). A used one keeps its tables, with which a file that lacks them would be decoded, and its
    region: if that exceeds the next picture, the library loops forever.
    """
    rows, columns = -(-height // shrink), -(-width // shrink)
    if region_width > 0:
        rows, columns = region_height, region_width
    if size > source.size or rows * columns * channels > pixels.size:
        return FAILED
    data = source.ctypes.data
    handle = _init(np.int32(DECOMPRESS))
    if handle == 0:
        return FAILED
    ready = _header(handle, data, np.uint64(size)) == 0 or _error_code(handle) == WARNING
    ready = ready and _get(handle, np.int32(HEIGHT)) == height and _get(handle, np.int32(WIDTH)) == width
    ready = ready and _scale(handle, np.int64(1) | np.int64(shrink) << 32) == 0
    if ready and region_width > 0:
        ready = _region(handle, np.int64(x) | np.int64(y) << 32, np.int64(columns) | np.int64(rows) << 32) == 0
    outcome = FAILED
    if ready:
        if _decompress(handle, data, np.uint64(size), pixels.ctypes.data, np.int32(0), np.int32(pixel_format)) == 0:
            outcome = DECODED
        elif _error_code(handle) == WARNING:
            outcome = WARNED
    _destroy(handle)
    return outcome


def compiled(library: Library) -> tuple[Kernel, Kernel]:
    """Return `_cut` and `_decode`, compiled."""
    _bind(library)  # first: compiled code that lacks a function ends the process
    cut = numba.njit(_i64(_read, _write, *[_i64] * 10), nogil=True)(_cut)
    decode = numba.njit(_i64(_read, *[_i64] * 8, _write, _i64, _i64), nogil=True)(_decode)
    return cut, decode


def _region_of(header: Header, request: Request, part: Rectangle) -> Rectangle:
    """Return the region to decode of a file that is `part` of the picture, in reduced pixels of that file.

    The left edge must be an MCU's; it has two more rows and one more column than the request, for the smoothing of the colour, and
    always enough columns for it.
    """
    shrink = request.shrink
    height, width = scaled(part.height, shrink), scaled(part.width, shrink)
    if header.reach is not Reach.PART or shrink * NARROWEST > width:
        return Rectangle(0, 0, height, width)
    y, x = request.top - part.top // shrink, request.left - part.left // shrink
    step = 8 * header.sampling[0][0] // shrink if header.components > 1 else 8 // shrink
    begin = max(0, min(x - 1, width - NARROWEST)) // step * step
    end = min(width, max(x + request.width + 1, begin + NARROWEST))
    first, last = max(0, y - 2), min(height, y + request.height + 2)
    return Rectangle(first, begin, last - first, end - begin)


class CompiledDecoder(Decoder):
    """Cuts, and decodes only the needed rows and columns of the cut, in two compiled calls per picture."""

    tier = "compiled"

    def __init__(self, cut: Kernel, decode: Kernel) -> None:
        self._cut, self._decode = cut, decode
        self._scratch, self._pixels = Scratch(), Scratch()

    def fast(self, data: Buffer, header: Header, request: Request) -> Pixels | None:
        source, part = np.frombuffer(as_bytes(data), np.uint8), Rectangle(0, 0, header.height, header.width)
        if window := decoder.window(header, request):
            cells, cut = window.cells, window.part
            sliced = self._scratch.of(source.size + 2)  # and a marker
            cells_at = window.first_row, window.rows, window.first_column, window.columns
            grid = header.scan_at, header.frame_at, cells.rows, cells.columns
            if size := self._cut(source, sliced, *grid, *cells_at, cut.height, cut.width):
                source, part = sliced[:size], cut
        region = _region_of(header, request, part)
        rows, columns, shrink = region.height, region.width, request.shrink
        # A region of the width 0 is the whole.
        whole = (rows, columns) == (scaled(part.height, shrink), scaled(part.width, shrink))
        wanted = (0, 0, 0, 0) if whole else (region.left, region.top, columns, rows)
        pixels = self._pixels.of(rows * columns * request.channels).reshape(rows, columns, request.channels)
        mark(pixels)
        colours = request.channels, BGR if request.channels == 3 else GREY
        outcome = self._decode(
            source, source.size, part.height, part.width, shrink, *wanted, pixels.reshape(-1), *colours
        )
        # In a file of one scan a warning isn't an error.
        forgiven = outcome == WARNED and header.reach is Reach.PART and is_written(pixels)
        if outcome != DECODED and not forgiven:
            return None
        y, x = request.top - part.top // shrink - region.top, request.left - part.left // shrink - region.left
        return pixels[y : y + request.height, x : x + request.width]
