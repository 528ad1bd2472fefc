"""What `transform.draw` decides about images of one size, for a whole batch at once: for transforms that only pad, cut and mirror.

The same numbers give the same places as there; the tests compare the two.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stagerun.data import lighting, transform
from stagerun.order import UInt64
from stagerun.recipe import Transform


@dataclass(frozen=True, slots=True)
class Places:
    """Of n images: the rectangle of height x width at `top`, `left` (int64[n], of the padded image) is cut out and mirrored
    where `mirror` (bool[n]) says so. `lighting` and `cutout` as of a Batch."""

    height: int
    width: int
    top: NDArray[np.int64]
    left: NDArray[np.int64]
    mirror: NDArray[np.bool_]
    lighting: NDArray[np.float32] | None = None
    cutout: NDArray[np.int32] | None = None


def only_places(param: Transform) -> bool:
    """Whether the transform decides nothing but places, and what the device does anyway."""
    resizes = param.random_resize or param.random_aspect_ratio or param.random_resized_crop
    return not (resizes or param.changes_colours)


def draw_places(param: Transform, numbers: UInt64, height: int, width: int) -> Places:
    """For images of height x width; `numbers` is uint64[n, transform.numbers_needed(param)], n of 1 or more.

    DataError as of `transform.draw`.
    """
    transform.draw(param, numbers[0], height, width)  # an image too small for it is told there
    high, wide = height + 2 * param.pad, width + 2 * param.pad
    side = param.crop_size
    top, left = np.zeros((2, len(numbers)), np.int64)
    if side is not None:
        top, left = (
            _below(numbers[:, transform.TOP], high - side + 1),
            _below(numbers[:, transform.LEFT], wide - side + 1),
        )
        high = wide = side
    mirror = _below(numbers[:, transform.MIRROR], 2) == 1 if param.mirror else np.zeros(len(numbers), np.bool_)
    return Places(high, wide, top, left, mirror, _lighting(param, numbers), _cutout(param, numbers, high, wide))


def _below(numbers: UInt64, n: int) -> NDArray[np.int64]:
    """`order.randint` of each."""
    return (numbers % np.uint64(n)).astype(np.int64)


def _lighting(param: Transform, numbers: UInt64) -> NDArray[np.float32] | None:
    if not param.lighting_std:
        return None
    place = transform.lighting_place(param)
    own = numbers[:, place : place + lighting.NUMBERS]
    return np.array([lighting.lighting(param.lighting_std, each) for each in own], np.float32)


def _cutout(param: Transform, numbers: UInt64, height: int, width: int) -> NDArray[np.int32] | None:
    side = param.cutout_size
    if not side:
        return None
    place = transform.cutout_place(param)
    cutout = np.full((len(numbers), 4), side, np.int32)
    cutout[:, 0] = _below(numbers[:, place], height - side + 1)
    cutout[:, 1] = _below(numbers[:, place + 1], width - side + 1)
    return cutout
