"""How long a stop may take, and how long it would: one for each rank and process life."""

from collections.abc import Callable
from dataclasses import dataclass

from stagerun.events import Note
from stagerun.text import duration

# A stop may have to wait for the snapshot under way before it writes its own.
_SNAPSHOTS = 2
# Bytes per second, and seconds for the files and folders themselves, that a slow disk is taken to have before it has shown its own.
_RATE, _FILES_S = 50e6, 1.0


@dataclass(frozen=True, slots=True)
class Grace:
    """`seconds` from a request to stop to the end of the process, and what is `left` of them now; None: no one has asked."""

    seconds: float
    left: Callable[[], float | None]


class Stopping:
    """`snapshot_s`: the longest that a snapshot has taken, 0 before the first; rank 0 alone knows, and asks for a stop in time for all."""

    def __init__(self, grace: Grace | None = None) -> None:
        self.grace = grace
        self.snapshot_s = self._expected_s = 0.0
        self._warned = False

    @property
    def asked(self) -> bool:
        return self.grace is not None and self.grace.left() is not None

    def expect(self, size: int) -> None:
        """Snapshots will have so many bytes."""
        self._expected_s = _FILES_S + size / _RATE

    def left(self) -> float | None:
        """Seconds that an iteration may still take, with snapshots to be written after it."""
        left = self.grace.left() if self.grace is not None else None
        return None if left is None else left - _SNAPSHOTS * (self.snapshot_s or self._expected_s)

    def warning(self, batch_s: float) -> Note | None:
        """Once, when it turns out that the time may not do. `batch_s`: what a device batch takes."""
        needed = batch_s + _SNAPSHOTS * self.snapshot_s
        if self._warned or self.grace is None or not self.snapshot_s or needed <= self.grace.seconds:
            return None
        self._warned = True
        return Note(
            text=f"a stop may take {duration(needed)}: {batch_s:.1f} s for a device batch, {self.snapshot_s:.1f} s for a snapshot, "
            f"which may have to wait for another; the grace period is {duration(self.grace.seconds)}: what was trained since the "
            "last snapshot may be lost (--grace says how long the scheduler waits)",
            warning=True,
        )
