"""Pillow's BILINEAR: each pixel of the result is a mean of all that it covers, with weights that fall linearly to its neighbours.

The method is Pillow's (python-pillow/Pillow: src/libImaging/Resample.c): weights in 64-bit floating point, rounded to 22 bits; first
across, then down, rounded to 8 bits in between. Pillow up to version 12 always has that order; from 13 on it goes down first where
the height shrinks by much more than the width, which changes some values by one. Here the order stays, so that the
pixels don't depend on Pillow's version.

With the extra `fast` it is compiled here, 5 to 8 times as fast as Pillow itself; the pixels are the same, bit for bit, which is
tried at first use.
"""

import functools
import math
import threading
from collections.abc import Callable
from typing import Any

import cv2
import numpy as np
import PIL.Image

from stagerun.data.picture import Image

# uint8[n, m], uint8[k, m] -> None: the second becomes the first, resized along its first axis.
_Along = Callable[[Image, Image], None]

_WEIGHT_BITS = 22
_ONE = float(1 << _WEIGHT_BITS)
_HALF = 1 << (_WEIGHT_BITS - 1)

# Threads that start together compile once.
_once = threading.Lock()


def antialias(image: Image, out: Image) -> None:
    """`out`, uint8[height, width, channels] and C-contiguous, becomes the whole of `image`, uint8[height', width', channels]."""
    with _once:
        along = _compiled()
    if along is None:
        _by_pillow(image, out)
    else:
        _by(along, image, out)


def _by_pillow(image: Image, out: Image) -> None:
    height, width, channels = out.shape
    picture = PIL.Image.fromarray(image[:, :, 0] if channels == 1 else image)
    for size in ((width, picture.height), (width, height)):  # one at a time: then the order is ours
        picture = picture.resize(size, PIL.Image.Resampling.BILINEAR)
    out[...] = np.asarray(picture, np.uint8).reshape(out.shape)


def _by(along: _Along, image: Image, out: Image) -> None:
    """Both passes go down the columns of memory, where the processor takes 16 pixels at a time: so the first one is transposed."""
    height, width, channels = image.shape
    new_height, new_width, _ = out.shape
    turned = np.empty((width, height, channels), np.uint8)
    cv2.transpose(image, dst=turned)
    across = np.empty((new_width, height, channels), np.uint8)
    along(turned.reshape(width, height * channels), across.reshape(new_width, height * channels))
    back = np.empty((height, new_width, channels), np.uint8)
    cv2.transpose(across, dst=back)
    along(back.reshape(height, new_width * channels), out.reshape(new_height, new_width * channels))


@functools.cache
def _compiled() -> _Along | None:
    """None where numba isn't, can't be used with this Python or numpy, or where its pixels aren't Pillow's."""
    try:
        import numba
        from numba.core import types

        read = types.Array(types.uint8, 2, "C", readonly=True)  # takes writable arrays too
        # Not kept on disk: numba would do so with pickle. 0.4 seconds in each process that resizes in this way.
        along: _Along = numba.njit(types.void(read, types.Array(types.uint8, 2, "C")), nogil=True)(_along)
    except Exception:  # numba has many ways to say that it doesn't go with this numpy, Python or machine
        return None
    return along if _same_pixels(along) else None


def _same_pixels(along: _Along) -> bool:
    """Whether some pictures, shrunk and enlarged, are as Pillow's."""
    picture = (np.arange(61 * 47 * 3, dtype=np.uint32) * 2654435761 >> 24).astype(np.uint8).reshape(61, 47, 3)
    for height, width in ((32, 32), (7, 90), (61, 46), (1, 1)):
        ours, pillows = (np.empty((height, width, 3), np.uint8) for _ in range(2))
        _by(along, picture, ours)
        _by_pillow(picture, pillows)
        if not np.array_equal(ours, pillows):
            return False
    return True


def _along(source: Any, target: Any) -> None:
    """What is compiled. `source` is uint8[n, m], `target` uint8[k, m], both with rows of m pixels."""
    n, m = source.shape
    k = target.shape[0]
    scale = n / k
    reach = max(scale, 1.0)
    weights = np.empty(math.ceil(reach) * 2 + 1, np.float64)
    rounded = np.empty(weights.size, np.int32)
    sums = np.empty(m, np.int32)
    for row in range(k):
        centre = (row + 0.5) * scale
        first, end = max(0, int(centre - reach + 0.5)), min(n, int(centre + reach + 0.5))
        total = 0.0
        for i in range(end - first):
            weights[i] = max(0.0, 1.0 - abs((i + first - centre + 0.5) * (1.0 / reach)))
            total += weights[i]
        for i in range(end - first):
            rounded[i] = np.int32(0.5 + weights[i] / total * _ONE)
        to = target[row]
        if end - first <= 4:  # in one go; what isn't there weighs nothing
            a, b, c, d = np.int32(0), np.int32(0), np.int32(0), np.int32(0)
            a = rounded[0]
            if end - first > 1:
                b = rounded[1]
            if end - first > 2:
                c = rounded[2]
            if end - first > 3:
                d = rounded[3]
            p, q = source[first], source[min(first + 1, n - 1)]
            r, s = source[min(first + 2, n - 1)], source[min(first + 3, n - 1)]
            for j in range(m):
                sum_ = np.int32(
                    _HALF + a * np.int32(p[j]) + b * np.int32(q[j]) + c * np.int32(r[j]) + d * np.int32(s[j])
                )
                to[j] = np.uint8(sum_ >> _WEIGHT_BITS)
            continue
        for j in range(m):
            sums[j] = np.int32(_HALF)
        for i in range(end - first):
            weight, line = rounded[i], source[first + i]
            for j in range(m):
                sums[j] += weight * np.int32(line[j])
        for j in range(m):
            to[j] = np.uint8(sums[j] >> _WEIGHT_BITS)
