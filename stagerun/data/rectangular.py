"""Rectangular validation: images of like shape go through the network together, less of each cut off.

As in fast.ai's ImageNet training of 2018 (cybertronai/imagenet18_old: training/dataloader.py): the images are sorted by width
over height and cut into batches; each batch is cropped from the centre to its mean ratio, the shorter side `crop_size`, the
longer one so many times as long, rounded down to a multiple of 8. (Their crop took height for width twice over, so tall images got
tall crops there as they do here.)
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from stagerun.data.batch import Batch
from stagerun.data.index import Index
from stagerun.data.loader import Job, Loader
from stagerun.data.picture import Image
from stagerun.data.records import Records, printable
from stagerun.errors import DataError
from stagerun.recipe import Transform
from stagerun.text import count

_MULTIPLE = 8


class RectangularLoader(Loader):
    """An evaluation's images sorted by width / height (those alike in the order of their keys), cropped batch by batch.

    A position is a place in that order. Batches are cut at multiples of `batch_size`, and a crop belongs to such a
    batch, or a part of it, so that it doesn't depend on who asks for how many at a time. DataError without a side file, which has the sizes.
    """

    def __init__(
        self,
        records: Records,
        transform_param: Transform,
        *,
        batch_size: int,
        channels: int,
        num_classes: int,
        threads: int = 1,
    ) -> None:
        if records.index is None:
            raise DataError(
                f"{records.name}: rectangular evaluation needs the sizes of the images, and there is no side file",
                f"make it with `stagerun data index {records.name}`",
            )
        # The whole resized image; the crop is the batch's.
        super().__init__(
            records,
            replace(transform_param, crop_size=None),
            train=False,
            channels=channels,
            num_classes=num_classes,
            seed=0,
            images=len(records),
            shuffle=False,
            threads=threads,
        )
        assert transform_param.crop_size is not None  # `check` holds it
        self._side, self._batch_size = transform_param.crop_size, batch_size
        ratios = _ratios(records.name, records.index)
        self._order = np.argsort(ratios, kind="stable")
        self._ratios = ratios[self._order]

    def record(self, position: int) -> int:
        return int(self._order[position])

    def plan(self, position: int, count: int) -> Job:
        """ValueError for images of two of the batches."""
        first = position - position % self._batch_size
        if count < 1 or position + count > first + self._batch_size:
            raise ValueError(f"{count} images from {position} are not in one batch of {self._batch_size}")
        mean = float(self._ratios[first : first + self._batch_size].mean())
        images = self._buffers.array((count, *crop_of(mean, self._side), self._pictures.channels))
        places = np.arange(position, position + count, dtype=np.int64)
        indices = self._order[places].tolist()
        return Job(self, Batch(images, np.empty(count, np.int64), places), indices, places.tolist(), None, None)

    def _make(self, job: Job, n: int, i: int) -> None:
        picture, job.made.labels[n] = self._pictures.open(i)
        centre(self._pictures.finish(i, picture, self._pictures.draw(i, picture, None), None), job.made.images[n])

    def _check_shape(self, i: int, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
        """Any shape can be cropped."""


def evenly(of: int, count: int) -> list[int]:
    """The middles of `count` parts of 0 .. of-1 that are as equal as can be, 1 <= count <= of."""
    return [(2 * n + 1) * of // (2 * count) for n in range(count)]


def crop_of(ratio: float, side: int) -> tuple[int, int]:
    """(height, width) of the crop of images whose mean width / height is `ratio`."""
    if ratio < 1:
        return _down(side / ratio, side), side
    return side, _down(side * ratio, side)


def _down(length: float, least: int) -> int:
    """A multiple of 8, but no less than the shorter side, which needn't be one."""
    return max(int(length) // _MULTIPLE * _MULTIPLE, least)


def centre(image: Image, out: Image) -> None:
    """`out` becomes the centre of the image; black where the image ends before it, as with torchvision's center_crop: in a batch of
    unlike images, one may be less elongated than the mean.
    """
    height, width = out.shape[:2]
    top, left = (image.shape[0] - height) // 2, (image.shape[1] - width) // 2
    part = image[max(top, 0) : max(top, 0) + height, max(left, 0) : max(left, 0) + width]
    if part.shape != out.shape:
        out[...] = 0
    out[max(-top, 0) : max(-top, 0) + part.shape[0], max(-left, 0) : max(-left, 0) + part.shape[1]] = part


def _ratios(name: str, index: Index) -> NDArray[np.float64]:
    """Width / height of each record."""
    unknown = np.flatnonzero((index.heights <= 0) | (index.widths <= 0))
    if unknown.size:
        raise DataError(
            f"{name}: {count(unknown.size, 'record')} can't be used, says the side file; the first is "
            f"`{printable(index.key(int(unknown[0])))}`",
            f"look into them with `stagerun data verify --decode {name}`",
        )
    ratios: NDArray[np.float64] = index.widths / index.heights
    return ratios
