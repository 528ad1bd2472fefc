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

from stagerun.base.errors import StagerunError, UsageError, listing, nearest
from stagerun.data.jpeg.decoder import Decoder, Request, by_opencv
from stagerun.data.jpeg.header import read_header
from stagerun.data.jpeg.slices import SimpleDecoder
from stagerun.data.jpeg.turbo import ENVIRONMENT, HINT, Library, TurboDecoder, candidates, load


@dataclass(frozen=True, slots=True)
class TierState:
    """`reason` says what is missing and how to get it; '' if it is available. `about` says what it does.

    `library` is the file of the libjpeg-turbo that was found for it; '' if it brings its own.
    """

    name: str
    available: bool
    reason: str
    about: str
    library: str


class _Missing(StagerunError):
    """A tier can't be had on this machine; never leaves this module."""


def tiers() -> tuple[TierState, ...]:
    """Every tier, fastest first. Each is tried, which takes a second."""
    found = []
    for name, (about, _) in _TIERS.items():
        try:
            decoder = _tested(name)()
        except _Missing as missing:
            found.append(TierState(name, False, missing.message, about, ""))
        else:
            library = decoder.library if isinstance(decoder, TurboDecoder) else ""
            found.append(TierState(name, True, "", about, library))
    return tuple(found)


def make_decoder(tier: str | None = None) -> Decoder:
    """A decoder for one thread, of the named tier or the fastest there is.

    UsageError if there is no such tier, or it isn't available, or STAGERUN_TURBOJPEG names what can't be used.
    """
    if tier is not None:
        if tier not in _TIERS:
            hint = nearest(tier, _TIERS) or f"it is one of {listing(list(_TIERS))}"
            raise UsageError(f"there is no way to decode JPEGs called `{tier}`", hint)
        try:
            return _tested(tier)()
        except _Missing as missing:
            raise UsageError(f"JPEGs can't be decoded by `{tier}`: {missing.message}") from None
    if os.environ.get(ENVIRONMENT):
        try:
            _library(os.environ[ENVIRONMENT])
        except _Missing as missing:
            raise UsageError(missing.message, f"correct {ENVIRONMENT}, or unset it") from None
    for name in _TIERS:
        try:
            return _tested(name)()
        except _Missing:
            continue
    raise UsageError("no way to decode JPEGs gives the right pixels", "install opencv-python-headless again")


def turbojpeg() -> Library:
    """The libjpeg-turbo that the fast tiers use. UsageError if there is none."""
    try:
        return _library(os.environ.get(ENVIRONMENT, ""))
    except _Missing as missing:
        raise UsageError(missing.message) from None


# Making the first decoder of a kind loads, tests and may compile; threads that start together do it once.
_once = threading.RLock()


def _tested(name: str) -> Callable[[], Decoder]:
    with _once:
        return _tested_once(name, os.environ.get(ENVIRONMENT, ""))


@functools.cache
def _tested_once(name: str, environment: str) -> Callable[[], Decoder]:
    """What makes a decoder of that tier. _Missing, which isn't kept, if it can't be had or gives other pixels."""
    make = _TIERS[name][1](environment)
    if name != "opencv" and not same_pixels(make()):
        raise _Missing("on this machine it gives other pixels than OpenCV, or none")
    return make


def _library(environment: str) -> Library:
    with _once:
        return _library_once(environment)


@functools.cache
def _library_once(environment: str) -> Library:
    """The first libjpeg-turbo that gives the right pixels. `environment` is all that it depends on."""
    why = ""
    for path in candidates():
        try:
            library = load(path)
            if same_pixels(TurboDecoder(library)):
                return library
            why = f"{path} gives other pixels than OpenCV, or none"
        except OSError as error:
            why = str(error)
        except AttributeError as error:
            why = f"{path} is not a libjpeg-turbo of version 3: {error}"
        if environment:
            raise _Missing(f"{ENVIRONMENT} names what can't be used: {why}")
    raise _Missing(f"no libjpeg-turbo of version 3 was found: {HINT}")


def _compiled(environment: str) -> Callable[[], Decoder]:
    library = _library(environment)
    try:
        from stagerun.data.jpeg.compiled import CompiledDecoder, compiled

        kernels = compiled(library)
    except ModuleNotFoundError as error:
        raise _Missing(f"{error.name} is not installed: pip install 'stagerun[fast]'") from None
    except Exception as error:  # numba has many ways to say that it doesn't go with this numpy, Python or machine
        raise _Missing(f"numba can't be used: {' '.join(str(error).split())}") from None
    return functools.partial(CompiledDecoder, library, *kernels)


def _turbojpeg(environment: str) -> Callable[[], Decoder]:
    return functools.partial(TurboDecoder, _library(environment))


# name -> (what it does, what gives its maker), fastest first
_TIERS: dict[str, tuple[str, Callable[[str], Callable[[], Decoder]]]] = {
    "compiled": ("the same as turbojpeg, compiled", _compiled),
    "turbojpeg": ("decodes the part alone, reads the part alone of prepared files", _turbojpeg),
    "simplejpeg": (
        "decodes the rows down to the part, reads the part alone of prepared files",
        lambda _: SimpleDecoder,
    ),
    "opencv": ("decodes the whole picture", lambda _: Decoder),
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
