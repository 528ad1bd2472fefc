"""Batches to a GPU, one ahead: while it computes, the next batch is waited for, pinned and copied."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from stagerun.binding import step_aside
from stagerun.engine.images import Batch

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """A batch that is on its way to the device, but for its positions. Fields as of `Batch`."""

    images: Tensor
    labels: Tensor
    positions: np.ndarray
    lighting: Tensor | None
    cutout: Tensor | None
    copied: torch.cuda.Event


class Ahead(Iterator[T], Generic[T]):
    """`source`'s items, each made by one background thread while the one before is used. A context manager.

    What `source` raises is raised by the `next` that would have given the item. Leaving waits for the item in the making.
    """

    def __init__(self, source: Iterator[T]) -> None:
        self._source = source
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="feed", initializer=step_aside)
        self._next: Future[T] = self._pool.submit(next, source)

    def __next__(self) -> T:
        item = self._next.result()
        self._next = self._pool.submit(next, self._source)
        return item

    def __enter__(self) -> "Ahead[T]":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True)


class Copier(Iterator[DeviceBatch]):
    """Each batch of `batches` through pinned memory to `device`, on a stream of its own, beside the computing."""

    def __init__(self, batches: Iterator[Batch], device: torch.device) -> None:
        self._batches, self._device = batches, device
        self._stream = torch.cuda.Stream(device)

    def __next__(self) -> DeviceBatch:
        batch = next(self._batches)
        torch.cuda.set_device(self._device)  # of this thread
        with torch.cuda.stream(self._stream):
            images, labels = self._copy(batch.images), self._copy(batch.labels)
            lighting = None if batch.lighting is None else self._copy(batch.lighting)
            cutout = None if batch.cutout is None else self._copy(batch.cutout)
            return DeviceBatch(images, labels, batch.positions, lighting, cutout, self._stream.record_event())

    def _copy(self, values: np.ndarray | Tensor) -> Tensor:
        """On the present stream."""
        host = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
        return host.pin_memory().to(self._device, non_blocking=True)


class Fed(Iterator[Batch]):
    """What comes of `ahead`, ready for the present stream: it waits for the copy, and keeps its memory until it is used."""

    def __init__(self, ahead: Iterator[DeviceBatch]) -> None:
        self._ahead = ahead

    def __next__(self) -> Batch:
        batch = next(self._ahead)
        present = torch.cuda.current_stream()
        present.wait_event(batch.copied)
        for tensor in (batch.images, batch.labels, batch.lighting, batch.cutout):
            if tensor is not None:
                tensor.record_stream(present)
        return batch


@contextmanager
def feed(batches: Iterator[Batch], device: torch.device) -> Iterator[Iterator[Batch]]:
    """`with feed(batches, device) as fed`: the same batches, on a GPU copied one ahead. On the CPU they are passed on."""
    if device.type != "cuda":
        yield batches
        return
    with Ahead(Copier(batches, device)) as ahead:
        yield Fed(ahead)
