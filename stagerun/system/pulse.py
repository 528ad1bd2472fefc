"""A worker's signs of life: a small record that its training thread writes and its monitor reads.

The record has two slots, written in turn, each with a number and a checksum, so that a reader never takes a torn slot, whatever the order of
visible writes, and a writer that stops halfway leaves the other slot intact.
"""

import enum
import struct
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")


class Section(enum.Enum):
    """A worker's activity, each with its time-out."""

    START = "start"  # meeting the others, reading the start snapshot, opening the images
    COPY = "copy"  # images to scratch, while training waits for them
    FIRST_ITERATION = "first_iteration"  # of a stage in this process: torch may compile, libraries choose their ways
    ITERATION = "iteration"
    EVALUATION = "evaluation"
    SAVE = "save"  # training stands still for a snapshot


SECTIONS = tuple(Section)
# Seconds without progress; for an iteration and an evaluation at least this, and SLOWEST times the slowest recent step.
DEFAULTS = {
    Section.START: 600.0,
    Section.COPY: 1800.0,
    Section.FIRST_ITERATION: 600.0,
    Section.ITERATION: 60.0,
    Section.EVALUATION: 60.0,
    Section.SAVE: 600.0,
}
SLOWEST = 10
# On a busy machine a process may wait that long for a processor.
LEAST_S = 1.0
_LEARNED = (Section.ITERATION, Section.EVALUATION)
# Steps before `slowest` counts: reading a batch is a step, and so is computing it.
_KNOWN = 2
# The slowest step is forgotten after one to two stretches of this many iterations.
_STRETCH = 50

_SLOT = struct.Struct("=QB???ddqQdd64s")
_SUM = struct.Struct("=I")
_SLOT_BYTES = 256
SIZE = 2 * _SLOT_BYTES


@dataclass(frozen=True, slots=True)
class Limits:
    """Time-outs. `given`: the user's, in seconds."""

    given: Mapping[Section, float] = field(default_factory=dict)

    def of(self, section: Section, slowest: float = 0.0, compiled: bool = False) -> float:
        """Return the seconds without progress after which a rank counts as hung. `slowest`: seconds of the slowest recent step, 0 if unknown;
        `compiled`: any step may compile for a new shape. Both get at least a first iteration's time-out."""
        if section in self.given:
            return self.given[section]
        limit = DEFAULTS[section]
        if section in _LEARNED:
            unknown = compiled or slowest == 0
            limit = max(limit, SLOWEST * slowest, self.of(Section.FIRST_ITERATION) if unknown else 0.0)
        return limit

    @property
    def longest(self) -> float:
        """Return the longest time-out without measured steps."""
        return max(self.of(section) for section in Section)


@dataclass(slots=True)
class Beat:
    """The record. Times by CLOCK_MONOTONIC, in seconds."""

    section: Section = Section.START
    waiting: bool = False  # for other ranks, in a collective
    printing: bool = False  # which may block for a reader
    compiled: bool = False
    moved: float = 0.0  # time of the last progress
    since: float = 0.0  # when it began to wait
    iter: int = 0
    batches: int = 0  # device batches of training after the first iteration
    busy: float = 0.0  # their seconds, without waiting for others
    slowest: float = 0.0  # seconds of the slowest recent step in this section; 0 if unknown
    stage: str = ""


@dataclass(slots=True)
class _Slow:
    """Seconds of the slowest step, in this stretch and the one before."""

    now: float = 0.0
    before: float = 0.0
    steps: int = 0

    @property
    def slowest(self) -> float:
        return max(self.now, self.before) if self.steps >= _KNOWN else 0.0

    def turn(self) -> None:
        self.now, self.before = 0.0, self.now


class Pulse:
    """Written by the training thread alone, in microseconds a beat; a reader is optional."""

    def __init__(
        self,
        buffer: memoryview | None = None,
        clock: Callable[[], float] = time.monotonic,
        limits: Limits | None = None,
    ) -> None:
        """`buffer`: SIZE bytes, shared with the reader. `limits`: the reader's."""
        self._buffer = buffer if buffer is not None else memoryview(bytearray(SIZE))
        self._clock, self._limits = clock, limits or Limits()
        self._number = 0
        self._now = Beat(moved=clock(), since=clock())
        self._printed = 0.0
        self._waited, self._fresh = 0.0, 0  # seconds and batches of the present iteration
        self._suspended = False  # in it
        self._slow = {section: _Slow() for section in _LEARNED}
        # What a first iteration takes is the best guess at the next one.
        self._slow[Section.FIRST_ITERATION] = self._slow[Section.ITERATION]
        self._stretch = 0
        # The monitor's lines for the user; other threads may append.
        self.news: deque[str] = deque()
        self._write()

    @property
    def waits(self) -> bool:
        """Return whether the worker waits for other ranks."""
        return self._now.waiting

    @property
    def within(self) -> Section:
        """Return the current section."""
        return self._now.section

    def stage(self, name: str, iter: int, compiled: bool) -> None:
        """Begin to train a stage at `iter`."""
        self._now.stage, self._now.compiled, self._now.iter = name, compiled, iter
        self.enter(Section.FIRST_ITERATION)

    def enter(self, section: Section) -> None:
        if section is Section.EVALUATION and self._now.section is not section:
            self._slow[section].turn()
        self._now.section, self._waited, self._fresh = section, 0.0, 0
        self._now.moved = self._clock()
        self._write()

    @contextmanager
    def section(self, section: Section) -> Iterator[None]:
        """Run the body in a section, and resume the previous one. Printing every few seconds while images are copied is not progress of the copy:
        only its time doesn't count."""
        before, moved, waited, fresh = self._now.section, self._now.moved, self._waited, self._fresh
        self.enter(section)
        entered = self._now.moved
        try:
            yield
        finally:
            self.enter(before)
            self._waited, self._fresh = waited, fresh
            if before is Section.COPY:
                self._now.moved += moved - entered
                self._write()

    @contextmanager
    def printing(self) -> Iterator[None]:
        """Run the body while it writes to a screen, which may block (Ctrl-S, a pager)."""
        self.prints(True)
        try:
            yield
        finally:
            self.prints(False)

    def prints(self, on: bool) -> None:
        now = self._clock()
        if self._now.section is not Section.COPY:
            self._now.moved = now
        elif not on:  # as in `section`
            self._now.moved += now - self._printed
        if on:
            self._printed = now
        self._now.printing = on
        self._write()

    def beat(self) -> None:
        """Record progress, such as a device batch."""
        now = self._clock()
        self._step(now)
        self._now.moved = now
        self._fresh += 1
        self._write()

    def wait(self) -> None:
        """Begin to wait for other ranks."""
        now = self._clock()
        self._step(now)
        self._now.waiting, self._now.since = True, now
        self._write()

    def go_on(self) -> None:
        """End a wait. While images are copied it is not progress: the ranks then meet all the time."""
        now = self._clock()
        self._waited += now - self._now.since
        self._now.waiting = False
        if self._now.section is not Section.COPY:
            self._now.moved = now
        self._write()

    def iterated(self, iter: int, seconds: float) -> None:
        """Record a finished iteration; a first one doesn't count for the rank's speed."""
        if self._now.section is Section.ITERATION:
            if not self._suspended:
                self._now.busy += max(0.0, seconds - self._waited)
                self._now.batches += self._fresh
            self._stretch += 1
            if self._stretch % _STRETCH == 0:
                self._slow[Section.ITERATION].turn()
        self._now.iter, self._suspended = iter, False
        self.enter(Section.ITERATION)

    def _step(self, now: float) -> None:
        slow = self._slow.get(self._now.section)
        if slow is None or self._now.waiting:
            return
        step = now - self._now.moved
        # This process was suspended, or it would have been ended: discard the step.
        if step > self._limits.of(self._now.section, slow.slowest, self._now.compiled):
            self._suspended = True
            return
        slow.now = max(slow.now, step)
        slow.steps += 1

    def _write(self) -> None:
        self._number += 1
        now = self._now
        slow = self._slow.get(now.section)
        now.slowest = slow.slowest if slow is not None else 0.0
        slot = _SLOT.pack(
            *(self._number, SECTIONS.index(now.section), now.waiting, now.printing, now.compiled, now.moved, now.since),
            *(now.iter, now.batches, now.busy, now.slowest, now.stage.encode()),  # truncated to its field
        )
        start = self._number % 2 * _SLOT_BYTES
        self._buffer[start : start + len(slot) + 4] = slot + _SUM.pack(zlib.crc32(slot))


def read(buffer: bytes) -> Beat | None:
    """Return the newest intact slot of SIZE bytes; None while both are written."""
    newest, beat = 0, None
    for start in (0, _SLOT_BYTES):
        slot = buffer[start : start + _SLOT.size]
        if _SUM.unpack_from(buffer, start + _SLOT.size)[0] != zlib.crc32(slot):
            continue
        number, section, *fields = _SLOT.unpack(slot)  # the fields of Beat, in their order
        if number > newest:
            fields[-1] = fields[-1].rstrip(b"\0").decode(errors="replace")
            newest, beat = number, Beat(SECTIONS[section], *fields)
    return beat


def beating(items: Iterable[T], pulse: Pulse) -> Iterator[T]:
    """Yield `items`, with a beat for each."""
    for item in items:
        pulse.beat()
        yield item
