"""Batches of bytes from the loader -> tensors that the network takes, on the device."""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stagerun.base.errors import DataError
from stagerun.base.recipe import ChannelOrder, Transform
from stagerun.engine.device import to_device

Array = np.ndarray | Tensor


class Batch(Protocol):
    """The engine's view of a batch: images uint8 [N, H, W, C] in B, G, R, labels int64 [N], positions int64 [N].
    All but the positions may be on the device already."""

    @property
    def images(self) -> Array: ...
    @property
    def labels(self) -> Array: ...
    @property
    def positions(self) -> np.ndarray: ...
    @property
    def cutout(self) -> Array | None:
        """int32 [N, 4]: top, left, height, width of the rectangle of an image that is 0 for the network."""

    @property
    def crop(self) -> Array | None:
        """int32 [N, 3]: top and left of an image in its record, and 1 where it is mirrored; None: from the centre."""


class Normalise:
    """(pixel - mean_value) * scale / std_value on the device, then cutout, in the network's dtype and memory format.

    The channels of the result, mean_value and std_value are in the transform's channel_order. A mean image has a mean for each pixel of
    a record."""

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
        images: Array,
        cutout: Array | None = None,
        crop: Array | None = None,
    ) -> Tensor:
        """uint8 [N, H, W, C] -> [N, C, H, W], any H and W."""
        pixels = to_device(images, self.device)
        if self.swap is not None:
            pixels = pixels.index_select(3, self.swap)  # as bytes: a quarter of the memory of numbers
        x = pixels.permute(0, 3, 1, 2).to(self.dtype, memory_format=self.format)
        if self.mean is not None:
            self._lines(x).sub_(self._line(self.mean, x.shape[3]))
        if self.image is not None:
            # By Caffe's rule: the mean is cropped like the image, and mirrored with it.
            (height, width), (high, wide) = x.shape[2:], self.image.shape[:2]
            if height > high or width > wide:
                text = f"the images are {height} x {width}, and the mean image is {high} x {wide}"
                raise DataError(text, "it is for records of its size: write `mean_value` instead of `mean_file`")
            records = x.permute(0, 2, 3, 1)
            if crop is None:
                top, left = (high - height) // 2, (wide - width) // 2
                records.sub_(self.image[top : top + height, left : left + width])
            else:
                records.sub_(means_at(self.image, to_device(crop, self.device), height, width))
        if isinstance(self.factor, Tensor):
            self._lines(x).mul_(self._line(self.factor, x.shape[3]))
        elif self.factor != 1.0:
            x.mul_(self.factor)
        return x if cutout is None else cut_out(x, cutout)

    def labels(self, labels: Array) -> Tensor:
        """Return int64 [N] on the device."""
        return to_device(labels, self.device)

    def _lines(self, x: Tensor) -> Tensor:
        """Return a view of images [N, C, H, W] with long lines: [N, H, W * C] of channels_last, else as they are.

        A CPU goes over a line of three channels five times slower than over a contiguous line."""
        if self.format is not torch.channels_last:
            return x
        lines = x.permute(0, 2, 3, 1)
        return lines.view(*lines.shape[:2], -1)

    def _line(self, values: Tensor, width: int) -> Tensor:
        """Return values per channel ([C]) in the shape that `_lines` needs."""
        return values.repeat(width) if self.format is torch.channels_last else values[:, None, None]


def means_at(mean: Tensor, crop: Tensor, height: int, width: int) -> Tensor:
    """Return [N, height, width, C]: the crops (`crop` as in a Batch) of a mean image [H, W, C]."""
    top, left, mirror = crop.to(torch.int64)[:, :, None].unbind(1)
    down, across = (torch.arange(n, device=mean.device) for n in (height, width))
    columns = left + torch.where(mirror == 1, width - 1 - across, across)
    return mean[(top + down)[:, :, None], columns[:, None, :]]


def cut_out(x: Tensor, cutout: Array) -> Tensor:
    """Set rectangles (int32 [N, 4]: top, left, height, width) of `x` [N, C, H, W] to 0, in place."""
    return x.masked_fill_(inside(to_device(cutout, x.device), x.shape[2], x.shape[3]), 0)


def inside(cutout: Tensor, height: int, width: int) -> Tensor:
    """Return bool [N, 1, height, width]: the pixels within an image's rectangle."""
    top, left, high, wide = cutout[:, :, None].unbind(1)
    rows, columns = (torch.arange(n, device=cutout.device) for n in (height, width))
    in_rows, in_columns = (rows >= top) & (rows < top + high), (columns >= left) & (columns < left + wide)
    return in_rows[:, None, :, None] & in_columns[:, None, None, :]


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """A batch whose images and labels are on the device, or being copied. Fields as in `Batch`."""

    images: Array
    labels: Tensor
    positions: np.ndarray
    cutout: Array | None
    crop: Array | None = None


class Ahead(Iterator[T]):
    """`source`'s items, each made by a background thread while the previous one is used. A context manager.

    An exception of `source` is raised by the `next` for that item. Leaving waits for the item in the making."""

    def __init__(self, source: Iterator[T]) -> None:
        self._source = source
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="feed")
        self._next: Future[T] = self._pool.submit(next, source)

    def __next__(self) -> T:
        item = self._next.result()
        self._next = self._pool.submit(next, self._source)
        return item

    def __enter__(self) -> "Ahead[T]":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True)


def _copied(batches: Iterator[Batch], device: torch.device) -> Iterator[tuple[DeviceBatch, torch.cuda.Event]]:
    """Copy each batch through pinned memory to `device`, on a separate stream, during the computing."""
    stream = torch.cuda.Stream(device)
    for batch in batches:
        torch.cuda.set_device(device)  # of this thread
        with torch.cuda.stream(stream):
            images, labels = to_device(batch.images, device), to_device(batch.labels, device)
            cutout, crop = (
                None if values is None else to_device(values, device) for values in (batch.cutout, batch.crop)
            )
            copied = stream.record_event()
        yield DeviceBatch(images, labels, batch.positions, cutout, crop), copied


def _ready(ahead: Iterator[tuple[DeviceBatch, torch.cuda.Event]]) -> Iterator[Batch]:
    """Yield batches for the current stream: it waits for the copy, and keeps its memory until it is used."""
    for batch, copied in ahead:
        present = torch.cuda.current_stream()
        present.wait_event(copied)
        for tensor in (batch.images, batch.labels, batch.cutout, batch.crop):
            if isinstance(tensor, Tensor):
                tensor.record_stream(present)
        yield batch


@contextmanager
def feed(batches: Iterator[Batch], device: torch.device) -> Iterator[Iterator[Batch]]:
    """Copy batches to a GPU one ahead: `with feed(batches, device) as fed`. On the CPU pass them on."""
    if device.type != "cuda":
        yield batches
        return
    with Ahead(_copied(batches, device)) as ahead:
        yield _ready(ahead)


@dataclass(frozen=True, slots=True)
class Cut:
    """The crops of a batch: n images by their numbers, and of each the rectangle of height x width at top, left of the image
    with `pad` pixels around it, mirrored if `mirror`. int64[n] and bool[n]; the rest as in `Batch`."""

    indices: NDArray[np.int64]
    top: NDArray[np.int64]
    left: NDArray[np.int64]
    mirror: NDArray[np.bool_]
    height: int
    width: int
    positions: NDArray[np.int64]
    cutout: NDArray[np.int32] | None = None


class Resident:
    """A small set of images, whole on the device, so that batches need neither reading nor decoding nor copying: `images` uint8
    [records, H, W, C] in B, G, R and `labels` int64 [records]."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def batch(self, cut: Cut, pad: int, reflect: bool) -> DeviceBatch:
        """Return a batch with `pad` pixels of zeros, or with `reflect` of the image mirrored at its edge, whose pixels are not repeated."""
        numbers = np.stack([cut.indices, cut.top, cut.left, cut.mirror.astype(np.int64)])
        indices, top, left, mirror = to_device(numbers, self.images.device)
        down, across = (torch.arange(n, device=self.images.device) for n in (cut.height, cut.width))
        rows = top[:, None] + down - pad
        columns = left[:, None] + torch.where(mirror[:, None] == 1, cut.width - 1 - across, across) - pad
        images = self._pixels(indices, rows, columns, reflect) if pad else self._at(indices, rows, columns)
        return DeviceBatch(images, self.labels[indices], cut.positions, cut.cutout)

    def batches(self, cuts: Iterator[Cut], pad: int, reflect: bool) -> Generator[DeviceBatch, None, None]:
        """Yield a batch for each of `cuts`, which a thread draws one ahead, while the device computes."""
        with Ahead(cuts) as ahead:
            for cut in ahead:
                yield self.batch(cut, pad, reflect)

    def _pixels(self, indices: Tensor, rows: Tensor, columns: Tensor, reflect: bool) -> Tensor:
        height, width = self.images.shape[1:3]
        if reflect:
            return self._at(indices, _reflected(rows, height), _reflected(columns, width))
        outside_rows, outside_columns = (rows < 0) | (rows >= height), (columns < 0) | (columns >= width)
        pixels = self._at(indices, rows.clamp(0, height - 1), columns.clamp(0, width - 1))
        return pixels.masked_fill_((outside_rows[:, :, None] | outside_columns[:, None, :])[..., None], 0)

    def _at(self, indices: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """Return uint8 [n, h, w, C] of int64 [n], [n, h] and [n, w]."""
        return self.images[indices[:, None, None], rows[:, :, None], columns[:, None, :]]


def read_all(
    batches: Iterable[Batch], records: int, device: torch.device, room: Callable[[int], bool], stop: Callable[[], bool]
) -> Resident | None:
    """Read `batches` of whole images, record after record. None if `room` refuses so many bytes, or `stop` asks to.

    DataError if the images differ in size, and whatever `batches` raises."""
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
