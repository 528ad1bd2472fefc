"""Several crops of each validation image: the four corners and the centre."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from stagerun.data import datum, transform
from stagerun.data.datum import Image
from stagerun.data.loader import Batch, Loader
from stagerun.data.records import Records, spread
from stagerun.data.rectangle import Rectangle
from stagerun.errors import DataError, UsageError
from stagerun.recipe import Transform

CROPS = 5
NO_CROP_HINT = "use `--views flip`, or no views"


class CropLoader(Loader):
    """An evaluation's images, five crops of each: top left, top right, bottom left, bottom right, centre.

    The image is padded and resized as `transform_param` says, and crop_size is cut out at these places instead of at the
    centre alone. UsageError without crop_size.
    """

    def __init__(self, records: Records, transform_param: Transform, *, channels: int, num_classes: int) -> None:
        if transform_param.crop_size is None:
            raise UsageError("the evaluation's transform has no crop_size: there is one view of an image", NO_CROP_HINT)
        super().__init__(
            records,
            transform_param,
            train=False,
            channels=channels,
            num_classes=num_classes,
            seed=0,
            images=len(records),
            shuffle=False,
        )
        self._side = transform_param.crop_size

    def batch(self, position: int, count: int) -> Batch:
        """`images` is uint8[5 * count, crop_size, crop_size, channels]: the first crop of each image, then the second of
        each, and so on; labels and positions are int64[count].
        """
        positions = np.arange(position, position + count, dtype=np.int64)
        images = np.empty((CROPS, count, self._side, self._side, self._channels), np.uint8)
        labels = np.empty(count, np.int64)
        for n, i in enumerate(positions):
            whole, labels[n] = self._whole(int(i))
            images[:, n] = five_crops(whole, self._side)
        return Batch(images.reshape(-1, *images.shape[2:]), labels, positions)

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
        key, record = self.records.get(i)
        try:
            image, label = datum.decode(record, self._channels, self._num_classes)
            drawn = transform.draw(self._transform, None, image.shape[0], image.shape[1])
        except DataError as error:
            raise DataError(f"{self._place(key)}: {error.message}", error.hint) from None
        return transform.apply(image, replace(drawn, crop=None)), label


def five_crops(image: Image, side: int) -> NDArray[np.uint8]:
    """uint8[height, width, channels] -> uint8[5, side, side, channels]; the centre as an evaluation's crop has it."""
    height, width = image.shape[:2]
    bottom, right = height - side, width - side
    places = [(0, 0), (0, right), (bottom, 0), (bottom, right), (bottom // 2, right // 2)]
    return np.stack([transform.apply(image, transform.Draw(crop=Rectangle(y, x, side, side))) for y, x in places])
