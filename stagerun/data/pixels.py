"""Drawn transforms and their application: cutting, padding, resizing, flipping.

From Caffe's drawn numbers cv2 5.0 makes Caffe's pixels (400 pictures, CUBIC to 224 x 224), bit for bit, unless OpenCV uses Intel's IPP.
With IPP, which only some machines have, 2 to 4 % of the values are off by one, so `_resize` turns it off.
"""

import functools
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np
import PIL.Image

from stagerun.base.recipe import InterpMode, PadMode
from stagerun.data.datum import Image, cut
from stagerun.data.jpeg import Rectangle
from stagerun.data.jpeg.decoder import Scratch

_OPENCV = {
    InterpMode.LINEAR: cv2.INTER_LINEAR,
    InterpMode.AREA: cv2.INTER_AREA,
    InterpMode.NEAREST: cv2.INTER_NEAREST,
    InterpMode.CUBIC: cv2.INTER_CUBIC,
    InterpMode.LANCZOS4: cv2.INTER_LANCZOS4,
}
# LINEAR reads the two nearest pixels each way: from this reduction on AUTO takes AREA, which reads all.
_AUTO_AREA_FROM = 1.5

_thread = threading.local()
# OpenCV works in the calling thread: its threads would disturb the loader's. The pixels are the same.
cv2.setNumThreads(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """The drawn transform of one image, in the order of its steps.

    `pad` pixels on each side; `part` cut out (None: all of it); resized to `size` = (height, width) (None: not at all);
    `crop` cut out (None: all of it); flipped left and right. `cutout`, of the finished image, is for
    the device: it becomes 0 for the network.
    """

    pad: int = 0
    pad_mode: PadMode = PadMode.ZERO
    part: Rectangle | None = None
    size: tuple[int, int] | None = None
    interp_mode: InterpMode = InterpMode.LINEAR
    crop: Rectangle | None = None
    mirror: bool = False
    cutout: Rectangle | None = None


def region(draw: Draw) -> Rectangle | None:
    """Return the part of the source image that is used; None: all of it."""
    if draw.pad:
        return None
    return draw.crop if draw.part is None and draw.size is None else draw.part


def shrink(draw: Draw, height: int, width: int) -> int:
    """Return n of 1, 2, 4 or 8: a JPEG of height x width may be decoded at 1 / n of its size (`scaled` in libjpeg) for this draw.

    More than 1 only for interp_mode AUTO, if each side is at least n times its final length. Other images have no such scale: for them
    AUTO is LINEAR or AREA from their full size, which gives slightly other pixels.
    """
    if draw.interp_mode is not InterpMode.AUTO or draw.size is None or draw.pad:
        return 1
    if draw.part is not None:
        height, width = draw.part.height, draw.part.width
    for times in (8, 4, 2):
        if height >= times * draw.size[0] and width >= times * draw.size[1]:
            return times
    return 1


def apply(image: Image, draw: Draw) -> Image:
    """Transform uint8[height, width, channels]; the result may be a view of the image."""
    return finish(cut(image, region(draw)), draw)


def finish(image: Image, draw: Draw, out: Image | None = None, shrunk: int = 1) -> Image:
    """Return the finished image from its `region`, decoded at 1 / `shrunk` of its size.

    `image` is uint8[height, width, channels]: the region's rows and columns, each divided by `shrunk` and rounded down. The
    result is `out` (uint8, C-contiguous, of the finished shape), or without it perhaps a view of `image`. ValueError for a wrong shape.
    """
    part = region(draw)
    if part is not None and image.shape[:2] != (part.height // shrunk, part.width // shrunk):
        raise ValueError(f"an image of {image.shape} is not {part} at 1/{shrunk}")
    if draw.pad:
        pad, (height, width, channels) = draw.pad, image.shape
        padded = np.empty((height + 2 * pad, width + 2 * pad, channels), np.uint8)
        border = cv2.BORDER_REFLECT_101 if draw.pad_mode is PadMode.REFLECT else cv2.BORDER_CONSTANT  # of zeros
        cv2.copyMakeBorder(image, pad, pad, pad, pad, border, dst=padded)
        image = cut(padded, draw.part)
    crop = draw.crop if draw.crop is not part else None
    if draw.size is not None:
        if crop == Rectangle(0, 0, *draw.size):
            crop = None
        last = crop is None and not draw.mirror
        to = out if last else None if out is None else _scratch((*draw.size, image.shape[2]))
        image = _resize(image, draw.size, draw.interp_mode, to)
        if last:
            return image
    image = cut(image, crop)
    if out is None:
        return image[:, ::-1] if draw.mirror else image
    if out.shape != image.shape:
        raise ValueError(f"an image of {image.shape} does not fit into {out.shape}")
    if draw.mirror:
        cv2.ipp.setUseIPP(True)  # a flip only moves bytes, and IPP moves them ten times faster
        cv2.flip(image, 1, dst=out)
    else:
        out[...] = image
    return out


def _scratch(shape: tuple[int, ...]) -> Image:
    """Return this thread's array, valid until its next call: fresh memory costs as much as the flip."""
    if not hasattr(_thread, "scratch"):
        _thread.scratch = Scratch()
    image: Image = _thread.scratch.of(math.prod(shape)).reshape(shape)
    return image


def _resize(image: Image, size: tuple[int, int], mode: InterpMode, out: Image | None) -> Image:
    """Return uint8[*size, channels], in `out` if it is passed."""
    shape = (*size, image.shape[2])
    if out is not None and out.shape != shape:
        raise ValueError(f"an image of {shape} does not fit into {out.shape}")
    if out is None:
        out = np.empty(shape, np.uint8)
    if mode is InterpMode.ANTIALIAS:
        antialias(image, out)
        return out
    if mode is InterpMode.AUTO:
        shrunk = max(image.shape[0] / size[0], image.shape[1] / size[1])
        mode = InterpMode.LINEAR if shrunk < _AUTO_AREA_FROM else InterpMode.AREA
    # This setting is per thread, so it is set for each call.
    cv2.ipp.setUseIPP(False)
    cv2.resize(image, (size[1], size[0]), dst=out, interpolation=_OPENCV[mode])
    return out


# -- Pillow's BILINEAR: each pixel of the result is a mean of all pixels that it covers, with weights that fall linearly to its neighbours.
#
# The method is Pillow's (python-pillow/Pillow: src/libImaging/Resample.c): weights in 64-bit floating point, rounded to 22 bits; first
# across, then down, rounded to 8 bits in between. Pillow from 13 on sometimes goes down first; here the order stays. With the extra `fast`
# it is compiled, 5 to 8 times as fast; the pixels are the same, bit for bit, which is tried at first use.

# uint8[n, m], uint8[k, m] -> None: the second becomes the first, resized along its first axis.
_Along = Callable[[Image, Image], None]

_WEIGHT_BITS = 22
_ONE = float(1 << _WEIGHT_BITS)
_HALF = 1 << (_WEIGHT_BITS - 1)

# Threads that start together compile once.
_once = threading.Lock()


def antialias(image: Image, out: Image) -> None:
    """Resize uint8[height', width', channels] to `out`, uint8[height, width, channels], C-contiguous."""
    with _once:
        along = _compiled()
    if along is None:
        _by_pillow(image, out)
    else:
        _by(along, image, out)


def _by_pillow(image: Image, out: Image) -> None:
    height, width, channels = out.shape
    picture = PIL.Image.fromarray(image[:, :, 0] if channels == 1 else image)
    for size in ((width, picture.height), (width, height)):  # one at a time, to fix the order
        picture = picture.resize(size, PIL.Image.Resampling.BILINEAR)
    out[...] = np.asarray(picture, np.uint8).reshape(out.shape)


def _by(along: _Along, image: Image, out: Image) -> None:
    """Resize by two passes down the columns of memory, 16 pixels at a time: the first one is transposed."""
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
    """Compile `_along`; None without a working numba, or if its pixels differ from Pillow's."""
    try:
        import numba
        from numba.core import types

        read = types.Array(types.uint8, 2, "C", readonly=True)  # takes writable arrays too
        # Not kept on disk: numba would do so with pickle. 0.4 seconds in each process that resizes in this way.
        along: _Along = numba.njit(types.void(read, types.Array(types.uint8, 2, "C")), nogil=True)(_along)
    except Exception:  # numba raises many kinds of errors if it doesn't fit this numpy, Python or machine
        return None
    return along if _same_pixels(along) else None


def _same_pixels(along: _Along) -> bool:
    """Return whether some pictures, shrunk and enlarged, equal Pillow's."""
    picture = (np.arange(61 * 47 * 3, dtype=np.uint32) * 2654435761 >> 24).astype(np.uint8).reshape(61, 47, 3)
    for height, width in ((32, 32), (7, 90), (61, 46), (1, 1)):
        ours, pillows = (np.empty((height, width, 3), np.uint8) for _ in range(2))
        _by(along, picture, ours)
        _by_pillow(picture, pillows)
        if not np.array_equal(ours, pillows):
            return False
    return True


def _along(source: Any, target: Any) -> None:
    """Resize `source`, uint8[n, m], to `target`, uint8[k, m], along the first axis. It is compiled."""
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
        for j in range(m):
            sums[j] = np.int32(_HALF)
        for i in range(end - first):
            weight, line = rounded[i], source[first + i]
            for j in range(m):
                sums[j] += weight * np.int32(line[j])
        for j in range(m):
            to[j] = np.uint8(sums[j] >> _WEIGHT_BITS)
