"""The order of images in an epoch and the random numbers of an image, from (seed, position). Pure.

A *position* counts images of a training set consumed since the first stage, from 0, over epochs and stages. Every function is a fixed formula
over unsigned 64-bit integers: its values are the same in every version, on every machine, for any number of workers, and for any division of
the positions into batches. Snapshots depend on them: a change here changes every training.

The random numbers are splitmix64's (Steele, Lea and Flood, 2014), read at any index instead of in sequence. The order is a keyed
permutation: a Feistel network over pairs of digits, repeated until the result is inside the range. With shares of classes
(`sampling`), it is a permutation of the shares, and one of each class.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import isqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

UInt64 = NDArray[np.uint64]


class Purpose(IntEnum):
    """The purpose of a random number. The same seed gives unrelated numbers for different purposes."""

    ORDER = 1
    TRANSFORM = 2  # the crop and the mirroring of an image
    DROPOUT = 3
    COLOUR = 4  # the colours of an image
    MIX = 5  # the mixing of a device batch's images; at the position of its first image
    # 6 was for replacements of bad records.
    SAMPLING = 7  # the positions of the classes in an epoch with shares
    MEMBER = 8  # the order of the records within a class
    PYTHON = 9  # draws of a schedule's Python function


_ROUNDS = 8
# Digits have at least this many values, so that the few images of a small set are well mixed too.
_SMALLEST_DIGIT = 16


@dataclass(frozen=True, slots=True)
class EveryRecord:
    """An order in which each epoch has every record once: with `shuffle` in another permutation per epoch, without in key order."""

    seed: int
    images: int
    shuffle: bool

    def at(self, start: int, count: int) -> NDArray[np.int64]:
        """Return the record numbers, 0 .. images-1, at the positions start .. start+count-1, over any number of epochs: int64[count]."""
        epoch, offset = np.divmod(np.arange(start, start + count, dtype=np.int64), self.images)
        return _permuted(self.seed, Purpose.ORDER, epoch, offset, self.images) if self.shuffle else offset


def draws(seed: int, positions: NDArray[np.int64], k: int, purpose: Purpose = Purpose.TRANSFORM) -> UInt64:
    """Return k independent random numbers for each position, each uniform over 0 .. 2**64-1: uint64[len(positions), k].
    Number j of a position does not depend on k."""
    states = _number(_state(seed, purpose), positions.astype(np.uint64))
    return _number(states[:, None], np.arange(k, dtype=np.uint64))


def randint(draw: int, n: int) -> int:
    """Map a number of `draws` to 0 .. n-1, by remainder as in Caffe (`rand() % n`); uniform to 2**-32 for n up to 2**32."""
    return int(draw) % n


def uniform(draw: int) -> float:
    """Map a number of `draws` to [0, 1), a multiple of 2**-53."""
    return (int(draw) >> 11) * 2.0**-53


def dropout_seed(seed: int, position: int) -> int:
    """Return the seed, 0 .. 2**63-1, for the forward pass of the device batch whose first image is at `position`."""
    return int(_number(_state(seed, Purpose.DROPOUT), np.array([position], dtype=np.uint64))[0]) >> 1


def _state(seed: int, purpose: Purpose) -> UInt64:
    """Return uint64[1]; one element rather than a scalar, because numpy warns if a scalar overflows."""
    return _number(np.array([seed], dtype=np.uint64), np.array([purpose], dtype=np.uint64))


def _number(state: UInt64, index: UInt64) -> UInt64:
    """Return output number `index` of a splitmix64 generator that starts in `state`; the two are broadcast."""
    x: NDArray[Any] = state + 0x9E3779B97F4A7C15 * (index + 1)
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


def _permuted(
    seed: int, purpose: Purpose, epoch: NDArray[np.int64], offset: NDArray[np.int64], images: int
) -> NDArray[np.int64]:
    """Map each offset (below `images`) by the permutation of its epoch."""
    keys = _number(_state(seed, purpose), epoch.astype(np.uint64))
    return _permute(keys, offset.astype(np.uint64), np.uint64(images), *map(np.uint64, _digits(images)))


def _permute(
    keys: UInt64, x: UInt64, images: UInt64 | np.uint64, a: UInt64 | np.uint64, b: UInt64 | np.uint64
) -> NDArray[np.int64]:
    """Map each x (below its `images`, whose `_digits` are a and b) by the permutation of 0 .. images-1 of its key. The
    network permutes 0 .. a*b-1, a little more than `images`. Results outside go through it again: they are on the same
    cycle as x, so they come back inside, and two different x never meet."""
    x = _feistel(keys, x, a, b)
    while (outside := np.flatnonzero(x >= images)).size:
        some_a, some_b = (np.broadcast_to(digit, x.shape)[outside] for digit in (a, b))
        x[outside] = _feistel(keys[outside], x[outside], some_a, some_b)
    return x.astype(np.int64)


def _digits(images: int) -> tuple[int, int]:
    """Return the number of values of each of two digits that together count to at least `images`."""
    a = max(_SMALLEST_DIGIT, isqrt(images - 1) + 1)
    return a, max(_SMALLEST_DIGIT, -(-images // a))


def _feistel(keys: UInt64, x: UInt64, a: UInt64 | np.uint64, b: UInt64 | np.uint64) -> UInt64:
    """Permute 0 .. a*b-1: rotate each of the two digits of x in turn by a hash of the other."""
    left, right = np.divmod(x, b)
    rounds = np.arange(_ROUNDS, dtype=np.uint64)[:, None]
    for left_key, right_key in zip(_number(keys, rounds[::2]), _number(keys, rounds[1::2]), strict=True):
        # The hash is reduced before the sum: a sum that wrapped at 2**64 would not be a permutation.
        left = (left + _number(left_key, right) % a) % a
        right = (right + _number(right_key, left) % b) % b
    return left * b + right


# -- classes with shares


class Sampled:
    """An order in which each epoch has as many images as the set has records, and each class `shares` times, at random
    positions. The images of a class take turns: all of them, in random order, before one is repeated. So over any
    number of epochs the images of a class come equally often, within one, and no two epochs of a large class have the
    same images. A record follows from seed and position alone; the object only holds the record numbers, sorted by
    class."""

    def __init__(self, seed: int, labels: NDArray[np.integer], shares: Sequence[int]) -> None:
        """Prepare the order. `labels`: of all records, -1 if missing; `shares`: sum to the number of records, 0 for a class without records."""
        self.seed, self.images = seed, len(labels)
        self._members = np.argsort(labels, kind="stable").astype(np.int32)
        sizes = np.bincount(labels + 1, minlength=len(shares) + 1)  # unlabelled records first
        self._first, self._sizes = np.cumsum(sizes)[:-1], sizes[1:].astype(np.uint64)
        self._shares = np.array(shares, np.int64)
        self._ends = np.cumsum(self._shares)
        assert self._ends[-1] == self.images and (self._sizes[self._shares > 0] > 0).all()
        self._a, self._b = np.array([_digits(max(1, int(size))) for size in self._sizes], np.uint64).T

    def at(self, start: int, count: int) -> NDArray[np.int64]:
        """Implement `EveryRecord.at`."""
        epoch, offset = np.divmod(np.arange(start, start + count, dtype=np.int64), self.images)
        slot = _permuted(self.seed, Purpose.SAMPLING, epoch, offset, self.images)
        label = np.searchsorted(self._ends, slot, side="right")
        # The number of earlier images of its class, since position 0.
        turn = epoch * self._shares[label] + slot - (self._ends - self._shares)[label]
        sizes = self._sizes[label]
        again, index = np.divmod(turn.astype(np.uint64), sizes)
        keys = _number(_number(_state(self.seed, Purpose.MEMBER), label.astype(np.uint64)), again)
        member = _permute(keys, index, sizes, self._a[label], self._b[label])
        return self._members[self._first[label] + member].astype(np.int64)


Order = EveryRecord | Sampled
