"""The transform of an image: `transform_param`, as in Intel's and SURFsara's Caffe (`data_transformer.cpp`), with extensions.

Two steps, so that each can be tested alone: `draw` turns an image's random numbers and size into a `pixels.Draw`; `pixels` applies it. The
engine does mean, scale and cutout on the device, and passes the change of colours to the loader. `stagerun check` checks the transform.

The numbers come out the same on every machine: of floating-point arithmetic only +, -, *, / and square roots are used, whose every
bit IEEE 754 fixes. Logarithm, sine and cosine are series here: two C libraries may differ in the last bit of theirs.
"""

import functools
import math
from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

from stagerun.base.errors import DataError
from stagerun.base.order import UInt64, randint, uniform
from stagerun.base.recipe import InterpMode, PadMode, RandomAspectRatio, RandomResizedCrop, Transform
from stagerun.data.jpeg import Rectangle
from stagerun.data.pixels import Draw

# Indices of an image's random numbers: these four, then the numbers of each attempt at a rectangle, then cutout's. Snapshots depend on
# them: disabling a feature must not move the numbers of others.
MIRROR, SIZE, TOP, LEFT, ATTEMPTS = 0, 1, 2, 3, 4
CUTOUT_NUMBERS = 2


def pixels_made_by() -> str:
    """Name the library that decodes and resizes: another version may give other pixels."""
    return f"opencv {cv2.__version__}"


def numbers_needed(transform: Transform) -> int:
    """Return the count of random numbers per image for `draw`."""
    return cutout_index(transform) + (CUTOUT_NUMBERS if transform.cutout_size else 0)


def cutout_index(transform: Transform) -> int:
    """Return the index of cutout's numbers, top and left: behind all attempts."""
    aspect, resized_crop = transform.random_aspect_ratio, transform.random_resized_crop
    if aspect:
        return ATTEMPTS + CAFFE_NUMBERS * aspect.max_attempt
    return ATTEMPTS + (TORCHVISION_NUMBERS * resized_crop.max_attempt if resized_crop else 0)


def draw(transform: Transform, numbers: UInt64 | None, height: int, width: int) -> Draw:
    """Return the drawn transform of an image of height x width.

    `numbers` is uint64[numbers_needed(transform)]; None is an evaluation, which draws nothing and crops from the
    centre, (height - crop_size) // 2 pixels from the top.

    DataError if the image is too small for the crop, the reflected padding or the cutout.
    """
    if transform.pad_mode is PadMode.REFLECT and transform.pad >= min(height, width):
        hint = "pad_mode: REFLECT needs more pixels than `pad` on each side"
        raise _too_small((height, width), (height, width), f"pad: {transform.pad}", hint)
    stored = height, width
    height, width = height + 2 * transform.pad, width + 2 * transform.pad
    part, size, interp_mode = _resizing(transform, numbers, height, width)
    height, width = size or (height, width)
    crop = _crop(transform.crop_size, numbers, stored, height, width)
    if crop is not None:
        height, width = crop.height, crop.width
    return Draw(
        pad=transform.pad,
        pad_mode=transform.pad_mode,
        part=part,
        size=size,
        interp_mode=interp_mode,
        crop=crop,
        mirror=numbers is not None and transform.mirror and randint(numbers[MIRROR], 2) == 1,
        cutout=None if numbers is None else _cutout(transform, numbers, stored, height, width),
    )


def _resizing(
    transform: Transform, numbers: UInt64 | None, height: int, width: int
) -> tuple[Rectangle | None, tuple[int, int] | None, InterpMode]:
    """Return `part`, `size` and `interp_mode` of a Draw."""
    if resize := transform.random_resize:
        choices = resize.max_size - resize.min_size + 1
        shorter = resize.min_size + (randint(numbers[SIZE], choices) if numbers is not None else 0)
        return None, _shorter_side(height, width, shorter), resize.interp_mode
    side = transform.crop_size or 0
    if numbers is not None and (aspect := transform.random_aspect_ratio):
        part = caffe_rectangle(aspect, numbers[ATTEMPTS:], height, width)
        return part, (side, side) if part else _shorter_side(height, width, side), aspect.interp_mode
    if numbers is not None and (resized_crop := transform.random_resized_crop):
        part = torchvision_rectangle(resized_crop, numbers[ATTEMPTS:], height, width)
        return part, (side, side), resized_crop.interp_mode
    return None, None, InterpMode.LINEAR


def _shorter_side(height: int, width: int, shorter: int) -> tuple[int, int]:
    """Return (height, width) with the shorter side of that length, in Caffe's float32 arithmetic, rounded down."""
    if height < width:
        return shorter, int(np.float32(width) / np.float32(height) * np.float32(shorter))
    return int(np.float32(height) / np.float32(width) * np.float32(shorter)), shorter


def _crop(
    side: int | None, numbers: UInt64 | None, stored: tuple[int, int], height: int, width: int
) -> Rectangle | None:
    """Return a square of an image that was `stored` in one size, and is height x width now."""
    if side is None:
        return None
    if height < side or width < side:
        raise _too_small(
            stored,
            (height, width),
            f"crop_size: {side}",
            f"lower `crop_size`, resize first (`random_resize_param`, or `stagerun data import --resize-shorter {side}`), or leave "
            "such images out of the LMDB",
        )
    if numbers is None:
        return Rectangle((height - side) // 2, (width - side) // 2, side, side)
    return Rectangle(randint(numbers[TOP], height - side + 1), randint(numbers[LEFT], width - side + 1), side, side)


def _cutout(
    transform: Transform, numbers: UInt64, stored: tuple[int, int], height: int, width: int
) -> Rectangle | None:
    """Return a square inside the finished image, evenly distributed, as in cifar10-fast (davidcpage/cifar10-fast: core.py)."""
    side = transform.cutout_size
    if not side:
        return None
    if height < side or width < side:
        hint = "lower `cutout_size`: the square must fit inside the image"
        raise _too_small(stored, (height, width), f"cutout_size: {side}", hint)
    top, left = numbers[(index := cutout_index(transform)) : index + CUTOUT_NUMBERS].tolist()
    return Rectangle(randint(top, height - side + 1), randint(left, width - side + 1), side, side)


def _too_small(stored: tuple[int, int], now: tuple[int, int], setting: str, hint: str) -> DataError:
    was = f"{stored[0]} x {stored[1]} pixels (height x width)"
    by_now = f", {now[0]} x {now[1]} pixels once padded, resized and cut" if now != stored else ""
    return DataError(f"the image is {was}{by_now}, too small for {setting}", hint)


# -- `draw` for a whole batch of images of one size: for transforms that only pad, cut and mirror. The same numbers give the same
# positions; the tests compare the two.


@dataclass(frozen=True, slots=True)
class Crops:
    """Crops of n images: the rectangle of height x width at `top`, `left` (int64[n], of the padded image), mirrored if `mirror`
    (bool[n]). `cutout` is as in a Batch."""

    height: int
    width: int
    top: NDArray[np.int64]
    left: NDArray[np.int64]
    mirror: NDArray[np.bool_]
    cutout: NDArray[np.int32] | None = None


def only_crops(param: Transform) -> bool:
    """Return whether the loader's part of the transform only pads, crops and mirrors."""
    resizes = param.random_resize or param.random_aspect_ratio or param.random_resized_crop
    return not (resizes or param.changes_colours or param.python or param.mean_file)


def draw_crops(param: Transform, numbers: UInt64, height: int, width: int) -> Crops:
    """Draw for images of height x width; `numbers` is uint64[n, numbers_needed(param)], n of 1 or more. DataError as in `draw`."""
    draw(param, numbers[0], height, width)  # reports an image that is too small
    high, wide = height + 2 * param.pad, width + 2 * param.pad
    side = param.crop_size
    top, left = np.zeros((2, len(numbers)), np.int64)
    if side is not None:
        top, left = (_below(numbers[:, TOP], high - side + 1), _below(numbers[:, LEFT], wide - side + 1))
        high = wide = side
    mirror = _below(numbers[:, MIRROR], 2) == 1 if param.mirror else np.zeros(len(numbers), np.bool_)
    return Crops(high, wide, top, left, mirror, _cutouts(param, numbers, high, wide))


def _below(numbers: UInt64, n: int) -> NDArray[np.int64]:
    """Return `order.randint` of each."""
    return (numbers % np.uint64(n)).astype(np.int64)


def _cutouts(param: Transform, numbers: UInt64, height: int, width: int) -> NDArray[np.int32] | None:
    side = param.cutout_size
    if not side:
        return None
    index = cutout_index(param)
    cutout = np.full((len(numbers), 4), side, np.int32)
    cutout[:, 0] = _below(numbers[:, index], height - side + 1)
    cutout[:, 1] = _below(numbers[:, index + 1], width - side + 1)
    return cutout


# -- Rectangles of random area and aspect ratio: Intel Caffe's and torchvision's.

# Random numbers for each attempt at a rectangle.
CAFFE_NUMBERS = 5
TORCHVISION_NUMBERS = 4

_THOUSAND = np.float32(1000)
# A logarithm of width / height is one of 2**20, evenly spaced: sides of 20,000 pixels come out in steps of 0.01 pixels.
_STEP_BITS = 10
_STEPS = 1 << _STEP_BITS


def caffe_rectangle(param: RandomAspectRatio, numbers: UInt64, height: int, width: int) -> Rectangle | None:
    """Return the first rectangle that fits, or None: sqrt(area) * c high, sqrt(area) / c wide, or vice versa.

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
    """Draw one of low, low + 0.001, ... up to high, evenly; the number of steps is rounded down as in Caffe."""
    steps = int((high - low) * _THOUSAND + np.float32(1))
    return np.float32((np.float32(randint(number, steps)) + low * _THOUSAND) / _THOUSAND)


def torchvision_rectangle(param: RandomResizedCrop, numbers: UInt64, height: int, width: int) -> Rectangle:
    """Return the first rectangle that fits, else the largest one of an allowed aspect ratio, at the centre.

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
    """Return coarse, fine: low * (high / low) ** (k / 2**20) is coarse[k >> 10] * fine[k & 1023].

    (high / low) ** 2**-n is the n-th square root of square roots, and other exponents are products of these.
    """
    roots = [high / low]
    for _ in range(2 * _STEP_BITS):
        roots.append(math.sqrt(roots[-1]))
    coarse = _powers(low, roots[1 : _STEP_BITS + 1])
    return coarse, _powers(1.0, roots[_STEP_BITS + 1 :])


def _powers(start: float, roots: list[float]) -> list[float]:
    """Multiply start by the roots that the bits of 0, 1, 2 ... select, the first root by the highest bit."""
    powers = [start]
    for root in roots:
        powers = [p for power in powers for p in (power, power * root)]
    return powers
