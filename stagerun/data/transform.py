"""What is done to one image: `transform_param`, as Intel's and SURFsara's Caffe does it (`data_transformer.cpp`).

Two steps, so that each can be tested alone: `draw` turns an image's random numbers and size into a `Draw`, which
holds everything that was decided; `apply` carries it out. Mean and scale are left to the engine, on the device.

Pixels: what cv2 5.0 makes of Caffe's drawn numbers (400 pictures, CUBIC to 224 x 224) is what Caffe made of them, bit
for bit, as long as OpenCV doesn't use Intel's IPP. With IPP, which is there on some machines only, 2 to 4 % of the
values are off by one. `_resize` therefore turns it off.
"""

from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

from stagerun.data.datum import Image
from stagerun.data.rectangle import Rectangle
from stagerun.errors import DataError
from stagerun.order import UInt64, randint
from stagerun.recipe import InterpMode, RandomAspectRatio, Transform

_INTERPOLATION = {
    InterpMode.LINEAR: cv2.INTER_LINEAR,
    InterpMode.AREA: cv2.INTER_AREA,
    InterpMode.NEAREST: cv2.INTER_NEAREST,
    InterpMode.CUBIC: cv2.INTER_CUBIC,
    InterpMode.LANCZOS4: cv2.INTER_LANCZOS4,
}

# Places of an image's random numbers. The first four, then five for each attempt at a rectangle.
_MIRROR, _SIZE, _TOP, _LEFT, _ATTEMPTS = 0, 1, 2, 3, 4
_PER_ATTEMPT = 5

_THOUSAND = np.float32(1000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """All that is decided about one image, in the order in which it is done.

    `pad` zeros on each side; `part` cut out (None: all of it); resized to `size` = (height, width) (None: not at all);
    `crop` cut out (None: all of it); flipped left and right.
    """

    pad: int = 0
    part: Rectangle | None = None
    size: tuple[int, int] | None = None
    interp_mode: InterpMode = InterpMode.LINEAR
    crop: Rectangle | None = None
    mirror: bool = False


def check(transform: Transform, train: bool) -> None:
    """DataError for settings that exclude each other, or that draw at random in an evaluation."""
    resize, aspect = transform.random_resize, transform.random_aspect_ratio
    if resize and aspect:
        raise DataError(
            "transform_param has both random_resize_param and random_aspect_ratio_param",
            "remove one (Caffe ignores the second without a word)",
        )
    if aspect and not transform.crop_size:
        raise DataError("random_aspect_ratio_param needs crop_size", "add `crop_size` to transform_param")
    if not train and (transform.mirror or aspect or (resize and resize.min_size != resize.max_size)):
        raise DataError(
            "test_transform_param draws at random: every evaluation would see other images",
            "remove mirror and random_aspect_ratio_param from it, and make min_size and max_size equal",
        )


def pixels_made_by() -> str:
    """The library that decodes and resizes: another version may give other pixels."""
    return f"opencv {cv2.__version__}"


def numbers_needed(transform: Transform) -> int:
    """Random numbers per image that `draw` may use."""
    aspect = transform.random_aspect_ratio
    return _ATTEMPTS + (_PER_ATTEMPT * aspect.max_attempt if aspect else 0)


def draw(transform: Transform, numbers: UInt64 | None, height: int, width: int) -> Draw:
    """What is done to an image of height x width.

    `numbers` is uint64[numbers_needed(transform)]; None is an evaluation, which draws nothing and crops from the
    centre, (height - crop_size) // 2 pixels from the top.

    DataError if the image is smaller than the crop.
    """
    height, width = height + 2 * transform.pad, width + 2 * transform.pad
    part: Rectangle | None = None
    size: tuple[int, int] | None = None
    interp_mode = InterpMode.LINEAR
    if resize := transform.random_resize:
        choices = resize.max_size - resize.min_size + 1
        shorter = resize.min_size + (randint(numbers[_SIZE], choices) if numbers is not None else 0)
        size, interp_mode = _shorter_side(height, width, shorter), resize.interp_mode
    elif (aspect := transform.random_aspect_ratio) and numbers is not None:
        side = transform.crop_size or 0
        part, interp_mode = _rectangle(aspect, numbers[_ATTEMPTS:], height, width), aspect.interp_mode
        size = (side, side) if part else _shorter_side(height, width, side)
    return Draw(
        pad=transform.pad,
        part=part,
        size=size,
        interp_mode=interp_mode,
        crop=_crop(transform.crop_size, numbers, *(size or (height, width))),
        mirror=transform.mirror and numbers is not None and randint(numbers[_MIRROR], 2) == 1,
    )


def apply(image: Image, draw: Draw) -> Image:
    """uint8[height, width, channels] -> uint8[height', width', channels]; the result may be a view of the image."""
    channels = image.shape[2]
    if draw.pad:
        image = _pad(image, draw.pad)
    if draw.part:
        image = _cut(image, draw.part)
    if draw.size:
        image = _resize(image, draw.size, draw.interp_mode).reshape(*draw.size, channels)
    if draw.crop:
        image = _cut(image, draw.crop)
    return image[:, ::-1] if draw.mirror else image


def _pad(image: Image, pad: int) -> Image:
    height, width, channels = image.shape
    padded = np.zeros((height + 2 * pad, width + 2 * pad, channels), np.uint8)
    padded[pad : pad + height, pad : pad + width] = image
    return padded


def _cut(image: Image, part: Rectangle) -> Image:
    return image[part.top : part.top + part.height, part.left : part.left + part.width]


def _resize(image: Image, size: tuple[int, int], interp_mode: InterpMode) -> NDArray[np.uint8]:
    # Both settings are cv2's own and each thread's: made here, they hold whoever calls. 0.6 us.
    cv2.setNumThreads(0)
    cv2.ipp.setUseIPP(False)
    height, width = size
    return np.asarray(cv2.resize(image, (width, height), interpolation=_INTERPOLATION[interp_mode]), np.uint8)


def _shorter_side(height: int, width: int, shorter: int) -> tuple[int, int]:
    """(height, width) with the shorter side of that length, in Caffe's float32 arithmetic, rounded down."""
    if height < width:
        return shorter, int(np.float32(width) / np.float32(height) * np.float32(shorter))
    return int(np.float32(height) / np.float32(width) * np.float32(shorter)), shorter


def _rectangle(aspect: RandomAspectRatio, numbers: UInt64, height: int, width: int) -> Rectangle | None:
    """The first rectangle that fits, or None: sqrt(area) * c high, sqrt(area) / c wide, or the other way round.

    float32 throughout, as in Caffe, so that the same numbers drawn give the same rectangle. A side of 0 pixels
    (images of a few pixels) doesn't fit; Caffe's resize stops there.
    """
    area = np.float32(height * width)
    low, high = np.float32(aspect.aspect_ratio_change), np.float32(1) / np.float32(aspect.aspect_ratio_change)
    for attempt in range(aspect.max_attempt):
        ratio, change, swap, top, left = numbers[attempt * _PER_ATTEMPT : (attempt + 1) * _PER_ATTEMPT]
        side = np.sqrt(_thousandths(ratio, np.float32(aspect.min_area_ratio), np.float32(aspect.max_area_ratio)) * area)
        c = _thousandths(change, low, high)
        new_height, new_width = int(side * c), int(side / c)
        if randint(swap, 1001) < 500:
            new_height, new_width = new_width, new_height
        if 0 < new_height <= height and 0 < new_width <= width:
            y, x = randint(top, height - new_height + 1), randint(left, width - new_width + 1)
            return Rectangle(y, x, new_height, new_width)
    return None


def _thousandths(number: int, low: np.float32, high: np.float32) -> np.float32:
    """One of low, low + 0.001, ... up to high, evenly; the number of steps is rounded down as Caffe does it."""
    steps = int((high - low) * _THOUSAND + np.float32(1))
    return np.float32((np.float32(randint(number, steps)) + low * _THOUSAND) / _THOUSAND)


def _crop(side: int | None, numbers: UInt64 | None, height: int, width: int) -> Rectangle | None:
    if side is None:
        return None
    if height < side or width < side:
        raise DataError(
            f"the image is {height} x {width} pixels (height x width), too small for crop_size: {side}",
            "lower `crop_size`, resize first (`random_resize_param`), or leave such images out of the LMDB",
        )
    if numbers is None:
        return Rectangle((height - side) // 2, (width - side) // 2, side, side)
    return Rectangle(randint(numbers[_TOP], height - side + 1), randint(numbers[_LEFT], width - side + 1), side, side)
