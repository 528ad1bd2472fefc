"""Rectangles of random area and aspect ratio: Intel Caffe's and torchvision's. Pure.

Both are the same on every machine: of floating-point arithmetic only +, -, *, / and square roots are used, whose every bit IEEE 754
fixes; no logarithm or exponential of a C library, of which no two give the same last bit.
"""

import functools
import math

import numpy as np

from stagerun.data.rectangle import Rectangle
from stagerun.order import UInt64, randint, uniform
from stagerun.recipe import RandomAspectRatio, RandomResizedCrop

# Random numbers for each attempt at a rectangle.
CAFFE_NUMBERS = 5
TORCHVISION_NUMBERS = 4

_THOUSAND = np.float32(1000)
# A logarithm of width / height is one of 2**20, evenly spaced: sides of 20,000 pixels come out in steps of 0.01 pixels.
_STEP_BITS = 10
_STEPS = 1 << _STEP_BITS


def caffe_rectangle(param: RandomAspectRatio, numbers: UInt64, height: int, width: int) -> Rectangle | None:
    """The first rectangle that fits, or None: sqrt(area) * c high, sqrt(area) / c wide, or the other way round.

    float32 throughout, as in Caffe (`data_transformer.cpp`), so that the same numbers drawn give the same rectangle. A side of 0
    pixels (images of a few pixels) doesn't fit; Caffe's resize stops there. `numbers` is uint64[CAFFE_NUMBERS * max_attempt].
    """
    area = np.float32(height * width)
    low, high = np.float32(param.aspect_ratio_change), np.float32(1) / np.float32(param.aspect_ratio_change)
    for attempt in range(param.max_attempt):
        ratio, change, swap, top, left = numbers[attempt * CAFFE_NUMBERS : (attempt + 1) * CAFFE_NUMBERS]
        side = np.sqrt(thousandths(ratio, np.float32(param.min_area_ratio), np.float32(param.max_area_ratio)) * area)
        c = thousandths(change, low, high)
        new_height, new_width = int(side * c), int(side / c)
        if randint(swap, 1001) < 500:
            new_height, new_width = new_width, new_height
        if 0 < new_height <= height and 0 < new_width <= width:
            y, x = randint(top, height - new_height + 1), randint(left, width - new_width + 1)
            return Rectangle(y, x, new_height, new_width)
    return None


def thousandths(number: int, low: np.float32, high: np.float32) -> np.float32:
    """One of low, low + 0.001, ... up to high, evenly; the number of steps is rounded down as Caffe does it."""
    steps = int((high - low) * _THOUSAND + np.float32(1))
    return np.float32((np.float32(randint(number, steps)) + low * _THOUSAND) / _THOUSAND)


def torchvision_rectangle(param: RandomResizedCrop, numbers: UInt64, height: int, width: int) -> Rectangle:
    """The first rectangle that fits, else the largest one of an allowed aspect ratio, at the centre.

    The distribution of torchvision's `RandomResizedCrop.get_params`: area drawn evenly, logarithm of width / height drawn evenly,
    sides rounded (halves to even), place drawn evenly. `numbers` is uint64[TORCHVISION_NUMBERS * max_attempt].
    """
    area = height * width
    coarse, fine = _ratios(param.min_aspect_ratio, param.max_aspect_ratio)
    for attempt in range(param.max_attempt):
        share, step, top, left = numbers[attempt * TORCHVISION_NUMBERS : (attempt + 1) * TORCHVISION_NUMBERS].tolist()
        wanted = area * (param.min_area_ratio + (param.max_area_ratio - param.min_area_ratio) * uniform(share))
        step = randint(step, _STEPS * _STEPS)
        ratio = coarse[step >> _STEP_BITS] * fine[step & (_STEPS - 1)]
        new_width, new_height = round(math.sqrt(wanted * ratio)), round(math.sqrt(wanted / ratio))
        if 0 < new_width <= width and 0 < new_height <= height:
            y, x = randint(top, height - new_height + 1), randint(left, width - new_width + 1)
            return Rectangle(y, x, new_height, new_width)
    new_width = min(width, max(1, round(height * param.max_aspect_ratio)))
    new_height = min(height, max(1, round(width / param.min_aspect_ratio)))
    return Rectangle((height - new_height) // 2, (width - new_width) // 2, new_height, new_width)


@functools.lru_cache(maxsize=64)
def _ratios(low: float, high: float) -> tuple[list[float], list[float]]:
    """low * (high / low) ** (k / 2**20) is coarse[k >> 10] * fine[k & 1023].

    (high / low) ** 2**-n is the n-th square root of square roots, and other exponents are products of these.
    """
    roots = [high / low]
    for _ in range(2 * _STEP_BITS):
        roots.append(math.sqrt(roots[-1]))
    coarse = _powers(low, roots[1 : _STEP_BITS + 1])
    return coarse, _powers(1.0, roots[_STEP_BITS + 1 :])


def _powers(start: float, roots: list[float]) -> list[float]:
    """start times the roots that the bits of 0, 1, 2 ... choose, the first root by the highest bit."""
    powers = [start]
    for root in roots:
        powers = [p for power in powers for p in (power, power * root)]
    return powers
