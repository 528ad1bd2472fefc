"""TurboJPEG's interface, version 3, of a libjpeg-turbo found on this machine; and the tier that calls it by ctypes.

The numbers of parameters and pixel formats are those of libjpeg-turbo/libjpeg-turbo: `src/turbojpeg.h`.
"""

import ctypes
import importlib.util
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stagerun.data.jpeg import slices
from stagerun.data.jpeg.decoder import Decoder, Pixels, Request, Scratch, is_written, mark, scaled
from stagerun.data.jpeg.header import Buffer, Header, Reach, as_bytes
from stagerun.data.jpeg.slices import NARROWEST, Window

ENVIRONMENT = "STAGERUN_TURBOJPEG"
HINT = "pip install 'stagerun[fast]', or install libturbojpeg 3 and name the file in " + ENVIRONMENT

DECOMPRESS, TRANSFORM = 1, 2
WIDTH, HEIGHT, OPTIMIZE, RESTART_BLOCKS = 5, 6, 11, 18
COPY_NONE = 64
BGR, GREY = 1, 6
DECODED, WARNED, FAILED = 0, 1, 2  # how decoding ended; the compiled kernel's numbers too
WARNING = 0  # of tj3GetErrorCode: pixels came out all the same


class Scale(ctypes.Structure):
    _fields_ = [("numerator", ctypes.c_int), ("denominator", ctypes.c_int)]


class Region(ctypes.Structure):
    _fields_ = [("x", ctypes.c_int), ("y", ctypes.c_int), ("width", ctypes.c_int), ("height", ctypes.c_int)]


class Transform(ctypes.Structure):
    _fields_ = [
        ("region", Region),
        ("operation", ctypes.c_int),
        ("options", ctypes.c_int),
        ("data", ctypes.c_void_p),
        ("filter", ctypes.c_void_p),
    ]


_int, _pointer, _size = ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t
# name -> (result, arguments)
FUNCTIONS = {
    "tj3Init": (_pointer, (_int,)),
    "tj3Destroy": (None, (_pointer,)),
    "tj3Free": (None, (_pointer,)),
    "tj3Get": (_int, (_pointer, _int)),
    "tj3Set": (_int, (_pointer, _int, _int)),
    "tj3GetErrorCode": (_int, (_pointer,)),
    "tj3GetErrorStr": (ctypes.c_char_p, (_pointer,)),
    "tj3DecompressHeader": (_int, (_pointer, _pointer, _size)),
    "tj3SetScalingFactor": (_int, (_pointer, Scale)),
    "tj3SetCroppingRegion": (_int, (_pointer, Region)),
    "tj3Decompress8": (_int, (_pointer, _pointer, _size, _pointer, _int, _int)),
    "tj3Transform": (
        _int,
        (_pointer, _pointer, _size, _int, ctypes.POINTER(_pointer), ctypes.POINTER(_size), ctypes.POINTER(Transform)),
    ),
}


@dataclass(frozen=True, slots=True)
class Library:
    path: str
    calls: ctypes.CDLL


def candidates() -> Iterator[str]:
    """Files that may hold the functions, best first. The one named in the environment is the only one, if any is."""
    if named := os.environ.get(ENVIRONMENT):
        yield named
        return
    yield "libturbojpeg.so.0"
    yield str(Path(sys.prefix, "lib", "libturbojpeg.so.0"))  # conda's, which ld.so doesn't search
    # Two wheels that bring a libjpeg-turbo along, found without importing them.
    for package, pattern in (("pylibjxl", "_pylibjxl*.so"), ("turbojpeg", "../turbojpeg.libs/libturbojpeg-*.so*")):
        found = importlib.util.find_spec(package)
        for folder in (found.submodule_search_locations if found else None) or ():
            yield from sorted(str(file) for file in Path(folder).glob(pattern))


def load(path: str) -> Library:
    """The library; OSError if it can't be loaded, AttributeError if it lacks a function.

    Its symbols stay its own (RTLD_LOCAL): a wheel's libjpeg must not be found by another extension's.
    """
    calls = ctypes.CDLL(path)
    for name, (result, arguments) in FUNCTIONS.items():
        function = getattr(calls, name)
        function.restype, function.argtypes = result, arguments
    return Library(path, calls)


def region(header: Header, request: Request, top: int, left: int, height: int, width: int) -> Region | None:
    """What to decode of a file that is the rectangle (top, left, height, width) of the picture; None: all of it.

    In reduced pixels of that file. The left edge must be that of an MCU; two rows and a column more than the part are
    taken for the smoothing of the colour, and never so few columns that there is none.
    """
    shrink = request.shrink
    height, width = scaled(height, shrink), scaled(width, shrink)
    if header.reach is not Reach.PART or shrink * NARROWEST > width:
        return None
    y, x = request.top - top // shrink, request.left - left // shrink
    step = 8 * header.sampling[0][0] // shrink if header.components > 1 else 8 // shrink
    begin = max(0, min(x - 1, width - NARROWEST)) // step * step
    end = min(width, max(x + request.width + 1, begin + NARROWEST))
    first, last = max(0, y - 2), min(height, y + request.height + 2)
    if end - begin == width and last - first == height:
        return None
    return Region(begin, first, end - begin, last - first)


class TurboDecoder(Decoder):
    """Slices in Python, and of what is left only the rows and columns that are needed."""

    tier = "turbojpeg"

    def __init__(self, library: Library) -> None:
        self.library = library.path
        self._calls = library.calls
        self._scratch, self._pixels = Scratch(), Scratch()

    def fast(self, data: Buffer, header: Header, request: Request) -> Pixels | None:
        source = np.frombuffer(as_bytes(data), np.uint8)
        top, left, height, width = 0, 0, header.height, header.width
        window = slices.window(header, request)
        sliced = self._cut(source, header, window) if window else None
        if window and sliced is not None:
            source, top, left, height, width = sliced, window.top, window.left, window.height, window.width
        wanted = region(header, request, top, left, height, width)
        pixels = self._decode(source, height, width, wanted, request, forgiving=header.reach is Reach.PART)
        if pixels is None:
            return None
        y, x = request.top - top // request.shrink, request.left - left // request.shrink
        if wanted is not None:
            y, x = y - wanted.y, x - wanted.x
        return pixels[y : y + request.height, x : x + request.width]

    def _cut(self, source: Pixels, header: Header, window: Window) -> Pixels | None:
        return slices.cut(source, header, window, self._scratch)

    def _decode(
        self, source: Pixels, height: int, width: int, wanted: Region | None, request: Request, forgiving: bool
    ) -> Pixels | None:
        """The region of a file that should be height x width; None if the library thinks otherwise or can't, or, unless
        `forgiving`, warns."""
        rows, columns = scaled(height, request.shrink), scaled(width, request.shrink)
        if wanted is not None:
            rows, columns = wanted.height, wanted.width
        pixels = self._pixels.of(rows * columns * request.channels).reshape(rows, columns, request.channels)
        mark(pixels)
        outcome = self._outcome(source, height, width, wanted, request, pixels)
        usable = outcome == DECODED or (outcome == WARNED and forgiving and is_written(pixels))
        return pixels if usable else None

    def _outcome(
        self, source: Pixels, height: int, width: int, wanted: Region | None, request: Request, pixels: Pixels
    ) -> int:
        """Decodes into `pixels`: DECODED, WARNED or FAILED."""
        # Each picture has a handle of its own (1 us). A used one keeps tables, with which a file that lacks them would
        # be decoded, and a region: one that isn't within the next picture makes the library loop for ever.
        handle = self._calls.tj3Init(DECOMPRESS)
        if not handle:
            raise MemoryError("libjpeg-turbo gives no decoder")
        try:
            calls, at, size = self._calls, source.ctypes.data, source.size
            if calls.tj3DecompressHeader(handle, at, size) and calls.tj3GetErrorCode(handle) != WARNING:
                return FAILED
            # `pixels` is for the size that `read_header` found: more must not be written.
            if (calls.tj3Get(handle, HEIGHT), calls.tj3Get(handle, WIDTH)) != (height, width):
                return FAILED
            if calls.tj3SetScalingFactor(handle, Scale(1, request.shrink)):
                return FAILED
            if wanted is not None and calls.tj3SetCroppingRegion(handle, wanted):
                return FAILED
            failed = calls.tj3Decompress8(handle, at, size, pixels.ctypes.data, 0, pixel_format(request))
            if not failed:
                return DECODED
            return WARNED if calls.tj3GetErrorCode(handle) == WARNING else FAILED
        finally:
            self._calls.tj3Destroy(handle)


def pixel_format(request: Request) -> int:
    return BGR if request.channels == 3 else GREY
