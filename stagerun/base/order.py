"""Which image is where: the order of an epoch and the random numbers of an image, from (seed, position). Pure.

A *position* counts images of a training set consumed since the seed, from 0; it goes on over epochs and stages. Every function here is a
fixed formula over unsigned 64-bit integers, so that its values are the same in every version, on every machine, for any
number of workers, and for any way of cutting the positions into batches. They are part of what a snapshot means: a
change here changes every training.

The random numbers are those of splitmix64 (Steele, Lea and Flood, 2014), read at any place instead of one after the
other. The order is a keyed permutation: a Feistel network over pairs of digits, walked on until it is back inside the
range. Where classes are to come in shares of their own (`sampling`), it is a permutation of shares, and one of each class.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import isqrt

import numpy as np
from numpy.typing import NDArray

UInt64 = NDArray[np.uint64]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_27, _30, _31 = np.uint64(27), np.uint64(30), np.uint64(31)
_ONE = np.uint64(1)


class Purpose(IntEnum):
    """What a number is for. The same seed gives unrelated numbers for different purposes."""

    ORDER = 1
    TRANSFORM = 2  # where an image is cut and whether it is mirrored
    DROPOUT = 3
    COLOUR = 4  # what is done to an image's colours
    MIX = 5  # how the images of a device batch are mixed; at the position of its first image
    # 6 was that of records in the place of bad ones.
    SAMPLING = 7  # where the classes come in an epoch that has shares of them
    MEMBER = 8  # the order of the records within a class
    PYTHON = 9  # what a schedule's own function draws


_ROUNDS = 8
# Digits have at least this many values, so that the few images of a small set are well mixed too.
_SMALLEST_DIGIT = 16


@dataclass(frozen=True, slots=True)
class EveryRecord:
    """Each epoch has every record once: with `shuffle` as a permutation of its own, without in key order."""

    seed: int
    images: int
    shuffle: bool

    def at(self, start: int, count: int) -> NDArray[np.int64]:
        """Record numbers at the positions start .. start+count-1: int64[count]. A stretch may reach over several epochs."""
        return indices(self.seed, self.images, start, count, self.shuffle)


def indices(seed: int, images: int, start: int, count: int, shuffle: bool) -> NDArray[np.int64]:
    """Record numbers, 0 .. images-1, at the positions start .. start+count-1: int64[count].

    The epoch of a position is position // images; each epoch has every record once. With `shuffle` an epoch is a
    permutation of its own; without, it is the key order. A stretch may reach over several epochs. Memory is O(count).
    """
    _require(images >= 1 and start >= 0 and count >= 0, "images >= 1, start >= 0 and count >= 0")
    epoch, offset = np.divmod(np.arange(start, start + count, dtype=np.int64), images)
    if not shuffle:
        return offset
    keys = _number(_state(seed, Purpose.ORDER), epoch.astype(np.uint64))
    return _permute(keys, offset.astype(np.uint64), images).astype(np.int64)


def draws(seed: int, positions: NDArray[np.int64], k: int, purpose: Purpose = Purpose.TRANSFORM) -> UInt64:
    """k independent random numbers for each position, each even over 0 .. 2**64-1: uint64[len(positions), k].

    Number j of a position does not depend on k.
    """
    _require(k >= 0 and (positions.size == 0 or int(positions.min()) >= 0), "k >= 0 and positions >= 0")
    states = _number(_state(seed, purpose), positions.astype(np.uint64))
    return _number(states[:, None], np.arange(k, dtype=np.uint64))


def randint(draw: int, n: int) -> int:
    """A whole number of 0 .. n-1 from a number of `draws`, by remainder as in Caffe (`rand() % n`).

    For n up to 2**32 no value is more than 2**-32 more likely, relatively, than another.
    """
    return int(draw) % n


def uniform(draw: int) -> float:
    """A number from 0 up to, not including, 1, a multiple of 2**-53, from a number of `draws`."""
    return (int(draw) >> 11) * 2.0**-53


def dropout_seed(seed: int, position: int) -> int:
    """Seed, 0 .. 2**63-1, for the forward pass of the device batch whose first image is at `position`."""
    _require(position >= 0, "position >= 0")
    return int(_number(_state(seed, Purpose.DROPOUT), np.array([position], dtype=np.uint64))[0] >> _ONE)


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"needs {what}")


def _state(seed: int, purpose: Purpose) -> UInt64:
    """uint64[1]; one element rather than a scalar, because numpy warns where a scalar wraps round."""
    _require(0 <= seed < 2**64, "0 <= seed < 2**64")
    return _number(np.array([seed], dtype=np.uint64), np.array([purpose], dtype=np.uint64))


def _number(state: UInt64, index: UInt64) -> UInt64:
    """Output number `index` of a splitmix64 generator that starts in `state`; the two are broadcast."""
    x = state + _GAMMA * (index + _ONE)
    x = (x ^ (x >> _30)) * _MIX_1
    x = (x ^ (x >> _27)) * _MIX_2
    mixed: UInt64 = x ^ (x >> _31)
    return mixed


def _permute(keys: UInt64, x: UInt64, images: int) -> UInt64:
    """Images of `x` (each below `images`) under the permutations of 0 .. images-1 that `keys` name, one key per x.

    The network permutes 0 .. a*b-1, a little more than `images`. What falls outside goes through it again: it lies on a
    cycle that x itself lies on, so it comes back inside, and two different x never meet.
    """
    a, b = map(np.uint64, _digits(images))
    x = _feistel(keys, x, a, b)
    while (outside := np.flatnonzero(x >= np.uint64(images))).size:
        x[outside] = _feistel(keys[outside], x[outside], a, b)
    return x


def _permute_each(keys: UInt64, x: UInt64, images: UInt64, a: UInt64, b: UInt64) -> UInt64:
    """As `_permute`, each x among as many `images` as stand beside it, whose `_digits` are a and b."""
    x = _feistel(keys, x, a, b)
    while (outside := np.flatnonzero(x >= images)).size:
        x[outside] = _feistel(keys[outside], x[outside], a[outside], b[outside])
    return x


def _digits(images: int) -> tuple[int, int]:
    """How many values each of two digits has that together count up to `images` at least."""
    a = max(_SMALLEST_DIGIT, isqrt(images - 1) + 1)
    return a, max(_SMALLEST_DIGIT, -(-images // a))


def _feistel(keys: UInt64, x: UInt64, a: UInt64 | np.uint64, b: UInt64 | np.uint64) -> UInt64:
    """A permutation of 0 .. a*b-1: of the two digits of x, each in turn is moved round by a hash of the other."""
    left, right = np.divmod(x, b)
    rounds = np.arange(_ROUNDS, dtype=np.uint64)[:, None]
    for odd, even in zip(_number(keys, rounds[::2]), _number(keys, rounds[1::2]), strict=True):
        # The hash is reduced before it is added: a sum that wrapped at 2**64 would not be a permutation.
        left = (left + _number(odd, right) % a) % a
        right = (right + _number(even, left) % b) % b
    permuted: UInt64 = left * b + right
    return permuted


# -- Classes in shares of their own.


class Sampled:
    """Each epoch, as many images as there are records, has a class `shares` times; where in the epoch is drawn anew each time.

    An image of a class is taken in turn: all of them, in an order drawn anew, before one comes again. So over any number of
    epochs the images of a class come equally often, within one, and no two epochs of a large class have the same ones. A record
    follows from seed and position alone; what is held is the numbers of the records, sorted by class.
    """

    def __init__(self, seed: int, labels: NDArray[np.integer], shares: Sequence[int]) -> None:
        """`labels` of all records, -1 where there is none; `shares` sum up to the number of records, and are 0 for a class without."""
        self.seed, self.images = seed, len(labels)
        self._members = np.argsort(labels, kind="stable").astype(np.int32)
        classes = np.arange(len(shares))
        self._first, ends = (np.searchsorted(labels, classes, side, self._members) for side in ("left", "right"))
        self._sizes = (ends - self._first).astype(np.uint64)
        self._shares = np.array(shares, np.int64)
        self._ends = np.cumsum(self._shares)
        _require(int(self._ends[-1]) == self.images, "shares of all images")
        _require(bool((self._sizes[self._shares > 0] > 0).all()), "an image of each class that has a share")
        digits = [_digits(max(1, int(size))) for size in self._sizes]
        self._a, self._b = np.array(digits, np.uint64).T

    def at(self, start: int, count: int) -> NDArray[np.int64]:
        """As `EveryRecord.at`."""
        epoch, offset = np.divmod(np.arange(start, start + count, dtype=np.int64), self.images)
        keys = _number(_state(self.seed, Purpose.SAMPLING), epoch.astype(np.uint64))
        slot = _permute(keys, offset.astype(np.uint64), self.images).astype(np.int64)
        label = np.searchsorted(self._ends, slot, side="right")
        # How many images of its class came before it, since position 0.
        turn = epoch * self._shares[label] + slot - (self._ends - self._shares)[label]
        return self._in_turn(label, turn.astype(np.uint64))

    def _in_turn(self, label: NDArray[np.int64], turn: UInt64) -> NDArray[np.int64]:
        """The record of each class at a turn: int64[n] of int64[n] and uint64[n]."""
        sizes = self._sizes[label]
        again, place = np.divmod(turn, sizes)
        keys = _number(_number(_state(self.seed, Purpose.MEMBER), label.astype(np.uint64)), again)
        place = _permute_each(keys, place, sizes, self._a[label], self._b[label])
        return self._members[self._first[label] + place.astype(np.int64)].astype(np.int64)


Order = EveryRecord | Sampled
