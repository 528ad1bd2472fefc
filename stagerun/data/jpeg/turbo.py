"""TurboJPEG's interface, version 3, of a libjpeg-turbo found on this machine.

The numbers of parameters and pixel formats are those of libjpeg-turbo/libjpeg-turbo: `src/turbojpeg.h`.
"""

import ctypes
import functools
import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stagerun.base.errors import UsageError

ENVIRONMENT = "STAGERUN_TURBOJPEG"
HINT = "pip install 'stagerun[fast]', or install libturbojpeg 3 and name the file in " + ENVIRONMENT

DECOMPRESS, TRANSFORM = 1, 2
WIDTH, HEIGHT, OPTIMIZE, RESTART_BLOCKS = 5, 6, 11, 18
COPY_NONE = 64
BGR, GREY = 1, 6
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


def turbojpeg() -> Library:
    """The first libjpeg-turbo of version 3 that is found. UsageError if there is none, or the one that the environment names can't be used."""
    return _first(os.environ.get(ENVIRONMENT, ""))


@functools.cache
def _first(environment: str) -> Library:
    """`environment` is all that it depends on."""
    for path in (environment,) if environment else candidates():
        try:
            return _load(path)
        except (OSError, AttributeError) as error:
            if environment:
                text = f"{ENVIRONMENT} names what is not a libjpeg-turbo of version 3: {error}"
                raise UsageError(text, f"correct {ENVIRONMENT}, or unset it") from None
    raise UsageError(f"no libjpeg-turbo of version 3 was found: {HINT}")


def candidates() -> Iterator[str]:
    """Files that may hold the functions, best first."""
    yield "libturbojpeg.so.0"
    # Two wheels that bring a libjpeg-turbo along, found without importing them.
    for package, pattern in (("pylibjxl", "_pylibjxl*.so"), ("turbojpeg", "../turbojpeg.libs/libturbojpeg-*.so*")):
        found = importlib.util.find_spec(package)
        for folder in (found.submodule_search_locations if found else None) or ():
            yield from sorted(str(file) for file in Path(folder).glob(pattern))


def _load(path: str) -> Library:
    """OSError if it can't be loaded, AttributeError if it lacks a function.

    Its symbols stay its own (RTLD_LOCAL): a wheel's libjpeg must not be found by another extension's.
    """
    calls = ctypes.CDLL(path)
    for name, (result, arguments) in FUNCTIONS.items():
        function = getattr(calls, name)
        function.restype, function.argtypes = result, arguments
    return Library(path, calls)
