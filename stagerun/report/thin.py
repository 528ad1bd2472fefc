"""The updates of a run while its log is read, in columns of plain numbers, and what stays of them: a report holds many runs, and a
run may have millions of updates. Pure."""

import math
import statistics
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from stagerun.report.history import Bin, Span, Trained

# The epoch is the ceiling of what is done, but for what sums of fractions may be off by: one that ends with an update must not
# begin one more.
_ROUNDING = 1e-6


class Updates(NamedTuple):
    """Consecutive `Iterated` of one stage, field by field."""

    stage: str
    time: Sequence[float]
    iter: Sequence[int]
    epoch: Sequence[float]
    lr: Sequence[float]
    weight_decay: Sequence[float]
    loss: Sequence[float]
    images: Sequence[int]
    seconds: Sequence[float]


class Columns:
    """The updates that count of a stage, `iter` ascending, and by which process life each was done."""

    __slots__ = ("epoch", "images", "iter", "life", "loss", "lr", "seconds", "weight_decay")
    FIELDS = ("iter", "epoch", "lr", "weight_decay", "loss", "images", "seconds")

    def __init__(self) -> None:
        self.iter, self.images, self.life = array("q"), array("q"), array("i")
        self.epoch, self.lr, self.weight_decay = array("d"), array("d"), array("d")
        self.loss, self.seconds = array("d"), array("d")

    def extend(self, updates: Updates, begin: int, end: int, life: int) -> None:
        for name in self.FIELDS:
            getattr(self, name).extend(getattr(updates, name)[begin:end])
        self.life.extend([life] * (end - begin))

    def cut(self, iter: int) -> Sequence[int]:
        """Takes back what was done after `iter`. The lives that had done it."""
        keep = bisect_right(self.iter, iter)
        gone = self.life[keep:]
        for name in (*self.FIELDS, "life"):
            del getattr(self, name)[keep:]
        return gone

    def trained(self, size: int, begin: float, step: float | None) -> Trained | None:
        """`size` updates make a bin. They lie at `begin + iter * step` epochs, at what the log says where `step` is None."""
        count = len(self.iter)
        if not count:
            return None
        epochs = self.epoch if step is None else array("d", (begin + i * step for i in self.iter))
        return Trained(
            iter=self.iter[-1],
            epoch=epochs[-1],
            updates=count,
            images=sum(self.images),
            seconds=sum(self.seconds),
            first_lr=self.lr[0],
            last_lr=self.lr[-1],
            weight_decay=self.weight_decay[-1],
            loss=statistics.fmean(self.loss[-100:]),
            bins=tuple(self._bin(epochs, a, min(a + size, count)) for a in range(0, count, size)),
            epochs={n: self._span(a, b) for n, a, b in _stretches(count, lambda i: epoch_number(epochs[i]))},
            lives={n: self._span(a, b) for n, a, b in _stretches(count, self.life.__getitem__)},
        )

    def _bin(self, epochs: Sequence[float], a: int, b: int) -> Bin:
        rates = self.lr[a:b]
        kept = sorted({a, a + rates.index(min(rates)), a + rates.index(max(rates)), b - 1})
        shown = tuple((epochs[i], self.lr[i]) for i in kept)
        return Bin(self.iter[b - 1], b - a, sum(epochs[a:b]) / (b - a), sum(self.loss[a:b]) / (b - a), shown)

    def _span(self, a: int, b: int) -> Span:
        sums = sum(self.images[a:b]), sum(self.seconds[a:b]), sum(self.loss[a:b])
        return Span(b - a, *sums, self.lr[b - 1], frozenset(self.images[a:b]))


class Work:
    """All that a process life did, what was done again later among it."""

    __slots__ = ("images", "seconds", "time")

    def __init__(self) -> None:
        self.time, self.images, self.seconds = array("d"), array("q"), array("d")

    def extend(self, updates: Updates) -> None:
        for name in self.__slots__:
            getattr(self, name).extend(getattr(updates, name))

    def speeds(self, size: int, begun: float) -> tuple[tuple[float, float], ...]:
        """(seconds since `begun`, images/s), over `size` iterations each."""
        found = []
        for a in range(0, len(self.time), size):
            b = min(a + size, len(self.time))
            if seconds := sum(self.seconds[a:b]):
                found.append(((self.time[a] + self.time[b - 1]) / 2 - begun, sum(self.images[a:b]) / seconds))
        return tuple(found)


def chunk_size(count: int, most: int) -> int:
    """The least size at which `count` updates make at most `most` chunks."""
    return max(1, -(-count // most))


def epoch_number(epoch: float) -> int:
    """The epoch, 1-based, that ends at or after `epoch` epochs."""
    return max(1, math.ceil(epoch - _ROUNDING))


def _stretches(count: int, value: Callable[[int], int]) -> Iterator[tuple[int, int, int]]:
    """(value, begin, end) of equal ones among `count` that ascend."""
    begin = 0
    while begin < count:
        now = value(begin)
        end = bisect_right(range(count), now, lo=begin + 1, key=value)
        yield now, begin, end
        begin = end
