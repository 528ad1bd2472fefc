"""Batches by position. A batch depends only on the seed and its positions.

So the state of a loader is (seed, position), and resuming means asking for that position: nothing is replayed, for any number of
workers and threads, any decoder, with or without memory. (`jpeg.decoder` has the evidence for damaged JPEGs.)
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from stagerun.base import order
from stagerun.base.code import Sources, code_of
from stagerun.base.errors import DataError, StagerunError, UsageError
from stagerun.base.recipe import Transform
from stagerun.base.text import first
from stagerun.data import transform
from stagerun.data.datum import Image, Picture, decoded
from stagerun.data.pictures import LoaderOptions, NetworkInput, Pictures, finished_size
from stagerun.data.pixels import Draw
from stagerun.data.records import Records, spread
from stagerun.data.stream import Batch, Buffers, Stream
from stagerun.system.code import called, function_of, refusal

_MOST_MISTAKES_SHOWN = 3
_RETURNS = (
    "it takes a uint8 array [height, width, channels] in R, G, B and a numpy Generator, and returns such an array: end it with "
    "`return image`, or for floats with `return np.clip(image, 0, 255).astype(np.uint8)`"
)


class PythonTransform:
    """`transform_param { python: "aug.py:augment" }`: a user's function that changes decoded training images before they are resized,
    cut and mirrored.

    It gets a copy in R, G, B, whatever `channel_order` is (grey images: one channel), and a generator made from the seed and the image's
    position: the result is the same in any thread or worker.
    """

    def __init__(self, name: str, sources: Sources) -> None:
        """Import it. UsageError."""
        self._code, self._sources = code_of(name), sources
        self._function = function_of(self._code, sources)
        self.images, self.seconds = 0, 0.0  # of one thread, as `rehearse` measures it

    def __call__(self, image: Image, seed: int, position: int, record: Callable[[], str]) -> Image:
        """Transform uint8[height, width, channels] in B, G, R; the size may change. UsageError with a line of the user's file; `record`
        names the record."""
        copy = np.ascontiguousarray(image[:, :, ::-1]) if image.shape[2] == 3 else image.copy()
        began = time.perf_counter()
        try:
            made = called(self._code, self._sources, self._function, copy, generator(seed, position))
            if wrong := _wrong(made, image.shape[2]):
                raise self._refusal(wrong, _RETURNS)
        except UsageError as error:
            hint = error.hint
            if "positional argument" in error.message:
                hint = f"it is called with the image and a numpy Generator: `def {self._code.function}(image, rng)`"
            raise UsageError(f"{error.message}{_record(record(), position)}", hint) from None
        self.images, self.seconds = self.images + 1, self.seconds + time.perf_counter() - began
        return np.ascontiguousarray(made[:, :, ::-1]) if image.shape[2] == 3 else made

    def require_repeatable(self, image: Image, seed: int, position: int, record: Callable[[], str]) -> None:
        """Raise UsageError unless the same image and generator give the same result twice."""
        first, second = (self(image, seed, position, record) for _ in range(2))
        if not np.array_equal(first, second):
            raise self._refusal(
                "gives another image each time, though image and generator are the same",
                "draw from the generator that is passed: not from `random` or `numpy.random`, nor by the clock",
            )

    def wrong_size(self, message: str, hint: str, position: int, record: str) -> UsageError:
        """Return the error for a result that the later steps can't use."""
        error = self._refusal(f"returned an image that can't be used: {message}", hint)
        return UsageError(f"{error.message}{_record(record, position)}", error.hint)

    def _refusal(self, message: str, hint: str) -> UsageError:
        return refusal(self._code, self._sources, self._function, f"`{self._code.function}` {message}", hint)


def _record(name: str, position: int) -> str:
    return f"\n  for {name} (at position {position})"


def generator(seed: int, position: int) -> np.random.Generator:
    """Return the generator for the image at a position: Philox with a key that is independent of other draws."""
    key = order.draws(seed, np.array([position], np.int64), 2, order.Purpose.PYTHON)[0]
    return np.random.Generator(np.random.Philox(key=key))


def _wrong(made: object, channels: int) -> str:
    """Return the mistake in a function's result, or ''."""
    if not isinstance(made, np.ndarray):
        return f"returned {'None' if made is None else f'a {type(made).__name__}'}, not an image"
    if made.dtype != np.uint8:
        return f"returned an image of {made.dtype}, not of uint8"
    if made.ndim != 3 or made.shape[2] != channels or 0 in made.shape:
        return f"returned an array of the shape {list(made.shape)}, and not [height, width, {channels}]"
    return ""


class Augment(Protocol):
    """A change of an image's colours. `numbers` is the count of random numbers per image."""

    @property
    def numbers(self) -> int: ...

    def __call__(self, image: Image, numbers: order.UInt64) -> Image:
        """Transform uint8[height, width, 3] in B, G, R. From several threads at once."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Draws for training images, by their positions. `python` comes first, `augment` last. `side` returns the crop_size of the batch at a
    position, if it varies; the transform has the largest then."""

    seed: int
    sampling: order.Order  # records by position
    python: PythonTransform | None = None
    augment: Augment | None = None
    side: Callable[[int], int | None] | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """An unfinished batch: `indices` are the records at its positions; `numbers` (None in an evaluation) and `colours` are uint64[...] of
    each; `param` has this batch's crop_size."""

    made: Batch
    indices: list[int]
    param: Transform
    numbers: Sequence[order.UInt64 | None] = ()
    colours: order.UInt64 | None = None


class Loader:
    """The images of one LMDB under one transform: random for `training`, else an evaluation's centre crops in key order."""

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
        self._order: order.Order = order.EveryRecord(0, len(records), False)
        self._python, self._augment, self._seed = None, None, 0
        if training:
            self._order, self._seed = training.sampling, training.seed
            self._python, self._augment = training.python, training.augment
        self._pictures = Pictures(records, param, network, options)
        self.expect = self._pictures.expect
        # One at the consumer, one in progress, the others ready; with many threads more are in progress.
        self._buffers = Buffers(options.depth + 2 + options.threads)

    def batch(self, position: int, count: int) -> Batch:
        """Return the `count` (1 or more) images from `position` on. DataError, StorageError name LMDB and key."""
        job = self.plan(position, count)
        self.fill(job, 0, count)
        return job.made

    def stream(self, requests: Iterable[tuple[int, int]]) -> Stream:
        """Return the batches of (position, count), in order, made ahead by background threads, which also walk `requests`.

        The `next` that would have returned a batch raises its error.
        """
        return Stream(self, requests)

    def plan(self, position: int, count: int) -> Job:
        """Return the still empty batch of `count` images from `position` on. For `Stream`."""
        positions = np.arange(position, position + count, dtype=np.int64)
        indices = self._order.at(position, count).tolist()
        training, param, numbers, colours = self._training, self._param, self._numbers(positions), None
        if training and training.side:
            param = replace(param, crop_size=training.side(position))
        if self._augment:
            colours = order.draws(self._seed, positions, self._augment.numbers, order.Purpose.COLOUR)
        if param.crop_size is None:  # all are as large as the first one
            picture, _, draw = self._open(indices[0], position, numbers[0], param)
            size = finished_size(draw, picture)
        else:
            size = param.crop_size, param.crop_size
        cutout = np.zeros((count, 4), np.int32) if training and param.cutout_size else None
        crop = np.zeros((count, 3), np.int32) if training and param.mean_file else None
        return Job(replace(self._batch(positions, size), cutout=cutout, crop=crop), indices, param, numbers, colours)

    def _batch(self, positions: NDArray[np.int64], size: tuple[int, int], crops: int = 1) -> Batch:
        """Return an empty batch of images of `size`, (height, width)."""
        images = self._buffers.array((crops * len(positions), *size, self._network.channels))
        return Batch(images, np.empty(len(positions), np.int64), positions)

    def fill(self, job: Job, first: int, last: int) -> None:
        """Make these images of the batch. From any thread."""
        for n in range(first, last):
            self._make(job, n)

    def _numbers(self, positions: NDArray[np.int64]) -> Sequence[order.UInt64 | None]:
        if self._training is None:
            return [None] * len(positions)
        return list(order.draws(self._seed, positions, transform.numbers_needed(self._param)))

    def _make(self, job: Job, n: int) -> None:
        made, out, i, position = job.made, job.made.images[n], job.indices[n], int(job.made.positions[n])
        picture, made.labels[n], draw = self._open(i, position, job.numbers[n], job.param)
        self._check_shape(i, position, finished_size(draw, picture), out.shape)
        if self._augment is None or job.colours is None:
            self._pictures.finish(i, picture, draw, out)
        else:
            image = np.ascontiguousarray(self._pictures.finish(i, picture, draw))
            out[...] = self._augment(image, job.colours[n])
        if made.cutout is not None and (cut := draw.cutout) is not None:
            made.cutout[n] = cut.top, cut.left, cut.height, cut.width
        if made.crop is not None:
            made.crop[n] = (*((draw.crop.top, draw.crop.left) if draw.crop is not None else (0, 0)), draw.mirror)

    def _open(self, i: int, position: int, numbers: order.UInt64 | None, param: Transform) -> tuple[Picture, int, Draw]:
        """Return record i's picture, after the user's function, its label and its drawn transform."""
        picture, label = self._pictures.open(i)
        if self._python is not None:
            whole = self._pictures.decode(i, picture)
            picture = decoded(self._python(whole, self._seed, position, lambda: self._pictures.name(i)))
        try:
            self._pictures.require_mean(picture)
            return picture, label, transform.draw(param, numbers, picture.height, picture.width)
        except DataError as error:
            hint = "return a larger image, or have `random_resize_param` enlarge it"
            raise self._misfit(i, position, error, hint) from None

    def _whole(self, i: int) -> tuple[Image, int]:
        """Return an evaluation's image i before it is cropped, and its label."""
        picture, label, draw = self._open(i, i, None, self._param)
        return self._pictures.finish(i, picture, replace(draw, crop=None)), label

    def _check_shape(self, i: int, position: int, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
        if shape[:2] != expected[:2]:
            text = f"the image is {shape[0]} x {shape[1]} pixels (height x width), others are {expected[0]} x {expected[1]}"
            crop = "cut squares of one size out of them with `crop_size` in transform_param"
            hint = f"make them of one size with `stagerun data import --resize-height N --resize-width N`, or {crop}"
            raise self._misfit(i, position, DataError(text, hint), f"return images of one size, or {crop}")

    def _misfit(self, i: int, position: int, error: DataError, hint: str) -> StagerunError:
        """Return the error with the record's name, or as one of the user's function, with `hint`."""
        name = self._pictures.name(i)
        if self._python is None:
            return DataError(f"{name}: {error.message}", error.hint)
        return self._python.wrong_size(error.message, hint, position, name)

    def preflight(self, samples: int = 32) -> None:
        """Try some records: the first, the last and evenly spaced ones. DataError with all mistakes."""
        if mistakes := self.mistakes(samples):
            raise together(mistakes)

    def mistakes(self, samples: int = 32) -> list[DataError]:
        """Return the mistakes, one per cause."""
        causes: dict[str, list[DataError]] = {}
        shape: tuple[int, ...] | None = None
        candidates = sorted({*spread(len(self.records), samples), *self._critical()})
        for i in candidates:
            try:
                size = self._look(i)
                shape = shape or size
                self._check_shape(i, i, size, shape)
            except DataError as mistake:
                causes.setdefault(mistake.hint, []).append(mistake)
        return [_counted(of_one, len(candidates)) for of_one in causes.values()]

    def _critical(self) -> list[int]:
        """Return the records most likely to fail, by the side file: the lowest, highest, narrowest and widest images, and a few with
        labels beyond the network's outputs."""
        if (index := self.records.index) is None:
            return []
        critical = []
        for sides in (index.heights, index.widths):
            usable = np.flatnonzero(sides)
            if usable.size:
                critical += [int(usable[np.argmin(sides[usable])]), int(usable[np.argmax(sides[usable])])]
        wrong = np.flatnonzero(index.labels >= self._network.num_classes)
        critical += wrong[np.unique(index.labels[wrong], return_index=True)[1]].tolist()[:_MOST_MISTAKES_SHOWN]
        return critical

    def _look(self, i: int) -> tuple[int, ...]:
        """Make record i into an image and return its size."""
        if self._python is not None:
            whole = self._pictures.decode(i, self._pictures.open(i)[0])
            self._python.require_repeatable(whole, self._seed, i, lambda: self._pictures.name(i))
        picture, _, draw = self._open(i, i, self._numbers(np.array([i], np.int64))[0], self._param)
        return self._pictures.finish(i, picture, draw).shape[:2]


def _counted(mistakes: list[DataError], looked_at: int) -> DataError:
    """Merge the mistakes of one cause."""
    if len(mistakes) == 1:
        return mistakes[0]
    shown = first([mistake.message for mistake in mistakes], _MOST_MISTAKES_SHOWN)
    text = f"{len(mistakes)} of {looked_at} records looked at can't be used:\n  " + "\n  ".join(shown)
    return DataError(text, mistakes[0].hint)


def together(mistakes: Sequence[DataError]) -> DataError:
    """Merge errors (at least one): each hint once, below its messages."""
    if len(mistakes) == 1:
        return mistakes[0]
    causes: dict[str, dict[str, None]] = {}
    for mistake in mistakes:
        causes.setdefault(mistake.hint, {})[mistake.message] = None
    *above, last = (DataError("\n".join(messages), hint) for hint, messages in causes.items())
    return DataError("\n\n".join([*(error.render() for error in above), last.message]), last.hint)
