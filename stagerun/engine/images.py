"""Batches of bytes from the loader -> tensors that the network takes."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from stagerun.base.errors import DataError
from stagerun.base.recipe import ChannelOrder, Transform
from stagerun.engine.device import to_device


class Batch(Protocol):
    """What the engine needs to know of a batch: images uint8 [N, H, W, C] in B, G, R, labels int64 [N], positions int64 [N].
    All but the positions may lie on the device already (`engine.feed`)."""

    @property
    def images(self) -> np.ndarray | Tensor: ...
    @property
    def labels(self) -> np.ndarray | Tensor: ...
    @property
    def positions(self) -> np.ndarray: ...
    @property
    def cutout(self) -> np.ndarray | Tensor | None:
        """int32 [N, 4]: top, left, height, width of the rectangle of an image that is 0 for the network."""

    @property
    def crop(self) -> np.ndarray | Tensor | None:
        """int32 [N, 3]: top and left of an image in its record, and 1 where it is mirrored; None: from the centre."""


class Normalise:
    """(pixel - mean_value) * scale / std_value on the device, then cutout, in the network's dtype and memory format.

    The channels of what comes out, mean_value and std_value are in the transform's channel_order. With a mean image each pixel has its own
    mean: that of its place in the record.
    """

    def __init__(
        self,
        transform: Transform,
        channels: int,
        device: torch.device,
        dtype: torch.dtype,
        channels_last: bool,
        mean_image: np.ndarray | None = None,
    ) -> None:
        """`mean_image`: float32 [height, width, channels] in B, G, R, of the size of the records."""

        def per_channel(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device).expand(channels)

        mean: Sequence[float] = transform.mean_value or (0.0,)
        self.mean = per_channel(mean) if any(mean) else None
        # One factor, rounded once; without std_value it is the scale.
        std = [s for s in transform.std_value if s != 1.0] and transform.std_value
        self.factor: float | Tensor = per_channel([transform.scale / s for s in std]) if std else transform.scale
        self.device, self.dtype = device, dtype
        self.format = torch.channels_last if channels_last else torch.contiguous_format
        swapped = transform.channel_order is ChannelOrder.RGB and channels == 3
        self.swap = torch.tensor([2, 1, 0], device=device) if swapped else None
        if swapped and mean_image is not None:
            mean_image = mean_image[..., ::-1].copy()
        self.image = None if mean_image is None else torch.tensor(mean_image, dtype=dtype, device=device)

    def __call__(
        self,
        images: np.ndarray | Tensor,
        cutout: np.ndarray | Tensor | None = None,
        crop: np.ndarray | Tensor | None = None,
    ) -> Tensor:
        """uint8 [N, H, W, C] -> [N, C, H, W], any H and W."""
        pixels = to_device(images, self.device)
        if self.swap is not None:
            pixels = pixels.index_select(3, self.swap)  # as bytes: a quarter of what it would be to move numbers
        x = pixels.permute(0, 3, 1, 2).to(self.dtype, memory_format=self.format)
        if self.mean is not None:
            self._lines(x).sub_(self._line(self.mean, x.shape[3]))
        if self.image is not None:
            self._take_off(x, self.image, crop)
        if isinstance(self.factor, Tensor):
            self._lines(x).mul_(self._line(self.factor, x.shape[3]))
        elif self.factor != 1.0:
            x.mul_(self.factor)
        return x if cutout is None else cut_out(x, cutout)

    def labels(self, labels: np.ndarray | Tensor) -> Tensor:
        """int64 [N] on the device."""
        return to_device(labels, self.device)

    def _take_off(self, x: Tensor, mean: Tensor, crop: np.ndarray | Tensor | None) -> None:
        """Caffe's rule: the mean is cut at the same place as the image, and mirrored with it."""
        height, width = x.shape[2:]
        high, wide = mean.shape[:2]
        if height > high or width > wide:
            text = f"the images are {height} x {width}, and the mean image is {high} x {wide}"
            raise DataError(text, "it is for records of its size: write `mean_value` in place of `mean_file`")
        pixels = x.permute(0, 2, 3, 1)
        if crop is None:
            y, x0 = (high - height) // 2, (wide - width) // 2
            pixels.sub_(mean[y : y + height, x0 : x0 + width])
        else:
            pixels.sub_(means_at(mean, to_device(crop, self.device), height, width))

    def _lines(self, x: Tensor) -> Tensor:
        """A view of images [N, C, H, W] in which lines are long: [N, H, W * C] of channels_last, else as they are.

        A CPU goes over a line of three channels five times slower than over a line of numbers as they lie in memory.
        """
        if self.format is not torch.channels_last:
            return x
        lines = x.permute(0, 2, 3, 1)
        return lines.view(*lines.shape[:2], -1)

    def _line(self, values: Tensor, width: int) -> Tensor:
        """Values per channel ([C]), in the shape that `_lines` needs."""
        return values.repeat(width) if self.format is torch.channels_last else values[:, None, None]


def means_at(mean: Tensor, crop: Tensor, height: int, width: int) -> Tensor:
    """[N, height, width, C] of a mean image [H, W, C]: what each place of `crop` (as in a Batch) cuts out of it."""
    top, left, mirror = crop.to(torch.int64)[:, :, None].unbind(1)
    down, across = (torch.arange(n, device=mean.device) for n in (height, width))
    columns = left + torch.where(mirror == 1, width - 1 - across, across)
    return mean[(top + down)[:, :, None], columns[:, None, :]]


def cut_out(x: Tensor, cutout: np.ndarray | Tensor) -> Tensor:
    """`x` [N, C, H, W] with the rectangles (int32 [N, 4]: top, left, height, width) set to 0, in place."""
    return x.masked_fill_(inside(to_device(cutout, x.device), x.shape[2], x.shape[3]), 0)


def inside(cutout: Tensor, height: int, width: int) -> Tensor:
    """bool [N, 1, height, width]: which pixels lie in an image's rectangle."""
    top, left, high, wide = cutout[:, :, None].unbind(1)
    rows, columns = (torch.arange(n, device=cutout.device) for n in (height, width))
    in_rows, in_columns = (rows >= top) & (rows < top + high), (columns >= left) & (columns < left + wide)
    return in_rows[:, None, :, None] & in_columns[:, None, None, :]
