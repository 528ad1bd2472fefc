"""A whole set of images on the device, and batches of it that are padded, cut and mirrored there.

So a small set needs neither reading nor decoding nor copying: of each batch only numbers go to the device.
"""

from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stagerun.engine.feed import Ahead
from stagerun.engine.images import Batch
from stagerun.errors import DataError


@dataclass(frozen=True, slots=True)
class Cut:
    """What a batch is made of: n images by their numbers, and of each the rectangle of height x width at top, left of the image
    with `pad` pixels around it, mirrored where `mirror` says so. int64[n] and bool[n]; the rest as of `Batch`."""

    indices: NDArray[np.int64]
    top: NDArray[np.int64]
    left: NDArray[np.int64]
    mirror: NDArray[np.bool_]
    height: int
    width: int
    positions: NDArray[np.int64]
    lighting: NDArray[np.float32] | None = None
    cutout: NDArray[np.int32] | None = None


@dataclass(frozen=True, slots=True)
class ResidentBatch:
    """Fields as of `engine.images.Batch`; images and labels are on the device."""

    images: Tensor
    labels: Tensor
    positions: NDArray[np.int64]
    lighting: NDArray[np.float32] | None
    cutout: NDArray[np.int32] | None


class Resident:
    """`images` uint8 [records, H, W, C] in B, G, R and `labels` int64 [records] on the device."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def batch(self, cut: Cut, pad: int, reflect: bool) -> ResidentBatch:
        """`pad` pixels of zeros, or with `reflect` of the image mirrored at its edge, whose pixels are not repeated."""
        numbers = np.stack([cut.indices, cut.top, cut.left, cut.mirror.astype(np.int64)])
        indices, top, left, mirror = torch.from_numpy(numbers).to(self.images.device)
        down, across = (torch.arange(n, device=self.images.device) for n in (cut.height, cut.width))
        rows = top[:, None] + down - pad
        columns = left[:, None] + torch.where(mirror[:, None] == 1, cut.width - 1 - across, across) - pad
        images = self._pixels(indices, rows, columns, reflect) if pad else self._at(indices, rows, columns)
        return ResidentBatch(images, self.labels[indices], cut.positions, cut.lighting, cut.cutout)

    def batches(self, cuts: Iterator[Cut], pad: int, reflect: bool) -> Generator[ResidentBatch, None, None]:
        """One of each of `cuts`, which are drawn one ahead by a thread of their own, while the device computes."""
        with Ahead(cuts) as ahead:
            for cut in ahead:
                yield self.batch(cut, pad, reflect)

    def _pixels(self, indices: Tensor, rows: Tensor, columns: Tensor, reflect: bool) -> Tensor:
        height, width = self.images.shape[1:3]
        if reflect:
            return self._at(indices, _reflected(rows, height), _reflected(columns, width))
        outside = [(at < 0) | (at >= size) for at, size in ((rows, height), (columns, width))]
        pixels = self._at(indices, rows.clamp(0, height - 1), columns.clamp(0, width - 1))
        return pixels.masked_fill_((outside[0][:, :, None] | outside[1][:, None, :])[..., None], 0)

    def _at(self, indices: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """uint8 [n, h, w, C] of int64 [n], [n, h] and [n, w]."""
        return self.images[indices[:, None, None], rows[:, :, None], columns[:, None, :]]


def read_all(
    batches: Iterable[Batch], records: int, device: torch.device, room: Callable[[int], bool], stop: Callable[[], bool]
) -> Resident | None:
    """`batches` are whole images, record after record. None if `room` for so many bytes is refused, or `stop` says so.

    DataError if the images are not of one size, and what `batches` raises.
    """
    images, labels, filled = None, torch.empty(records, dtype=torch.int64), 0
    for batch in batches:
        some = torch.as_tensor(batch.images)
        if images is None:
            if not room(records * some[0].numel()):
                return None
            images = torch.empty((records, *some.shape[1:]), dtype=torch.uint8, device=device)
        if stop():
            return None
        if some.shape[1:] != images.shape[1:]:
            raise DataError(
                "the training images are not of one size, which `cache: DEVICE` needs",
                "write `cache: AUTO` under `data` in schedule.prototxt",
            )
        part = slice(filled, filled + len(some))
        images[part] = some.to(device)
        labels[part] = torch.as_tensor(batch.labels)
        filled = part.stop
    if images is None or filled != records:
        raise ValueError(f"{filled} of {records} records were read")
    return Resident(images, labels.to(device))


def _reflected(at: Tensor, size: int) -> Tensor:
    """-1 -> 1, size -> size-2."""
    return size - 1 - (size - 1 - at.abs()).abs()
