"""`transform_param { python: "aug.py:augment" }`: a function of the user's that changes training images, called by the loader's threads."""

import time
from collections.abc import Callable

import numpy as np

from stagerun.base import order
from stagerun.base.code import Sources, code_of
from stagerun.base.errors import UsageError
from stagerun.data.datum import Image
from stagerun.system.code import called, function_of, refusal

_RETURNS = (
    "it takes a uint8 array [height, width, channels] in R, G, B and a numpy Generator, and returns such an array"
)


class PythonTransform:
    """The function that a schedule names, of a whole decoded image, before it is resized, cut and mirrored.

    It gets R, G, B, whatever `channel_order` is (grey images one channel), in memory of its own, and a generator that follows from
    the seed and the image's position alone: so the image does, whichever thread or worker makes it. From any number of threads.
    """

    def __init__(self, name: str, sources: Sources) -> None:
        """Imports it. UsageError."""
        self._code, self._sources = code_of(name), sources
        self._function = function_of(self._code, sources)
        self.images, self.seconds = 0, 0.0  # of one thread, as `rehearse` measures it

    def __call__(self, image: Image, seed: int, position: int, place: Callable[[], str]) -> Image:
        """uint8[height, width, channels] in B, G, R, and the same, perhaps of another size. UsageError with the place in the user's file;
        `place` names the record."""
        given = np.ascontiguousarray(image[:, :, ::-1]) if image.shape[2] == 3 else image.copy()
        began = time.perf_counter()
        try:
            made = called(self._code, self._sources, self._function, given, generator(seed, position))
            if wrong := _wrong(made, image.shape[2]):
                raise self._refusal(wrong, _hint(made))
        except UsageError as error:
            hint = error.hint
            if "positional argument" in error.message:
                hint = f"it is called with the image and a numpy Generator: `def {self._code.function}(image, rng)`"
            raise UsageError(f"{error.message}{_record(place(), position)}", hint) from None
        self.images, self.seconds = self.images + 1, self.seconds + time.perf_counter() - began
        return np.ascontiguousarray(made[:, :, ::-1]) if image.shape[2] == 3 else made

    def require_repeatable(self, image: Image, seed: int, position: int, place: Callable[[], str]) -> None:
        """UsageError unless the same image and the same generator give the same result twice."""
        first, second = (self(image, seed, position, place) for _ in range(2))
        if not np.array_equal(first, second):
            raise self._refusal(
                "gives another image each time, though image and generator are the same",
                "draw from the generator that it is given: not from `random` or `numpy.random`, nor by the clock",
            )

    def wrong_size(self, message: str, hint: str, position: int, place: str) -> UsageError:
        """For an image that it returned, and that what comes after it can't use."""
        error = self._refusal(f"returned an image that can't be used: {message}", hint)
        return UsageError(f"{error.message}{_record(place, position)}", error.hint)

    def _refusal(self, message: str, hint: str) -> UsageError:
        return refusal(self._code, self._sources, self._function, f"`{self._code.function}` {message}", hint)


def _record(place: str, position: int) -> str:
    return f"\n  for {place} (at position {position})"


def generator(seed: int, position: int) -> np.random.Generator:
    """For the image at a position: Philox with a key of its own, which has nothing to do with other draws there."""
    key = order.draws(seed, np.array([position], np.int64), 2, order.Purpose.PYTHON)[0]
    return np.random.Generator(np.random.Philox(key=key))


def _wrong(made: object, channels: int) -> str:
    """What is wrong with what a function returned; '' if nothing is."""
    if not isinstance(made, np.ndarray):
        return f"returned {'None' if made is None else f'a {type(made).__name__}'}, not an image"
    if made.dtype != np.uint8:
        return f"returned an image of {made.dtype}, not of uint8"
    if made.ndim != 3 or made.shape[2] != channels or 0 in made.shape:
        return f"returned an array of the shape {list(made.shape)}, and not [height, width, {channels}]"
    return ""


def _hint(made: object) -> str:
    if made is None:
        return f"end it with `return image`, also where it changes the image in place; {_RETURNS}"
    if isinstance(made, np.ndarray) and made.dtype.kind == "f":
        return f"end it with `return np.clip(image, 0, 255).astype(np.uint8)`; {_RETURNS}"
    return _RETURNS
