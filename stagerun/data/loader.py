"""Positions -> batches. What a batch holds depends on the seed and its positions alone, not on who asks or when.

So the state of a loader is (seed, position), two numbers, and going on somewhere is asking for that position: nothing is
replayed, and it is the same for any number of workers and threads, for any way of decoding, and with or without memory. (Of
damaged JPEGs `jpeg.decoder` says how far that was tried.)
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from stagerun.base import order
from stagerun.base.errors import DataError, StagerunError
from stagerun.base.recipe import Transform
from stagerun.base.text import first
from stagerun.data import transform
from stagerun.data.datum import DecodedPicture, Image, Picture
from stagerun.data.pictures import LoaderOptions, NetworkInput, Pictures, finished_size
from stagerun.data.pixels import Draw
from stagerun.data.python_transform import PythonTransform
from stagerun.data.records import Records, spread
from stagerun.data.stream import Batch, Buffers, Stream

__all__ = ["Augment", "Batch", "Job", "Loader", "LoaderOptions", "NetworkInput", "Stream", "Training"]

_MOST_MISTAKES_SHOWN = 3


class Augment(Protocol):
    """What is done to an image's colours. `numbers` is how many random numbers it takes per image."""

    @property
    def numbers(self) -> int: ...

    def __call__(self, image: Image, numbers: order.UInt64) -> Image:
        """uint8[height, width, 3] -> the same shape, both B, G, R. From several threads at once."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What is drawn for training images, by their positions. `python` is done first, `augment` last. `side` is the crop_size of a batch
    that begins at a position, where not all have that of the transform, which is the largest then: a batch has one size."""

    seed: int
    sampling: order.Order  # which record is where
    python: PythonTransform | None = None
    augment: Augment | None = None
    side: Callable[[int], int | None] | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """A batch being made: `indices` are the records at its positions; `numbers` and
    `colours` are uint64[count, ...]; `param` is the transform, its crop_size that of this batch."""

    made: Batch
    indices: list[int]
    param: Transform
    numbers: order.UInt64 | None = None
    colours: order.UInt64 | None = None


class Loader:
    """The images of one LMDB under one transform: drawn for `training`, or else an evaluation's centre crops in key order."""

    def __init__(
        self,
        records: Records,
        param: Transform,
        network: NetworkInput,
        *,
        training: Training | None = None,
        options: LoaderOptions = LoaderOptions(),  # noqa: B008  # it is frozen
    ) -> None:
        self.records, self.options = records, options
        self._param, self._network, self._training = param, network, training
        self._python, self._seed = (training.python, training.seed) if training else (None, 0)
        self._order = training.sampling if training else order.EveryRecord(0, len(records), False)
        self._pictures = Pictures(records, param, network, options)
        self.expect = self._pictures.expect
        # One with the consumer, one in the making, the others ready; with many threads more are in the making.
        self._buffers = Buffers(options.depth + 2 + options.threads)

    def batch(self, position: int, count: int) -> Batch:
        """The `count` (1 or more) images from `position` on. DataError, StorageError name LMDB, key and what is wrong."""
        job = self.plan(position, count)
        self.fill(job, 0, count)
        return job.made

    def stream(self, requests: Iterable[tuple[int, int]]) -> Stream:
        """The batches of (position, count), in order, made ahead by background threads, which also walk `requests`.

        What goes wrong there is raised by the `next` that would have given the batch.
        """
        return Stream(self, requests)

    def plan(self, position: int, count: int) -> Job:
        """The batch of `count` images from `position` on, still empty. For `Stream`."""
        positions = np.arange(position, position + count, dtype=np.int64)
        indices = self._order.at(position, count).tolist()
        training, param, numbers, colours = self._training, self._param, self._numbers(positions), None
        if training and training.side and (side := training.side(position)) != param.crop_size:
            param = replace(param, crop_size=side)
        if training and training.augment:
            colours = order.draws(self._seed, positions, training.augment.numbers, order.Purpose.COLOUR)
        height = width = param.crop_size
        if height is None or width is None:  # all are as large as the first one
            picture, _ = self._open(indices[0], position)
            draw = self._draw(indices[0], position, picture, _row(numbers, 0), param)
            height, width = finished_size(draw, picture)
        made = Batch(
            self._buffers.array((count, height, width, self._network.channels)),
            np.empty(count, np.int64),
            positions,
            np.zeros((count, 4), np.int32) if training and param.cutout_size else None,
            np.zeros((count, 3), np.int32) if training and param.mean_file else None,
        )
        return Job(made, indices, param, numbers, colours)

    def fill(self, job: Job, first: int, last: int) -> None:
        """Makes these images of the batch. From any thread."""
        for n in range(first, last):
            self._make(job, n)

    def _numbers(self, positions: NDArray[np.int64]) -> order.UInt64 | None:
        needed = transform.numbers_needed(self._param)
        return order.draws(self._seed, positions, needed) if self._training else None

    def _make(self, job: Job, n: int) -> None:
        """Image n of the batch, in its place."""
        made, out, i, position = job.made, job.made.images[n], job.indices[n], int(job.made.positions[n])
        picture, label = self._open(i, position)
        draw = self._draw(i, position, picture, _row(job.numbers, n), job.param)
        self._check_shape(i, position, finished_size(draw, picture), out.shape)
        if job.colours is None or self._training is None or self._training.augment is None:
            self._pictures.finish(i, picture, draw, out)
        else:
            image = np.ascontiguousarray(self._pictures.finish(i, picture, draw))
            out[...] = self._training.augment(image, job.colours[n])
        made.labels[n] = label
        if made.cutout is not None and (cut := draw.cutout) is not None:
            made.cutout[n] = cut.top, cut.left, cut.height, cut.width
        if made.crop is not None:
            made.crop[n] = (*((draw.crop.top, draw.crop.left) if draw.crop is not None else (0, 0)), draw.mirror)

    def _open(self, i: int, position: int) -> tuple[Picture, int]:
        """Record i's picture, as it is cut from at a position, and its label."""
        picture, label = self._pictures.open(i)
        if self._python is not None:
            whole = self._pictures.decode(i, picture)
            picture = DecodedPicture(self._python(whole, self._seed, position, lambda: self._pictures.place(i)))
        return picture, label

    def _draw(self, i: int, position: int, picture: Picture, numbers: order.UInt64 | None, param: Transform) -> Draw:
        """What is done to record i's picture, as `_open` gave it."""
        try:
            self._pictures.require_mean(picture)
            return transform.draw(param, numbers, picture.height, picture.width)
        except DataError as error:
            hint = "return a larger image, or have `random_resize_param` enlarge it"
            raise self._misfit(i, position, error, hint) from None

    def _whole(self, i: int) -> tuple[Image, int]:
        """An evaluation's image i before it is cropped, and its label."""
        picture, label = self._pictures.open(i)
        draw = replace(self._draw(i, i, picture, None, self._param), crop=None)
        return self._pictures.finish(i, picture, draw), label

    def _check_shape(self, i: int, position: int, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
        if shape[:2] != expected[:2]:
            text = f"the image is {shape[0]} x {shape[1]} pixels (height x width), others are {expected[0]} x {expected[1]}"
            crop = "cut squares of one size out of them with `crop_size` in transform_param"
            hint = f"make them of one size with `stagerun data import --resize-height N --resize-width N`, or {crop}"
            raise self._misfit(i, position, DataError(text, hint), f"return images of one size, or {crop}")

    def _misfit(self, i: int, position: int, error: DataError, hint: str) -> StagerunError:
        """The error with its place; where the user's function made the image it is for that to mend, by `hint`."""
        place = self._pictures.place(i)
        if self._python is None:
            return DataError(f"{place}: {error.message}", error.hint)
        return self._python.wrong_size(error.message, hint, position, place)

    def preflight(self, samples: int = 32) -> None:
        """Looks at some records: the first, the last and evenly spaced ones. DataError with all mistakes found."""
        if found := self.mistakes(samples):
            raise together(found)

    def mistakes(self, samples: int = 32) -> list[DataError]:
        """What `preflight` finds, one for each cause."""
        causes: dict[str, list[DataError]] = {}
        shape: tuple[int, ...] | None = None
        looked_at = sorted({*spread(len(self.records), samples), *self._telling()})
        for i in looked_at:
            try:
                found = self._look(i)
                shape = shape or found
                self._check_shape(i, i, found, shape)
            except DataError as mistake:
                causes.setdefault(mistake.hint, []).append(mistake)
        return [_counted(of_one, len(looked_at)) for of_one in causes.values()]

    def _telling(self) -> list[int]:
        """Records that show a mistake if any does, by the side file: the least high, the highest, the least wide and the widest image; and
        the first of a few labels that the network has no outputs for."""
        if (index := self.records.index) is None:
            return []
        found = []
        for sides in (index.heights, index.widths):
            known = np.flatnonzero(sides)  # an image that can't be used has none
            if known.size:
                found += [int(known[np.argmin(sides[known])]), int(known[np.argmax(sides[known])])]
        wrong = np.flatnonzero(index.labels >= self._network.num_classes)
        found += wrong[np.unique(index.labels[wrong], return_index=True)[1]].tolist()[:_MOST_MISTAKES_SHOWN]
        return found

    def _look(self, i: int) -> tuple[int, ...]:
        """Makes record i into an image and says its shape."""
        if self._python is not None:
            whole = self._pictures.decode(i, self._pictures.open(i)[0])
            self._python.require_repeatable(whole, self._seed, i, lambda: self._pictures.place(i))
        picture, _ = self._open(i, i)
        numbers = self._numbers(np.array([i], np.int64))
        draw = self._draw(i, i, picture, _row(numbers, 0), self._param)
        return self._pictures.finish(i, picture, draw).shape[:2]


def _row(numbers: order.UInt64 | None, n: int) -> order.UInt64 | None:
    return None if numbers is None else numbers[n]


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
