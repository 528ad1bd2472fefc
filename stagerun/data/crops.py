"""Several crops of each validation image: the four corners and the centre."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from stagerun.data import transform
from stagerun.data.batch import Batch
from stagerun.data.datum import Image
from stagerun.data.loader import Job, Loader
from stagerun.data.records import Records, spread
from stagerun.data.rectangle import Rectangle
from stagerun.errors import UsageError
from stagerun.recipe import Transform

CROPS = 5
NO_CROP_HINT = "use `--views flip`, or no views"


class CropLoader(Loader):
    """An evaluation's images, five crops of each: top left, top right, bottom left, bottom right, centre.

    The image is padded and resized as `transform_param` says, and crop_size is cut out at these places instead of at the
    centre alone. UsageError without crop_size, and for rectangular crops.
    """

    def __init__(
        self, records: Records, transform_param: Transform, *, channels: int, num_classes: int, threads: int = 1
    ) -> None:
        if transform_param.crop_size is None:
            raise UsageError("the evaluation's transform has no crop_size: there is one view of an image", NO_CROP_HINT)
        if transform_param.rectangular:
            raise UsageError("the evaluation's transform is `rectangular`: its crops have no corners", NO_CROP_HINT)
        super().__init__(
            records,
            transform_param,
            train=False,
            channels=channels,
            num_classes=num_classes,
            seed=0,
            images=len(records),
            shuffle=False,
            threads=threads,
        )
        self._side = transform_param.crop_size

    def plan(self, position: int, count: int) -> Job:
        """`images` is uint8[5 * count, crop_size, crop_size, channels]: the first crop of each image, then the second of
        each, and so on; labels and positions are int64[count].
        """
        positions = np.arange(position, position + count, dtype=np.int64)
        images = self._buffers.array((CROPS * count, self._side, self._side, self._pictures.channels))
        made = Batch(images, np.empty(count, np.int64), positions)
        return Job(self, made, positions.tolist(), positions.tolist(), None, None)

    def _make(self, job: Job, n: int, i: int) -> None:
        whole, job.made.labels[n] = self._whole(i)
        job.made.images[n :: job.count] = five_crops(whole, self._side)

    def preflight(self, samples: int = 32) -> None:
        """As of Loader, and UsageError if every image looked at is just as large as its crop."""
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
    return np.stack([transform.apply(image, transform.Draw(crop=Rectangle(y, x, side, side))) for y, x in places])
