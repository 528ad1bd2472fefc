"""The ways to decode, fastest first, and which of them this machine has.

All of them give the same pixels of the same files, and refuse the same damaged ones (`decoder` says what is known of that);
which one is used changes nothing but the speed.
"""

import functools
import itertools
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

import cv2
import numpy as np

from stagerun.base.errors import UsageError, listing, nearest
from stagerun.data.jpeg.decoder import Decoder, Request, by_opencv
from stagerun.data.jpeg.header import read_header
from stagerun.data.jpeg.slices import SimpleDecoder
from stagerun.data.jpeg.turbo import ENVIRONMENT, turbojpeg


@dataclass(frozen=True, slots=True)
class TierState:
    """`reason` says what is missing and how to get it; '' if it is available."""

    name: str
    available: bool
    reason: str


def tiers() -> tuple[TierState, ...]:
    """Every tier, fastest first. Each is tried, which takes a second."""
    reasons = [(name, _tested(name)[1]) for name in _TIERS]
    return tuple(TierState(name, not reason, reason) for name, reason in reasons)


def make_decoder(tier: str | None = None) -> Decoder:
    """A decoder for one thread, of the named tier or the fastest there is.

    UsageError if there is no such tier, or it isn't available, or STAGERUN_TURBOJPEG names what can't be used.
    """
    if tier is not None and tier not in _TIERS:
        hint = nearest(tier, _TIERS) or f"it is one of {listing(list(_TIERS))}"
        raise UsageError(f"there is no way to decode JPEGs called `{tier}`", hint)
    if tier is None and os.environ.get(ENVIRONMENT):
        turbojpeg()
    reason = ""
    for name in _TIERS if tier is None else (tier,):
        make, reason = _tested(name)
        if make is not None:
            return make()
    raise UsageError(f"JPEGs can't be decoded by `{tier}`: {reason}")


# Making the first decoder of a kind loads, tests and may compile; threads that start together do it once.
_once = threading.RLock()


def _tested(name: str) -> tuple[Callable[[], Decoder] | None, str]:
    """What makes a decoder of that tier; or None, and why it can't be had."""
    with _once:
        return _tested_once(name, os.environ.get(ENVIRONMENT, ""))


@functools.cache
def _tested_once(name: str, environment: str) -> tuple[Callable[[], Decoder] | None, str]:
    try:
        make = _TIERS[name]()
    except ModuleNotFoundError as error:
        return None, f"{error.name} is not installed: pip install 'stagerun[fast]'"
    except UsageError as error:
        return None, error.message
    except Exception as error:  # numba has many ways to say that it doesn't go with this numpy, Python or machine
        return None, f"numba can't be used: {' '.join(str(error).split())}"
    if name != "opencv" and not same_pixels(make()):
        return None, "on this machine it gives other pixels than OpenCV, or none"
    return make, ""


def _compiled() -> Callable[[], Decoder]:
    library = turbojpeg()
    from stagerun.data.jpeg.compiled import CompiledDecoder, compiled

    return functools.partial(CompiledDecoder, *compiled(library))


# Fastest first: what gives the maker.
_TIERS: dict[str, Callable[[], Callable[[], Decoder]]] = {
    "compiled": _compiled,  # decodes the part alone, reads the part alone of prepared files
    "simplejpeg": lambda: SimpleDecoder,  # decodes the rows down to the part, reads the part alone of prepared files
    "opencv": lambda: Decoder,  # decodes the whole picture
}


# -- Whether a tier gives the pixels it should, before it is trusted: a library found may be of any version.

_SIZE = 72, 192  # 12 blocks of 16 pixels across, 6 of 32: intervals of 4 and 3, as `prepare` writes them
_SAMPLINGS = (
    cv2.IMWRITE_JPEG_SAMPLING_FACTOR_420,
    cv2.IMWRITE_JPEG_SAMPLING_FACTOR_422,
    cv2.IMWRITE_JPEG_SAMPLING_FACTOR_440,
    cv2.IMWRITE_JPEG_SAMPLING_FACTOR_444,
    cv2.IMWRITE_JPEG_SAMPLING_FACTOR_411,
)
_REQUESTS = (  # rows and columns of the reduced picture
    Request(3, 1, 0, 0, *_SIZE),
    Request(3, 1, 21, 30, 33, 45),
    Request(3, 2, 10, 15, 16, 22),
    Request(3, 4, 5, 9, 9, 25),
    Request(3, 8, 2, 6, 5, 12),
)
_GREY = Request(1, 1, 0, 0, *_SIZE), Request(1, 1, 21, 30, 33, 45), Request(1, 2, 10, 15, 16, 22)


def same_pixels(decoder: Decoder) -> bool:
    """Whether small pictures and parts of them, with restart markers and without, of every sampling, progressive and grey, are
    as OpenCV decodes them, reduced too.

    By the tier itself: `decode` would ask OpenCV where the tier fails.
    """
    colour = [picture(interval, sampling) for interval, sampling in itertools.product((0, 1, 4), _SAMPLINGS)]
    colour += [picture(3, cv2.IMWRITE_JPEG_SAMPLING_FACTOR_411), picture(progressive=True)]
    grey = [picture(interval, grey=True) for interval in (0, 4)]
    cases = [*itertools.product(colour, _REQUESTS), *itertools.product(grey, (*_GREY, _REQUESTS[1]))]
    return all(_is_same(decoder, data, wanted) for data, wanted in cases)


def _is_same(decoder: Decoder, data: bytes, wanted: Request) -> bool:
    header = read_header(data)
    pixels = decoder.fast(data, header, wanted)
    return pixels is not None and np.array_equal(pixels, by_opencv(data, header, wanted))


def picture(
    interval: int = 0,
    sampling: int = cv2.IMWRITE_JPEG_SAMPLING_FACTOR_420,
    *,
    progressive: bool = False,
    grey: bool = False,
) -> bytes:
    """A JPEG of stripes and edges, with a restart marker after every `interval` MCUs."""
    y, x = np.mgrid[: _SIZE[0], : _SIZE[1]]
    image = np.stack([3 * x + y, (x ^ y) * 2, 5 * y + (x // 9 % 2) * 90], axis=-1).astype(np.uint8)
    options = [
        *(cv2.IMWRITE_JPEG_RST_INTERVAL, interval),
        *(cv2.IMWRITE_JPEG_SAMPLING_FACTOR, sampling),
        *(cv2.IMWRITE_JPEG_PROGRESSIVE, int(progressive)),
    ]
    _, data = cv2.imencode(".jpg", image[..., 1] if grey else image, options)
    return data.tobytes()
