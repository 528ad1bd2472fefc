"""The size of the training images by iteration, for plan, plot and loader. Pure, stdlib only."""

from dataclasses import replace
from fractions import Fraction

from stagerun.base.recipe import CropSizeRamp, Solver, Transform


def crop_size(solver: Solver, iter: int) -> int | None:
    """Return the side, in pixels, of all training images of the update from `iter` to `iter + 1`; None if images are not cropped. With a ramp
    it changes at the first update that begins in the next epoch of the stage."""
    ramp, last = solver.transform.crop_size_ramp, solver.transform.crop_size
    if ramp is None or last is None:
        return last
    return ramped(ramp, last, iter * solver.batch_size // epoch_images(solver))


def ramped(ramp: CropSizeRamp, last: int, epoch: int) -> int:
    """Return the side after `epoch` epochs: start_size up to start_epoch, `last` from end_epoch on; between them a straight line, rounded to
    the nearest multiple (halves up) within its ends. Exact, for the decimal numbers as written.

    The sides of FFCV's `get_resolution` (libffcv/ffcv-imagenet: train_imagenet.py), except for halves, which it rounds to even.

    >>> ramp = CropSizeRamp(start_size=160, start_epoch=11, end_epoch=13)
    >>> [ramped(ramp, 192, epoch) for epoch in (10, 11, 12, 13, 14)]
    [160, 160, 192, 192, 192]
    """
    start, end = (Fraction(repr(float(at))) for at in (ramp.start_epoch, ramp.end_epoch))
    if epoch <= start:
        return ramp.start_size
    if epoch >= end:
        return last
    side = ramp.start_size + (last - ramp.start_size) * (epoch - start) / (end - start)
    rounded = int(side / ramp.multiple + Fraction(1, 2)) * ramp.multiple
    low, high = sorted((ramp.start_size, last))
    return min(max(rounded, low), high)


def largest_crop_size(transform: Transform) -> int | None:
    """Return the largest side of the transform's images."""
    ramp, last = transform.crop_size_ramp, transform.crop_size
    return last if ramp is None or last is None else max(ramp.start_size, last)


def at_largest(transform: Transform) -> Transform:
    """Return the transform with all images of the largest size."""
    return replace(transform, crop_size=largest_crop_size(transform), crop_size_ramp=None)


def epoch_images(solver: Solver) -> int:
    """Return the images of an epoch. `epoch_iter` is their number over batch_size, rounded to a double: far closer than half an image."""
    if solver.epoch_iter is None:
        raise ValueError("a solver without epoch_iter: its epochs are unknown")
    return round(solver.epoch_iter * solver.batch_size)
