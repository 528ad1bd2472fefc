"""The loaders of a stage: its training images, and those of its evaluations, as training reads them and `data show` shows them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stagerun.base.errors import DataError, UsageError
from stagerun.base.recipe import Schedule, Solver, Stage, Transform
from stagerun.base.text import count
from stagerun.data.datum import Image
from stagerun.data.index import Index
from stagerun.data.jpeg import Rectangle
from stagerun.data.lmdb_offsets import printable
from stagerun.data.loader import Augment, Job, Loader
from stagerun.data.pictures import Decoded
from stagerun.data.pixels import Draw, apply
from stagerun.data.python_transform import PythonTransform
from stagerun.data.records import Records, spread
from stagerun.data.sampling import order_of
from stagerun.data.stream import Batch
from stagerun.language.nets import ignored_by_some_in, ignored_in
from stagerun.schedule.image_size import at_largest, crop_size


def training_loader(
    records: Records,
    schedule: Schedule,
    stage: Stage,
    *,
    threads: int = 1,
    python: PythonTransform | None = None,
    augment: Augment | None = None,
    memory: Decoded | None = None,
    start: int = 0,
) -> Loader:
    """Training images, from any position on. `python` is the transform's own function, `augment` what it does to colours; `start` the
    position at which the stage begins, which is looked at where the size of the images changes within it."""
    solver = stage.solver
    return Loader(
        records,
        at_largest(solver.transform),
        train=True,
        channels=stage.model.channels,
        num_classes=stage.model.num_classes,
        seed=solver.random_seed,
        sampling=order_of(records, schedule, stage),
        threads=threads,
        python=python,
        augment=augment,
        memory=memory,
        side=side_at(solver, start) if solver.transform.crop_size_ramp else None,
        numbered=stage.data.train.labels is not None,
        ignored=ignored_in(stage).train,
        by_some=ignored_by_some_in(stage),
    )


def side_at(solver: Solver, start: int) -> Callable[[int], int | None]:
    """The crop_size of the training images at a position, in a stage that begins at position `start`. A device batch lies in one
    update, so that its first image speaks for all."""
    return lambda position: crop_size(solver, (position - start) // solver.batch_size)


def evaluation_loader(records: Records, stage: Stage, *, threads: int = 1, numbered: bool = False) -> Loader:
    """The images of an evaluation, each once: in key order, or by their shape where the transform is `rectangular`.

    Rectangles are those of batches of test_batch_size, whatever is asked for at a time: they are part of the result.
    """
    solver, settings = stage.solver, of_evaluations(stage, threads, numbered)
    if solver.test_transform.rectangular:
        return RectangularLoader(records, solver.test_transform, batch_size=solver.test_batch_size, **settings)
    return Loader(records, solver.test_transform, train=False, **settings)


def of_evaluations(stage: Stage, threads: int, numbered: bool) -> dict[str, Any]:
    """The settings of a Loader that all evaluations of a stage have."""
    model = stage.model
    return {
        "channels": model.channels,
        "num_classes": model.num_classes,
        "threads": threads,
        "numbered": numbered,
        "ignored": ignored_in(stage).test,
        "by_some": ignored_by_some_in(stage),
    }


# -- Rectangular validation: images of like shape go through the network together, less of each cut off.
#
# As in fast.ai's ImageNet training of 2018 (cybertronai/imagenet18_old: training/dataloader.py): the images are sorted by width over
# height and cut into batches; each batch is cropped from the centre to its mean ratio, the shorter side `crop_size`, the longer one so
# many times as long, rounded down to a multiple of 8. (Their crop swapped height and width twice, so tall images got tall crops
# there as they do here.)

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
        **settings: Any,
    ) -> None:
        """`settings`: those of a Loader, as for CropLoader."""
        if records.index is None:
            raise DataError(
                f"{records.name}: rectangular evaluation needs the sizes of the images, and there is no side file",
                f"make it with `stagerun data index {records.name}`",
            )
        # The whole resized image; the crop is the batch's.
        super().__init__(records, replace(transform_param, crop_size=None), train=False, **settings)
        assert transform_param.crop_size is not None  # `check` holds it
        self._side, self._batch_size = transform_param.crop_size, batch_size
        ratios = _ratios(records.name, records.index)
        self._by_shape = np.argsort(ratios, kind="stable")
        self._ratios = ratios[self._by_shape]

    def record(self, position: int) -> int:
        return int(self._by_shape[position])

    def plan(self, position: int, count: int) -> Job:
        """ValueError for images of two of the batches."""
        first = position - position % self._batch_size
        if count < 1 or position + count > first + self._batch_size:
            raise ValueError(f"{count} images from {position} are not in one batch of {self._batch_size}")
        mean = float(self._ratios[first : first + self._batch_size].mean())
        images = self._buffers.array((count, *crop_of(mean, self._side), self._pictures.channels))
        places = np.arange(position, position + count, dtype=np.int64)
        indices = self._by_shape[places].tolist()
        return Job(self, Batch(images, np.empty(count, np.int64), places), indices, places.tolist(), None, None)

    def make(self, job: Job, n: int) -> None:
        i = job.indices[n]
        picture, job.made.labels[n] = self._pictures.open(i)
        centre(self._pictures.finish(i, picture, self._pictures.draw(i, picture, None), None), job.made.images[n])

    def _check_shape(self, i: int, position: int, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
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


# -- Several crops of each validation image: the four corners and the centre.

CROPS = 5
NO_CROP_HINT = "use `--views flip`, or no views"


class CropLoader(Loader):
    """An evaluation's images, five crops of each: top left, top right, bottom left, bottom right, centre.

    The image is padded and resized as `transform_param` says, and crop_size is cut out at these places instead of at the
    centre alone. UsageError without crop_size, and for rectangular crops.
    """

    def __init__(
        self,
        records: Records,
        transform_param: Transform,
        **settings: Any,
    ) -> None:
        if transform_param.crop_size is None:
            raise UsageError("the evaluation's transform has no crop_size: there is one view of an image", NO_CROP_HINT)
        if transform_param.rectangular:
            raise UsageError("the evaluation's transform is `rectangular`: its crops have no corners", NO_CROP_HINT)
        super().__init__(records, transform_param, train=False, **settings)
        self._side = transform_param.crop_size

    def plan(self, position: int, count: int) -> Job:
        """`images` is uint8[5 * count, crop_size, crop_size, channels]: the first crop of each image, then the second of
        each, and so on; labels and positions are int64[count].
        """
        positions = np.arange(position, position + count, dtype=np.int64)
        images = self._buffers.array((CROPS * count, self._side, self._side, self._pictures.channels))
        made = Batch(images, np.empty(count, np.int64), positions)
        return Job(self, made, positions.tolist(), positions.tolist(), None, None)

    def make(self, job: Job, n: int) -> None:
        whole, job.made.labels[n] = self._whole(job.indices[n])
        job.made.images[n :: job.count] = five_crops(whole, self._side)

    def preflight(self, samples: int = 32) -> None:
        """As in Loader, and UsageError if every image looked at is just as large as its crop."""
        super().preflight(samples)
        shapes = [self._whole(i)[0].shape[:2] for i in spread(len(self.records), samples)]
        if all(shape == (self._side, self._side) for shape in shapes):
            raise UsageError(
                f"there is nothing to crop: the images are {self._side} x {self._side} pixels, as large as crop_size",
                NO_CROP_HINT,
            )

    def _whole(self, i: int) -> tuple[Image, int]:
        """Image i before it is cropped, and its label."""
        picture, label = self._pictures.open(i)
        return self._pictures.finish(i, picture, replace(self._pictures.draw(i, picture, None), crop=None), None), label


def five_crops(image: Image, side: int) -> NDArray[np.uint8]:
    """uint8[height, width, channels] -> uint8[5, side, side, channels]; the centre as an evaluation's crop has it."""
    height, width = image.shape[:2]
    bottom, right = height - side, width - side
    places = [(0, 0), (0, right), (bottom, 0), (bottom, right), (bottom // 2, right // 2)]
    return np.stack([apply(image, Draw(crop=Rectangle(y, x, side, side))) for y, x in places])
