"""JPEG to pixels: headers, decoding of the whole or a part, and the choice of the fastest tier that this machine supports.

All tiers give the same pixels and refuse the same damaged files (`decoder` has the evidence); the choice changes only the speed.
"""

# ruff: noqa: F401 (its imports are its names)

import ctypes
import functools
import importlib.util
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np

from stagerun.base.errors import UsageError
from stagerun.data.jpeg.decoder import Decoder, Rectangle, Request, SimpleDecoder, by_opencv
from stagerun.data.jpeg.header import EXIF, MAX_PIXELS, BadImage, exif_of, is_complete, read_header

ENVIRONMENT = "STAGERUN_TURBOJPEG"
HINT = "pip install 'stagerun[fast]', or install libturbojpeg 3 and name the file in " + ENVIRONMENT


MakeDecoder = Callable[[], Decoder]


@dataclass(frozen=True, slots=True)
class TierState:
    name: str
    available: bool
    reason: str  # what is missing and how to get it; '' if it is available


def tiers() -> tuple[TierState, ...]:
    """Test and return every tier, fastest first. This takes a second."""
    return tuple(TierState(name, make is not None, reason) for name in _TIERS for make, reason in [_tested(name)])


def make_decoder(tier: str | None = None) -> Decoder:
    """Return a decoder for one thread, of the named tier or the fastest available.

    UsageError if the tier isn't available, or for an unusable STAGERUN_TURBOJPEG.
    """

    if tier is None and os.environ.get(ENVIRONMENT):
        turbojpeg()
    reason = ""
    for name in _TIERS if tier is None else (tier,):
        make, reason = _tested(name)
        if make is not None:
            return make()
    raise UsageError(f"JPEGs can't be decoded by `{tier}`: {reason}")


# The first decoder of a kind loads, tests and may compile; threads that start together do it once.
_once = threading.RLock()


def _tested(name: str) -> tuple[MakeDecoder | None, str]:
    """Return a function that makes a decoder of that tier, or None and the reason."""
    with _once:
        return _tested_once(name, os.environ.get(ENVIRONMENT, ""))


@functools.cache
def _tested_once(name: str, environment: str) -> tuple[MakeDecoder | None, str]:
    try:
        make = _TIERS[name]()
    except ModuleNotFoundError as error:
        return None, f"{error.name} is not installed: pip install 'stagerun[fast]'"
    except UsageError as error:
        return None, error.message
    except Exception as error:  # numba raises many kinds of errors if it doesn't fit this numpy, Python or machine
        return None, f"numba can't be used: {' '.join(str(error).split())}"
    if name != "opencv" and not same_pixels(make()):
        return None, "on this machine it gives other pixels than OpenCV, or none"
    return make, ""


def _compiled() -> MakeDecoder:
    library = turbojpeg()
    from stagerun.data.jpeg.compiled import CompiledDecoder, compiled

    return functools.partial(CompiledDecoder, *compiled(library))


# Makers by tier, fastest first.
_TIERS: dict[str, Callable[[], MakeDecoder]] = {
    "compiled": _compiled,  # decodes the part alone, reads the part alone of prepared files
    "simplejpeg": lambda: SimpleDecoder,  # decodes the rows down to the part, reads the part alone of prepared files
    "opencv": lambda: Decoder,  # decodes the whole picture
}


# -- Each tier is tested before use: the library may be of any version.

_SIZE = 72, 192  # 12 blocks of 16 pixels across, 6 of 32: intervals of 4 and 3, as `prepare` writes them
_SAMPLINGS = (
    cv2.IMWRITE_JPEG_SAMPLING_FACTOR_420,
    cv2.IMWRITE_JPEG_SAMPLING_FACTOR_422,
    cv2.IMWRITE_JPEG_SAMPLING_FACTOR_440,
    cv2.IMWRITE_JPEG_SAMPLING_FACTOR_444,
    cv2.IMWRITE_JPEG_SAMPLING_FACTOR_411,
)
# The whole, and a part of the picture reduced by each.
_REQUESTS = [(0, 0, *_SIZE, 1), *((21 // n, 30 // n, 33 // n, 99 // n, n) for n in (1, 2, 4, 8))]


def same_pixels(decoder: Decoder) -> bool:
    """Return whether small pictures and their parts, with and without restart markers, of every sampling, progressive and grey, whole
    and reduced, decode as by OpenCV.

    Calls the tier's `fast`: `decode` would fall back to OpenCV.
    """
    colour = [picture(interval, sampling) for interval, sampling in itertools.product((0, 1, 4), _SAMPLINGS)]
    colour += [picture(3, cv2.IMWRITE_JPEG_SAMPLING_FACTOR_411), picture(progressive=True)]
    grey = [picture(interval, grey=True) for interval in (0, 4)]
    cases = [*itertools.product(colour, [3], _REQUESTS), *itertools.product(grey, [1, 3], _REQUESTS)]

    def same(data: bytes, wanted: Request) -> bool:
        header = read_header(data)
        pixels = decoder.fast(data, header, wanted)
        return pixels is not None and np.array_equal(pixels, by_opencv(data, header, wanted))

    return all(same(data, Request(*wanted, channels)) for data, channels, wanted in cases)


def picture(
    interval: int = 0,
    sampling: int = cv2.IMWRITE_JPEG_SAMPLING_FACTOR_420,
    *,
    progressive: bool = False,
    grey: bool = False,
) -> bytes:
    """Return a JPEG of stripes and edges, with a restart marker after every `interval` MCUs."""
    y, x = np.mgrid[: _SIZE[0], : _SIZE[1]]
    image = np.stack([3 * x + y, (x ^ y) * 2, 5 * y + (x // 9 % 2) * 90], axis=-1).astype(np.uint8)
    options = [cv2.IMWRITE_JPEG_RST_INTERVAL, interval, cv2.IMWRITE_JPEG_SAMPLING_FACTOR, sampling]
    options += [cv2.IMWRITE_JPEG_PROGRESSIVE, int(progressive)]
    _, data = cv2.imencode(".jpg", image[..., 1] if grey else image, options)
    return data.tobytes()


# -- TurboJPEG's interface, version 3, of this machine's libjpeg-turbo. The numbers of parameters and pixel formats are from
# libjpeg-turbo/libjpeg-turbo: `src/turbojpeg.h`.

DECOMPRESS = 1
WIDTH, HEIGHT = 5, 6
BGR, GREY = 1, 6
WARNING = 0  # of tj3GetErrorCode: the pixels are complete

FUNCTIONS = (
    *("tj3Init", "tj3Destroy", "tj3Free", "tj3Get", "tj3Set", "tj3GetErrorCode", "tj3GetErrorStr", "tj3Transform"),
    *("tj3DecompressHeader", "tj3SetScalingFactor", "tj3SetCroppingRegion", "tj3Decompress8"),
)


@dataclass(frozen=True, slots=True)
class Library:
    path: str
    calls: ctypes.CDLL


def turbojpeg() -> Library:
    """Return the first libjpeg-turbo of version 3. UsageError without one, or if STAGERUN_TURBOJPEG names an unusable file."""
    return _first(os.environ.get(ENVIRONMENT, ""))


@functools.cache
def _first(environment: str) -> Library:
    for path in (environment,) if environment else candidates():
        try:
            # Its symbols stay private (RTLD_LOCAL): another extension must not use a wheel's libjpeg.
            calls = ctypes.CDLL(path)
            for name in FUNCTIONS:
                getattr(calls, name)
            return Library(path, calls)
        except (OSError, AttributeError) as error:
            if environment:
                text = f"{ENVIRONMENT} names what is not a libjpeg-turbo of version 3: {error}"
                raise UsageError(text, f"correct {ENVIRONMENT}, or unset it") from None
    raise UsageError(f"no libjpeg-turbo of version 3 was found: {HINT}")


def candidates() -> Iterator[str]:
    """Yield files that may have the functions, best first."""
    yield "libturbojpeg.so.0"
    # Two wheels that contain a libjpeg-turbo, found without importing them.
    for package, pattern in (("pylibjxl", "_pylibjxl*.so"), ("turbojpeg", "../turbojpeg.libs/libturbojpeg-*.so*")):
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations if spec else None) or ():
            yield from sorted(str(file) for file in Path(folder).glob(pattern))
