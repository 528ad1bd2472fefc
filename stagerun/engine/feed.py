"""Batches on the device: copied to a GPU one ahead, or made there from a whole set of images that it holds.

A small set so needs neither reading nor decoding nor copying: of each batch only numbers go to the device.
"""

from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stagerun.base.errors import DataError
from stagerun.engine.device import to_device
from stagerun.engine.images import Batch

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """A batch whose images and labels are on the device, or on their way there until `copied`. Fields as in `Batch`."""

    images: np.ndarray | Tensor
    labels: Tensor
    positions: np.ndarray
    cutout: np.ndarray | Tensor | None
    crop: np.ndarray | Tensor | None = None
    copied: torch.cuda.Event | None = None


class Ahead(Iterator[T], Generic[T]):
    """`source`'s items, each made by one background thread while the one before is used. A context manager.

    What `source` raises is raised by the `next` that would have given the item. Leaving waits for the item in the making.
    """

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


def _copied(batches: Iterator[Batch], device: torch.device) -> Iterator[DeviceBatch]:
    """Each batch through pinned memory to `device`, on a stream of its own, beside the computing."""
    stream = torch.cuda.Stream(device)
    for batch in batches:
        torch.cuda.set_device(device)  # of this thread
        with torch.cuda.stream(stream):
            images, labels = to_device(batch.images, device), to_device(batch.labels, device)
            cutout, crop = (
                None if values is None else to_device(values, device) for values in (batch.cutout, batch.crop)
            )
            copied = stream.record_event()
        yield DeviceBatch(images, labels, batch.positions, cutout, crop, copied)


def _ready(ahead: Iterator[DeviceBatch]) -> Iterator[Batch]:
    """Batches for the present stream: it waits for the copy, and keeps its memory until it is used."""
    for batch in ahead:
        present = torch.cuda.current_stream()
        assert batch.copied is not None
        present.wait_event(batch.copied)
        for tensor in (batch.images, batch.labels, batch.cutout, batch.crop):
            if isinstance(tensor, Tensor):
                tensor.record_stream(present)
        yield batch


@contextmanager
def feed(batches: Iterator[Batch], device: torch.device) -> Iterator[Iterator[Batch]]:
    """`with feed(batches, device) as fed`: the same batches, on a GPU copied one ahead. On the CPU they are passed on."""
    if device.type != "cuda":
        yield batches
        return
    with Ahead(_copied(batches, device)) as ahead:
        yield _ready(ahead)


@dataclass(frozen=True, slots=True)
class Cut:
    """What a batch is made of: n images by their numbers, and of each the rectangle of height x width at top, left of the image
    with `pad` pixels around it, mirrored where `mirror` says so. int64[n] and bool[n]; the rest as in `Batch`."""

    indices: NDArray[np.int64]
    top: NDArray[np.int64]
    left: NDArray[np.int64]
    mirror: NDArray[np.bool_]
    height: int
    width: int
    positions: NDArray[np.int64]
    cutout: NDArray[np.int32] | None = None


class Resident:
    """`images` uint8 [records, H, W, C] in B, G, R and `labels` int64 [records] on the device."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def batch(self, cut: Cut, pad: int, reflect: bool) -> DeviceBatch:
        """`pad` pixels of zeros, or with `reflect` of the image mirrored at its edge, whose pixels are not repeated."""
        numbers = np.stack([cut.indices, cut.top, cut.left, cut.mirror.astype(np.int64)])
        indices, top, left, mirror = to_device(numbers, self.images.device)
        down, across = (torch.arange(n, device=self.images.device) for n in (cut.height, cut.width))
        rows = top[:, None] + down - pad
        columns = left[:, None] + torch.where(mirror[:, None] == 1, cut.width - 1 - across, across) - pad
        images = self._pixels(indices, rows, columns, reflect) if pad else self._at(indices, rows, columns)
        return DeviceBatch(images, self.labels[indices], cut.positions, cut.cutout)

    def batches(self, cuts: Iterator[Cut], pad: int, reflect: bool) -> Generator[DeviceBatch, None, None]:
        """One of each of `cuts`, which are drawn one ahead by a thread of their own, while the device computes."""
        with Ahead(cuts) as ahead:
            for cut in ahead:
                yield self.batch(cut, pad, reflect)

    def _pixels(self, indices: Tensor, rows: Tensor, columns: Tensor, reflect: bool) -> Tensor:
        height, width = self.images.shape[1:3]
        if reflect:
            return self._at(indices, _reflected(rows, height), _reflected(columns, width))
        above, beside = (rows < 0) | (rows >= height), (columns < 0) | (columns >= width)
        pixels = self._at(indices, rows.clamp(0, height - 1), columns.clamp(0, width - 1))
        return pixels.masked_fill_((above[:, :, None] | beside[:, None, :])[..., None], 0)

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
