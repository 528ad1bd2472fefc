"""What is done to one image: `transform_param`, in Intel's and SURFsara's Caffe (`data_transformer.cpp`) and beyond it.

Two steps, so that each can be tested alone: `draw` turns an image's random numbers and size into a `Draw`, which
holds everything that was decided; `apply` carries it out, or `region`, `shrink` and `finish` where only what is needed of an image
is decoded. Mean, scale, lighting and cutout are left to the engine, on the device; colours to what it gives the loader.

That a transform is possible (one geometry, a crop_size where one is needed ...) is seen to by `stagerun check`.
"""

import cv2
import numpy as np

from stagerun.data import lighting, rectangles
from stagerun.data.pixels import Draw, apply, finish, region, shrink
from stagerun.data.rectangle import Rectangle
from stagerun.errors import DataError
from stagerun.order import UInt64, randint
from stagerun.recipe import InterpMode, PadMode, Transform

__all__ = ["Draw", "apply", "draw", "finish", "numbers_needed", "pixels_made_by", "region", "shrink"]

# Places of an image's random numbers: these four, then those of each attempt at a rectangle, then cutout's, then lighting's. They
# are part of what a snapshot means: a feature that is off leaves those before it where they are.
MIRROR, SIZE, TOP, LEFT, ATTEMPTS = 0, 1, 2, 3, 4
CUTOUT_NUMBERS = 2


def pixels_made_by() -> str:
    """The libraries that decode and resize: another version may give other pixels."""
    return f"opencv {cv2.__version__}"


def numbers_needed(transform: Transform) -> int:
    """Random numbers per image that `draw` may use."""
    return lighting_place(transform) + (lighting.NUMBERS if transform.lighting_std else 0)


def cutout_place(transform: Transform) -> int:
    """Place of cutout's numbers, top and left, where there is one: behind all attempts."""
    aspect, resized_crop = transform.random_aspect_ratio, transform.random_resized_crop
    if aspect:
        return ATTEMPTS + rectangles.CAFFE_NUMBERS * aspect.max_attempt
    return ATTEMPTS + (rectangles.TORCHVISION_NUMBERS * resized_crop.max_attempt if resized_crop else 0)


def lighting_place(transform: Transform) -> int:
    """Place of lighting's numbers, where there is any: behind cutout's."""
    return cutout_place(transform) + (CUTOUT_NUMBERS if transform.cutout_size else 0)


def draw(transform: Transform, numbers: UInt64 | None, height: int, width: int) -> Draw:
    """What is done to an image of height x width.

    `numbers` is uint64[numbers_needed(transform)]; None is an evaluation, which draws nothing and crops from the
    centre, (height - crop_size) // 2 pixels from the top.

    DataError if the image is too small for the crop, the reflected padding or the cutout.
    """
    if transform.pad_mode is PadMode.REFLECT and transform.pad >= min(height, width):
        raise _too_small(
            height, width, f"pad: {transform.pad}", "pad_mode: REFLECT needs more pixels than `pad` on each side"
        )
    height, width = height + 2 * transform.pad, width + 2 * transform.pad
    part, size, interp_mode = _resizing(transform, numbers, height, width)
    height, width = size or (height, width)
    crop = _crop(transform.crop_size, numbers, height, width)
    if numbers is None:
        return Draw(
            pad=transform.pad, pad_mode=transform.pad_mode, part=part, size=size, interp_mode=interp_mode, crop=crop
        )
    if crop is not None:
        height, width = crop.height, crop.width
    light = numbers[(place := lighting_place(transform)) : place + lighting.NUMBERS]
    return Draw(
        pad=transform.pad,
        pad_mode=transform.pad_mode,
        part=part,
        size=size,
        interp_mode=interp_mode,
        crop=crop,
        mirror=transform.mirror and randint(numbers[MIRROR], 2) == 1,
        cutout=_cutout(transform, numbers, height, width),
        lighting=lighting.lighting(transform.lighting_std, light) if transform.lighting_std else None,
    )


def _resizing(
    transform: Transform, numbers: UInt64 | None, height: int, width: int
) -> tuple[Rectangle | None, tuple[int, int] | None, InterpMode]:
    """`part`, `size` and `interp_mode` of a Draw."""
    if resize := transform.random_resize:
        choices = resize.max_size - resize.min_size + 1
        shorter = resize.min_size + (randint(numbers[SIZE], choices) if numbers is not None else 0)
        return None, _shorter_side(height, width, shorter), resize.interp_mode
    side = transform.crop_size or 0
    if numbers is not None and (aspect := transform.random_aspect_ratio):
        part = rectangles.caffe_rectangle(aspect, numbers[ATTEMPTS:], height, width)
        return part, (side, side) if part else _shorter_side(height, width, side), aspect.interp_mode
    if numbers is not None and (resized_crop := transform.random_resized_crop):
        part = rectangles.torchvision_rectangle(resized_crop, numbers[ATTEMPTS:], height, width)
        return part, (side, side), resized_crop.interp_mode
    return None, None, InterpMode.LINEAR


def _shorter_side(height: int, width: int, shorter: int) -> tuple[int, int]:
    """(height, width) with the shorter side of that length, in Caffe's float32 arithmetic, rounded down."""
    if height < width:
        return shorter, int(np.float32(width) / np.float32(height) * np.float32(shorter))
    return int(np.float32(height) / np.float32(width) * np.float32(shorter)), shorter


def _crop(side: int | None, numbers: UInt64 | None, height: int, width: int) -> Rectangle | None:
    if side is None:
        return None
    if height < side or width < side:
        raise _too_small(
            height,
            width,
            f"crop_size: {side}",
            f"lower `crop_size`, resize first (`random_resize_param`, or `stagerun data import --resize-shorter {side}`), or leave "
            "such images out of the LMDB",
        )
    if numbers is None:
        return Rectangle((height - side) // 2, (width - side) // 2, side, side)
    return Rectangle(randint(numbers[TOP], height - side + 1), randint(numbers[LEFT], width - side + 1), side, side)


def _cutout(transform: Transform, numbers: UInt64, height: int, width: int) -> Rectangle | None:
    """A square inside the finished image, each place as likely, as of cifar10-fast (davidcpage/cifar10-fast: core.py)."""
    side = transform.cutout_size
    if not side:
        return None
    if height < side or width < side:
        raise _too_small(height, width, f"cutout_size: {side}", "lower `cutout_size`: the square lies inside the image")
    top, left = numbers[(place := cutout_place(transform)) : place + CUTOUT_NUMBERS].tolist()
    return Rectangle(randint(top, height - side + 1), randint(left, width - side + 1), side, side)


def _too_small(height: int, width: int, setting: str, hint: str) -> DataError:
    return DataError(f"the image is {height} x {width} pixels (height x width), too small for {setting}", hint)
