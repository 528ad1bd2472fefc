"""Positions -> batches. What a batch holds depends on the seed and its positions alone, not on who asks or when."""

import contextlib
import queue
import threading
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from stagerun import order
from stagerun.data import datum, transform
from stagerun.data.records import Records, printable, spread
from stagerun.errors import DataError
from stagerun.recipe import Transform

_MOST_MISTAKES_SHOWN = 3

# What the background thread hands over: batches, then an exception, or None at the end.
_Made: TypeAlias = "queue.Queue[Batch | BaseException | None]"


@dataclass(frozen=True, slots=True)
class Batch:
    """`images` is uint8[n, height, width, channels], contiguous, in the order B, G, R; the others are int64[n]."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    positions: NDArray[np.int64]


class Loader:
    """The images of one LMDB under one stage's transform. `train`: drawn at random; else an evaluation's centre crops.

    `images` is the length of an epoch and must be the number of records; `depth` is how many batches `stream` may hold
    ready, 1 or more. DataError for a transform that can't be carried out.
    """

    def __init__(
        self,
        records: Records,
        transform_param: Transform,
        *,
        train: bool,
        channels: int,
        num_classes: int,
        seed: int,
        images: int,
        shuffle: bool,
        depth: int = 4,
    ) -> None:
        if images != len(records):
            raise DataError(
                f"{records.name}: holds {len(records)} records, but the schedule says images: {images}",
                f"write `images: {len(records)}` beside its `source` in schedule.prototxt",
            )
        if depth < 1:
            raise ValueError("depth is 1 or more")
        transform.check(transform_param, train)
        self.records = records
        self.depth = depth
        self._transform, self._train = transform_param, train
        self._channels, self._num_classes = channels, num_classes
        self._seed, self._shuffle = seed, shuffle

    def batch(self, position: int, count: int) -> Batch:
        """The `count` (1 or more) images from `position` on. DataError names the LMDB, the key and what is wrong."""
        positions = np.arange(position, position + count, dtype=np.int64)
        indices = order.indices(self._seed, len(self.records), position, count, self._shuffle)
        numbers = self._numbers(positions)
        batch: NDArray[np.uint8] | None = None
        labels = np.empty(count, np.int64)
        for n, i in enumerate(indices):
            image, labels[n] = self._image(int(i), None if numbers is None else numbers[n])
            if batch is None:
                batch = np.empty((count, *image.shape), np.uint8)
            self._check_shape(int(i), image.shape, batch.shape[1:])
            batch[n] = image
        if batch is None:
            raise ValueError("a batch has at least one image")
        return Batch(batch, labels, positions)

    def stream(self, requests: Iterable[tuple[int, int]]) -> "Stream":
        """The batches of (position, count), in order, made ahead by one background thread, which also walks `requests`.

        What goes wrong there is raised by the `next` that would have given the batch.
        """
        return Stream(self, requests)

    def preflight(self, samples: int = 32) -> None:
        """Looks at some records: the first, the last and evenly spaced ones. DataError with all mistakes found."""
        mistakes: list[DataError] = []
        shape: tuple[int, ...] | None = None
        for i in spread(len(self.records), samples):
            numbers = self._numbers(np.array([i], dtype=np.int64))
            try:
                image, _ = self._image(i, None if numbers is None else numbers[0])
                shape = shape or image.shape
                self._check_shape(i, image.shape, shape)
            except DataError as mistake:
                mistakes.append(mistake)
        if len(mistakes) == 1:
            raise mistakes[0]
        if mistakes:
            shown = [mistake.message for mistake in mistakes[:_MOST_MISTAKES_SHOWN]]
            if len(mistakes) > len(shown):
                shown.append(f"and {len(mistakes) - len(shown)} more")
            hints = dict.fromkeys(mistake.hint for mistake in mistakes if mistake.hint)
            looked_at = min(len(self.records), samples)
            raise DataError(
                f"{len(mistakes)} of {looked_at} records looked at can't be used:\n  " + "\n  ".join(shown),
                "; ".join(hints),
            )

    def _numbers(self, positions: NDArray[np.int64]) -> order.UInt64 | None:
        return order.draws(self._seed, positions, transform.numbers_needed(self._transform)) if self._train else None

    def _image(self, i: int, numbers: order.UInt64 | None) -> tuple[datum.Image, int]:
        key, record = self.records.get(i)
        try:
            image, label = datum.decode(record, self._channels, self._num_classes)
            drawn = transform.draw(self._transform, numbers, image.shape[0], image.shape[1])
        except DataError as error:
            raise DataError(f"{self._place(key)}: {error.message}", error.hint) from None
        return transform.apply(image, drawn), label

    def _check_shape(self, i: int, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
        if shape != expected:
            key, _ = self.records.get(i)
            raise DataError(
                f"{self._place(key)}: the image is {shape[0]} x {shape[1]} pixels (height x width), others are "
                f"{expected[0]} x {expected[1]}",
                "images of different sizes need `crop_size` in transform_param",
            )

    def _place(self, key: bytes) -> str:
        return f"{self.records.name}: record `{printable(key)}`"


class Stream(Iterator[Batch]):
    """Batches made ahead in a daemon thread, which ends with the last of them, at an error, or at `close`, which
    waits for the batch in the making.

    Closed by itself when it is no longer referred to, and at the interpreter's exit.
    """

    def __init__(self, loader: Loader, requests: Iterable[tuple[int, int]]) -> None:
        made: _Made = queue.Queue(loader.depth)
        stop = threading.Event()
        # The thread must not refer to this object, or it would never be collected.
        thread = threading.Thread(target=_make, args=(loader, requests, made, stop), name="loader", daemon=True)
        self._made = made
        # Also runs at exit, before the interpreter is taken down: the thread must not be inside OpenCV then.
        self.close = weakref.finalize(self, _end, thread, made, stop)
        thread.start()

    def __next__(self) -> Batch:
        if not self.close.alive:
            raise StopIteration
        item = self._made.get()
        if isinstance(item, Batch):
            return item
        self.close()
        if item is None:
            raise StopIteration
        raise item

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _make(loader: Loader, requests: Iterable[tuple[int, int]], made: _Made, stop: threading.Event) -> None:
    last: BaseException | None = None
    try:
        for position, count in requests:
            if not _put(made, loader.batch(position, count), stop):
                return
    except BaseException as error:  # whatever it is, it belongs to the consumer
        last = error
    _put(made, last, stop)


def _put(made: _Made, item: Batch | BaseException | None, stop: threading.Event) -> bool:
    """Waits for room; False if the stream was closed meanwhile."""
    while not stop.is_set():
        try:
            made.put(item, timeout=0.1)
            return True
        except queue.Full:
            continue
    return False


def _end(thread: threading.Thread, made: _Made, stop: threading.Event) -> None:
    stop.set()
    # Makes room, so that a thread that waits for it sees `stop` at once.
    with contextlib.suppress(queue.Empty):
        while True:
            made.get_nowait()
    # The garbage collector may run this in the very thread that is to end.
    if thread is not threading.current_thread():
        thread.join()
    # Wakes a consumer that waits in another thread than the one that closes.
    with contextlib.suppress(queue.Full):
        made.put_nowait(None)
