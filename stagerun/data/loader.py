"""Positions -> batches. What a batch holds depends on the seed and its positions alone, not on who asks or when.

So the state of a loader is (seed, position), two numbers, and going on somewhere is asking for that position: nothing is
replayed, and it is the same for any number of workers and threads, for any way of decoding, and with or without memory. (Of
damaged JPEGs `jpeg.decoder` says how far that was tried.)
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from stagerun.base import order
from stagerun.base.errors import DataError
from stagerun.base.recipe import Transform
from stagerun.base.text import first
from stagerun.data import datum, transform
from stagerun.data.datum import DecodedPicture, Image, Picture
from stagerun.data.pictures import Decoded, Pictures, finished_size
from stagerun.data.pixels import Draw
from stagerun.data.python_transform import PythonTransform
from stagerun.data.records import Records, spread
from stagerun.data.rows import look
from stagerun.data.stream import Batch, Buffers, Stream

__all__ = ["Augment", "Batch", "Loader", "Stream"]

T = TypeVar("T")

_MOST_MISTAKES_SHOWN = 3


class Augment(Protocol):
    """What is done to an image's colours. `numbers` is how many random numbers it takes per image."""

    @property
    def numbers(self) -> int: ...

    def __call__(self, image: Image, numbers: order.UInt64) -> Image:
        """uint8[height, width, 3] -> the same shape, both B, G, R. From several threads at once."""
        ...


@dataclass(frozen=True, slots=True)
class Job:
    """A batch being made: `indices` are the records at its positions; `numbers` and
    `colours` are uint64[count, ...]; `param` is the transform, its crop_size that of this batch."""

    loader: "Loader"
    made: Batch
    indices: list[int]
    positions: list[int]
    numbers: order.UInt64 | None
    colours: order.UInt64 | None
    param: Transform | None = None

    @property
    def count(self) -> int:
        return len(self.indices)

    def expect(self, first: int, last: int) -> None:
        self.loader.expect(self.indices[first:last])

    def fill(self, first: int, last: int) -> None:
        for n in range(first, last):
            self.loader.make(self, n)

    def batch(self) -> Batch:
        return self.made


class Loader:
    """The images of one LMDB under one stage's transform. `train`: drawn at random; else an evaluation's centre crops.

    `images`, where it is given, must be the number of records; `depth` is how many batches `stream` may hold ready, 1 or more (of batches
    smaller than 16 images per thread more), `threads` how many make them. `python` is done first, `augment` last. `memory` keeps pixels
    between epochs. `tier` forces a way of decoding. `sampling` says which record is where, in place of `shuffle`. `side` is the crop_size
    of a batch that begins at a position, where not all have that of `transform_param`, which is the largest then: a batch has one size.
    """

    def __init__(
        self,
        records: Records,
        transform_param: Transform,
        *,
        train: bool,
        channels: int,
        num_classes: int,
        seed: int = 0,
        images: int | None = None,
        shuffle: bool = False,
        sampling: order.Order | None = None,
        depth: int = 4,
        threads: int = 1,
        python: PythonTransform | None = None,
        augment: Augment | None = None,
        memory: Decoded | None = None,
        tier: str | None = None,
        side: Callable[[int], int | None] | None = None,
        numbered: bool = False,
        ignored: int | None = None,
        by_some: frozenset[int] = frozenset(),
    ) -> None:
        if images not in (None, len(records)):
            raise DataError(
                f"{records.name}: holds {len(records)} records, but the schedule says images: {images}",
                f"write `images: {len(records)}` beside its `source` in schedule.prototxt",
            )
        if depth < 1 or threads < 1:
            raise ValueError("depth and threads are 1 or more")
        self.records = records
        self.depth, self.threads = depth, threads
        self._transform, self._train = transform_param, train
        self._seed = seed
        self._order = sampling or order.EveryRecord(seed, len(records), shuffle)
        self._side_at = side
        self._python, self._augment = python, augment
        self._pictures = Pictures(
            records, transform_param, channels, num_classes, memory, tier, numbered, ignored, by_some
        )
        self.expect = self._pictures.expect
        # One with the consumer, one in the making, the others ready; with many threads more are in the making.
        self._buffers = Buffers(depth + 2 + threads)

    def batch(self, position: int, count: int) -> Batch:
        """The `count` (1 or more) images from `position` on. DataError, StorageError name LMDB, key and what is wrong."""
        job = self.plan(position, count)
        job.fill(0, count)
        return job.batch()

    def stream(self, requests: Iterable[tuple[int, int]]) -> Stream:
        """The batches of (position, count), in order, made ahead by background threads, which also walk `requests`.

        What goes wrong there is raised by the `next` that would have given the batch.
        """
        return Stream(self, requests)

    def record(self, position: int) -> int:
        """The number of the record that an evaluation has at a position."""
        return position

    def plan(self, position: int, count: int) -> Job:
        """The batch of `count` images from `position` on, still empty. For `Stream`."""
        if count < 1:
            raise ValueError("a batch has at least one image")
        positions = np.arange(position, position + count, dtype=np.int64)
        indices = self._order.at(position, count)
        param = self._param(position)
        return self._job(positions, indices, param, self._shape(int(indices[0]), position, param))

    def _param(self, position: int) -> Transform:
        side = self._transform.crop_size if self._side_at is None else self._side_at(position)
        return self._transform if side == self._transform.crop_size else replace(self._transform, crop_size=side)

    def _job(
        self, positions: NDArray[np.int64], indices: NDArray[np.int64], param: Transform, shape: tuple[int, int]
    ) -> Job:
        count = len(positions)
        made = Batch(
            self._buffers.array((count, *shape, self._pictures.channels)),
            np.empty(count, np.int64),
            positions,
            np.zeros((count, 4), np.int32) if self._train and self._transform.cutout_size else None,
            np.zeros((count, 3), np.int32) if self._train and self._transform.mean_file else None,
        )
        colours = None
        if self._augment is not None:
            colours = order.draws(self._seed, positions, self._augment.numbers, order.Purpose.COLOUR)
        return Job(self, made, indices.tolist(), positions.tolist(), self._numbers(positions), colours, param)

    def _numbers(self, positions: NDArray[np.int64]) -> order.UInt64 | None:
        return order.draws(self._seed, positions, transform.numbers_needed(self._transform)) if self._train else None

    def make(self, job: Job, n: int) -> None:
        """Image n of the batch, in its place."""
        made, out, i = job.made, job.made.images[n], job.indices[n]
        picture, label = self._open(i, job.positions[n])
        draw = self._draw(i, job.positions[n], picture, None if job.numbers is None else job.numbers[n], job.param)
        self._check_shape(i, job.positions[n], finished_size(draw, picture), out.shape)
        if self._augment is None or job.colours is None:
            self._pictures.finish(i, picture, draw, out)
        else:
            image = np.ascontiguousarray(self._pictures.finish(i, picture, draw))
            out[...] = self._augment(image, job.colours[n])
        made.labels[n] = label
        if made.cutout is not None and (cut := draw.cutout) is not None:
            made.cutout[n] = cut.top, cut.left, cut.height, cut.width
        if made.crop is not None:
            made.crop[n] = (*((draw.crop.top, draw.crop.left) if draw.crop is not None else (0, 0)), draw.mirror)

    def _open(self, i: int, position: int) -> tuple[Picture, int]:
        """Record i's picture, as it is cut from at a position, and its label."""
        picture, label = self._pictures.open(i)
        if self._python is not None:
            whole = self._pictures.whole(i, picture)
            picture = DecodedPicture(self._python(whole, self._seed, position, lambda: self._pictures.place(i)))
        return picture, label

    def _draw(
        self, i: int, position: int, picture: Picture, numbers: order.UInt64 | None, param: Transform | None = None
    ) -> Draw:
        """What is done to record i's picture, as `_open` gave it."""
        if self._python is None:
            return self._pictures.draw(i, picture, numbers, param)
        try:
            return transform.draw(param or self._transform, numbers, picture.height, picture.width)
        except DataError as error:
            hint = "return a larger image, or have `random_resize_param` enlarge it"
            raise self._python.wrong_size(error.message, hint, position, self._pictures.place(i)) from None

    def _shape(self, i: int, position: int, param: Transform) -> tuple[int, int]:
        """(height, width) of the finished images of a batch whose first one is record i: all must be like that one."""
        if param.crop_size is not None:
            return param.crop_size, param.crop_size
        numbers = self._numbers(np.array([position], np.int64))

        picture, _ = self._open(i, position)
        return finished_size(self._draw(i, position, picture, None if numbers is None else numbers[0]), picture)

    def _check_shape(self, i: int, position: int, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
        if shape[:2] == expected[:2]:
            return
        text = f"the image is {shape[0]} x {shape[1]} pixels (height x width), others are {expected[0]} x {expected[1]}"
        crop = "cut squares of one size out of them with `crop_size` in transform_param"
        if self._python is not None:
            hint = f"return images of one size, or {crop}"
            raise self._python.wrong_size(text, hint, position, self._pictures.place(i))
        hint = f"make them of one size with `stagerun data import --resize-height N --resize-width N`, or {crop}"
        raise DataError(f"{self._pictures.place(i)}: {text}", hint)

    def preflight(self, samples: int = 32) -> None:
        """Looks at some records: the first, the last and evenly spaced ones. DataError with all mistakes found."""
        if found := self.mistakes(samples):
            raise together(found)

    def mistakes(self, samples: int = 32) -> list[DataError]:
        """What `preflight` finds, one for each cause."""
        mistakes: list[DataError] = []
        shape: tuple[int, ...] | None = None
        looked_at = sorted({*spread(len(self.records), samples), *self._telling()})
        for i in looked_at:
            try:
                found = self._look(i)
                shape = shape or found
                self._check_shape(i, i, found, shape)
            except DataError as mistake:
                mistakes.append(mistake)
        causes: dict[str, list[DataError]] = {}
        for one in mistakes:
            causes.setdefault(one.hint, []).append(one)
        return [_counted(of_one, len(looked_at)) for of_one in causes.values()]

    def _telling(self) -> list[int]:
        """Records that show a mistake if any does, by the side file: the least high, the highest, the least wide and the widest image; the
        first of a few labels that the network has no outputs for; and for a network of grey images the first in colour."""
        if (index := self.records.index) is None:
            return []
        found = []
        for sides in (index.heights, index.widths):
            known = np.flatnonzero(sides)  # an image that can't be used has none
            if known.size:
                found += [int(known[np.argmin(sides[known])]), int(known[np.argmax(sides[known])])]
        wrong = np.flatnonzero(index.labels >= self._pictures.num_classes)
        found += wrong[np.unique(index.labels[wrong], return_index=True)[1]].tolist()[:_MOST_MISTAKES_SHOWN]
        grey = ["grey" in kind for kind, _ in index.facts.kinds]
        if self._pictures.channels == 1 and any(grey) and not all(grey):
            coloured = (i for i in range(len(self.records)) if self._is_coloured(i))  # the side file doesn't say which
            found += islice(coloured, _MOST_MISTAKES_SHOWN)
        return found

    def _is_coloured(self, i: int) -> bool:
        with suppress(DataError):  # the one who uses the record reports it
            return "grey" not in look(datum.parse(self.records.get(i)[1]), pixels=False).kind
        return False

    def _look(self, i: int) -> tuple[int, ...]:
        """Makes record i into an image and says its shape."""
        numbers = self._numbers(np.array([i], np.int64))
        if self._python is not None:
            whole = self._pictures.whole(i, self._pictures.open(i)[0])
            self._python.require_repeatable(whole, self._seed, i, lambda: self._pictures.place(i))
        picture, _ = self._open(i, i)
        draw = self._draw(i, i, picture, None if numbers is None else numbers[0])
        return self._pictures.finish(i, picture, draw).shape[:2]


def _counted(mistakes: list[DataError], looked_at: int) -> DataError:
    """Those of one cause, as one."""
    if len(mistakes) == 1:
        return mistakes[0]
    shown = first([mistake.message for mistake in mistakes], _MOST_MISTAKES_SHOWN)
    text = f"{len(mistakes)} of {looked_at} records looked at can't be used:\n  " + "\n  ".join(shown)
    return DataError(text, mistakes[0].hint)


def together(mistakes: Sequence[DataError]) -> DataError:
    """One error of several (at least one): each hint once, below all that it is for."""
    if len(mistakes) == 1:
        return mistakes[0]
    causes: dict[str, dict[str, None]] = {}
    for mistake in mistakes:
        causes.setdefault(mistake.hint, {})[mistake.message] = None
    *above, last = (DataError("\n".join(messages), hint) for hint, messages in causes.items())
    return DataError("\n\n".join([*(error.render() for error in above), last.message]), last.hint)
