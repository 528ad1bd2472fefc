"""Which image is where: the order of an epoch and the random numbers of an image, from (seed, position). Pure.

A *position* counts images of a training set consumed since the seed, from 0; it goes on over epochs and stages. Every function here is a
fixed formula over unsigned 64-bit integers, so that its values are the same in every version, on every machine, for any
number of workers, and for any way of cutting the positions into batches. They are part of what a snapshot means: a
change here changes every training.

The random numbers are those of splitmix64 (Steele, Lea and Flood, 2014), read at any place instead of one after the
other. The order is a keyed permutation: a Feistel network over pairs of digits, walked on until it is back inside the
range.
"""

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
    REPLACEMENT = 6  # which record takes the place of a bad one


_ROUNDS = 8
# Digits have at least this many values, so that the few images of a small set are well mixed too.
_SMALLEST_DIGIT = 16


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
    a = max(_SMALLEST_DIGIT, isqrt(images - 1) + 1)
    b = max(_SMALLEST_DIGIT, -(-images // a))
    x = _feistel(keys, x, np.uint64(a), np.uint64(b))
    while (outside := np.flatnonzero(x >= np.uint64(images))).size:
        x[outside] = _feistel(keys[outside], x[outside], np.uint64(a), np.uint64(b))
    return x


def _feistel(keys: UInt64, x: UInt64, a: np.uint64, b: np.uint64) -> UInt64:
    """A permutation of 0 .. a*b-1: of the two digits of x, each in turn is moved round by a hash of the other."""
    left, right = np.divmod(x, b)
    rounds = np.arange(_ROUNDS, dtype=np.uint64)[:, None]
    for odd, even in zip(_number(keys, rounds[::2]), _number(keys, rounds[1::2]), strict=True):
        # The hash is reduced before it is added: a sum that wrapped at 2**64 would not be a permutation.
        left = (left + _number(odd, right) % a) % a
        right = (right + _number(even, left) % b) % b
    permuted: UInt64 = left * b + right
    return permuted
