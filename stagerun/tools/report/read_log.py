"""Reads OUT/log.jsonl back into events, in columns of plain numbers. Takes no lock: a run may be appending meanwhile."""

import math
import os
import re
import statistics
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, repeat
from operator import itemgetter
from pathlib import Path
from typing import BinaryIO, NamedTuple, overload

from stagerun.base.errors import PermissionDenied, StorageError, UsageError
from stagerun.base.events import Event, Iterated
from stagerun.base.staleness import Staleness
from stagerun.store.logged import LARGEST, event_of
from stagerun.system.files import open_shared
from stagerun.tools.report.history import Bin, Span, Trained

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
    sent: Sequence[int]
    staleness: Sequence[int]  # -1 where an iteration is no push
    replica: Sequence[int]


class Steady:
    """A column of integers that takes no room as long as all of them are the same."""

    __slots__ = ("_count", "_kind", "_own", "_value")

    def __init__(self, kind: str) -> None:
        self._kind, self._value, self._count = kind, 0, 0
        self._own: array[int] | None = None  # once they differ

    def __len__(self) -> int:
        return self._count if self._own is None else len(self._own)

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[int]: ...
    def __getitem__(self, at: int | slice) -> int | Sequence[int]:
        if self._own is not None:
            return self._own[at]
        places = range(self._count)[at]
        return self._value if isinstance(places, int) else [self._value] * len(places)

    def __iter__(self) -> Iterator[int]:
        return repeat(self._value, self._count) if self._own is None else iter(self._own)

    def __delitem__(self, at: slice) -> None:
        if self._own is None:
            self._count -= len(range(self._count)[at])
        else:
            del self._own[at]

    def extend(self, values: Sequence[int]) -> None:
        if self._own is None and values:
            self._value = self._value if self._count else values[0]
            if all(value == self._value for value in set(values)):
                self._count += len(values)
                return
            self._own = array(self._kind, repeat(self._value, self._count))
        if self._own is not None:
            self._own.extend(values)


class Columns:
    """The updates that count of a stage, `iter` ascending, by which process life each was done, and the bytes that rank 0 would have sent in
    it without compression."""

    FIELDS = ("iter", "epoch", "lr", "weight_decay", "loss", "images", "seconds", "sent", "staleness", "replica")
    __slots__ = (*FIELDS, "_kept", "dense", "life")

    def __init__(self) -> None:
        # What `trained` has made last, and of what: a long run is looked at again and again, and few stages have changed.
        self._kept: tuple[tuple[int, float, float | None], Trained | None] | None = None
        self.iter, self.images, self.life = array("q"), Steady("q"), Steady("i")
        self.epoch, self.lr, self.weight_decay = array("d"), array("d"), array("d")
        self.loss, self.seconds = array("d"), array("d")
        self.sent, self.dense = Steady("q"), Steady("q")
        self.staleness, self.replica = Steady("i"), Steady("i")

    def extend(self, updates: Updates, begin: int, end: int, life: int, dense: int = 0) -> None:
        self._kept = None
        for name in self.FIELDS:
            getattr(self, name).extend(getattr(updates, name)[begin:end])
        self.life.extend([life] * (end - begin))
        self.dense.extend([dense] * (end - begin))

    def cut(self, iter: int) -> Sequence[int]:
        """Removes what was done after `iter`. Returns the lives that had done it."""
        self._kept = None
        keep = bisect_right(self.iter, iter)
        gone = self.life[keep:]
        for name in (*self.FIELDS, "life", "dense"):
            del getattr(self, name)[keep:]
        return gone

    def trained(self, size: int, begin: float, step: float | None) -> Trained | None:
        """`size` updates make a bin. They lie at `begin + iter * step` epochs, at what the log says where `step` is None."""
        if self._kept is None or self._kept[0] != (size, begin, step):
            self._kept = (size, begin, step), self._trained(size, begin, step)
        return self._kept[1]

    def _trained(self, size: int, begin: float, step: float | None) -> Trained | None:
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
            **self._sent(),
            staleness=self._staleness(),
            bins=tuple(self._bin(epochs, a, min(a + size, count)) for a in range(0, count, size)),
            epochs={n: self._span(a, b) for n, a, b in _stretches(count, lambda i: epoch_number(epochs[i]))},
            lives={n: self._span(a, b) for n, a, b in _stretches(count, self.life.__getitem__)},
        )

    def _sent(self) -> dict[str, float]:
        """Over the iterations of which it is known what dense would have sent; over all where that is what they sent."""
        sent = [sent for sent, dense in zip(self.sent, self.dense, strict=True) if dense]
        if sent:
            return {"sent": statistics.fmean(sent), "of_dense": sum(sent) / sum(self.dense)}
        return {"sent": statistics.fmean(self.sent)} if any(self.sent) else {}

    def _staleness(self) -> Staleness | None:
        if max(self.replica, default=-1) < 0:
            return None
        found = Counter(zip(self.replica, self.staleness, strict=True))
        del found[-1, -1]
        by_replica: dict[int, dict[int, int]] = {}
        for (replica, stale), number in sorted(found.items()):
            by_replica.setdefault(replica, {})[stale] = number
        return Staleness(by_replica)

    def _bin(self, epochs: Sequence[float], a: int, b: int) -> Bin:
        rates = self.lr[a:b]
        kept = sorted({a, a + rates.index(min(rates)), a + rates.index(max(rates)), b - 1})
        shown = tuple((epochs[i], self.lr[i]) for i in kept)
        return Bin(self.iter[b - 1], b - a, sum(epochs[a:b]) / (b - a), sum(self.loss[a:b]) / (b - a), shown)

    def _span(self, a: int, b: int) -> Span:
        sums = sum(self.images[a:b]), sum(self.seconds[a:b]), sum(self.loss[a:b])
        return Span(b - a, *sums, self.lr[b - 1], frozenset(self.images[a:b]))


class Work:
    """All that a process life did, including what was done again later."""

    __slots__ = ("images", "seconds", "time")

    def __init__(self) -> None:
        self.time, self.images, self.seconds = array("d"), Steady("q"), array("d")

    def extend(self, updates: Updates) -> None:
        for name in self.__slots__:
            getattr(self, name).extend(getattr(updates, name))

    def speeds(self, size: int, began: float) -> tuple[tuple[float, float], ...]:
        """(seconds since `began`, images/s), over `size` iterations each."""
        found = []
        for a in range(0, len(self.time), size):
            b = min(a + size, len(self.time))
            if seconds := sum(self.seconds[a:b]):
                found.append(((self.time[a] + self.time[b - 1]) / 2 - began, sum(self.images[a:b]) / seconds))
        return tuple(found)


def chunk_size(count: int, most: int) -> int:
    """The smallest size at which `count` updates make at most `most` chunks."""
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


# -- the file

LOG = "log.jsonl"
_BLOCK = 1 << 20  # bytes read at a time
_LONGEST = 1 << 25  # bytes of a line without an end that are kept; no run writes a thousandth of that

# An Iterated as `jsonl` writes it, which nearly all lines are: a fifth of what a JSON parser takes. What is written in any other
# way is left to that parser, as are all other lines.
_NUMBER = r"-?[0-9][-+.0-9e]{0,30}"
_LINE = re.compile(
    rf'\{{"time": ({_NUMBER}), "event": "Iterated", "stage": "([ !#-\[\]-~]+)", "iter": ([0-9]{{1,15}}), "epoch": ({_NUMBER}), '
    rf'"lr": ({_NUMBER}), "momentum": {_NUMBER}, "weight_decay": ({_NUMBER}), "loss": ({_NUMBER}), "images": ([0-9]{{1,15}}), '
    rf'"seconds": ({_NUMBER})(?:, "update_seconds": {_NUMBER})?(?:, "sent_bytes": ([0-9]{{1,15}}))?'
    r'(?:, "staleness": ([0-9]{1,9}), "replica": ([0-9]{1,9}))?\}\n|([^\n]*)\n'
)


@dataclass(slots=True)
class Log:
    """`events` are (time, event) in the order of writing, to be read once; consecutive `Iterated` of a stage come together as
    `Updates`. `damaged` counts the lines read so far that can't be parsed, `unknown` those of an event that this version doesn't know. `read`: bytes of whole lines that were."""

    events: Iterable[tuple[float, Event | Updates]] = ()
    damaged: int = 0
    unknown: int = 0
    read: int = 0


def read_log(out: Path) -> Log:
    """The events of an output folder. A line that is not what a run writes is counted: the last one of a killed run may
    be cut short. Reading them raises UsageError if there is no log, PermissionDenied or StorageError if it can't be read.
    """
    log = Log()
    log.events = _events(out, log)
    return log


def _events(out: Path, log: Log) -> Iterator[tuple[float, Event | Updates]]:
    found = False
    with opened(out) as file:
        for events in whole_lines(file, log):
            found = found or bool(events)
            yield from events
        file.seek(log.read)
        for event in _parsed(_text(file.read()) + "\n", log):  # the last line of a killed run
            found = True
            yield event
    if not found:
        raise no_event(out)


@contextmanager
def opened(out: Path) -> Iterator[BinaryIO]:
    """The log of an output folder, to be read. UsageError if there is none, PermissionDenied or StorageError if it can't be read."""
    path = out / LOG
    try:
        with os.fdopen(open_shared(path), "rb") as file:
            yield file
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UsageError(*_no_log(out)) from error
    except PermissionError as error:
        raise PermissionDenied(f"{path} may not be read", "ask its owner for permission") from error
    except OSError as error:
        raise StorageError(f"can't read {path}: {error.strerror}", "check the disk") from error


def no_event(out: Path) -> UsageError:
    return UsageError(f"{out / LOG} holds no event of a run", "wait until the run has started, or name another folder")


def whole_lines(file: BinaryIO, log: Log, block: int | None = None) -> Iterator[list[tuple[float, Event | Updates]]]:
    """The events of the lines that have an end, from `log.read` on, a block of so many bytes after the other. A later
    call goes on where this one was left."""
    file.seek(log.read)
    rest = b""
    while data := file.read(
        max(block or _BLOCK, len(rest))
    ):  # a line without an end is not copied more than once or twice
        whole, end, rest = (rest + data).rpartition(b"\n")
        log.read += len(whole) + len(end)
        if len(rest) > _LONGEST:  # no run writes such a line; it must not fill the memory
            log.read, log.damaged, rest = log.read + len(rest), log.damaged + 1, b""
        yield list(_parsed(_text(whole + end), log))


def _text(data: bytes) -> str:
    """A character for each byte."""
    return data.decode("latin-1")


def _parsed(block: str, log: Log) -> Iterator[tuple[float, Event | Updates]]:
    groups = groupby(_LINE.findall(block), itemgetter(1))
    try:
        made = [_updates(stage, rows) if stage else [row[-1] for row in rows] for stage, rows in groups]
    except ValueError:  # what looked like a number isn't one
        made = [block.split("\n")]
    for group in made:
        if isinstance(group, Updates):
            yield group.time[0], group
        else:
            yield from _others(group, log)


def _updates(stage: str, rows: Iterable[tuple[str, ...]]) -> Updates:
    """Raises ValueError for what is not a finite number."""
    times, _, iters, epochs, rates, decays, losses, images, seconds, sent, *pushes, _ = zip(*rows, strict=True)
    floats = [array("d", map(float, column)) for column in (times, epochs, rates, decays, losses, seconds)]
    if not all(abs(number) <= LARGEST for column in floats for number in (min(column), max(column), sum(column))):
        raise ValueError("not a number that a run writes")
    time, epoch, lr, decay, loss, long = floats
    whole = [array("q", (int(text or 0) for text in column)) for column in (iters, images, sent)]
    stale = [array("i", (int(text or -1) for text in column)) for column in pushes]
    return Updates(stage, time, whole[0], epoch, lr, decay, loss, whole[1], long, whole[2], *stale)


def _others(lines: Iterable[str], log: Log) -> Iterator[tuple[float, Event]]:
    for line in lines:
        if not line.strip():
            continue
        try:
            event = event_of(line.encode("latin-1"))
            if event and isinstance(event[1], Iterated) and max(event[1].iter, event[1].images) >> 63:
                raise ValueError("more than 64 bits")
            if event and isinstance(event[1], Iterated) and not all(0 <= n < 1 << 31 for n in _push(event[1])):
                raise ValueError("more than 31 bits")
        except ValueError:
            log.damaged += 1
            continue
        if event is None:
            log.unknown += 1
        else:
            yield event


def _push(event: Iterated) -> tuple[int, int]:
    """Staleness and replica, 0 for none."""
    return event.staleness or 0, event.replica or 0


def is_schedule(folder: Path) -> bool:
    return os.path.isfile(folder / "schedule.prototxt")


def _no_log(out: Path) -> tuple[str, str]:
    """Message and hint."""
    if os.path.isfile(out):
        return (
            f"{out} is a file",
            f"name the output folder: {out.parent}" if out.name == LOG else "name an output folder",
        )
    if not os.path.exists(out):
        return f"there is no folder {out}", "name the output folder of a run: ./out/NAME, or what --out named"
    if is_schedule(out):
        return (
            f"{out} is the folder of a schedule",
            "name the output folder of its run: ./out/NAME, or what --out named",
        )
    return f"{out} has no {LOG}", "name the output folder of a run that has started: ./out/NAME, or what --out named"
