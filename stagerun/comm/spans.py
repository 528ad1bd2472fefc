"""Time spans of an iteration's parts, as one rank saw them, and sums over them."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

# The training thread's work, in order. `wait`: from the end of backward until the gradients are summed.
DATA, FORWARD, BACKWARD, WAIT, UPDATE = PARTS = ("data", "forward", "backward", "wait", "update")
# At the same time: a chunk of the gradients (or the tail sent with them) is on its way, from its launch to its sum.
REDUCTION = "reduction"


@dataclass(frozen=True, slots=True)
class Span:
    """Seconds of CLOCK_MONOTONIC. `iter`: updates done when its iteration began."""

    name: str
    started: float
    ended: float
    iter: int
    bytes: int = 0  # of a reduction
    stage: str = ""

    @property
    def seconds(self) -> float:
        return self.ended - self.started


class Spans:
    """The spans of one rank. Reductions end in other threads; appending to a list is safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.found: list[Span] = []
        self.on = True  # else nothing is added
        self.stage, self.iter = "", 0

    def add(self, name: str, started: float, ended: float) -> None:
        if self.on:
            self.found.append(Span(name, started, ended, self.iter, stage=self.stage))

    def reduction(self, size: int) -> Callable[[], None]:
        """Note that `size` bytes leave; call the answer when they are summed."""
        started, iter, stage = self.clock(), self.iter, self.stage
        return lambda: self.found.append(Span(REDUCTION, started, self.clock(), iter, size, stage))


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Seconds of one rank, summed over its iterations. `sending`: at least one reduction was under way; `hidden`: during backward."""

    iterations: int
    sending: float
    hidden: float


def overlap(spans: Sequence[Span]) -> Overlap:
    """Sum the time of reductions, simultaneous ones once."""
    edges = [edge for s in spans for edge in ((s.started, s.name, 1), (s.ended, s.name, -1))]
    open_now = dict.fromkeys((*PARTS, REDUCTION), 0)
    sending = hidden = 0.0
    for (at, name, step), (until, *_) in pairwise(sorted(edges)):
        open_now[name] += step
        if open_now[REDUCTION]:
            sending += until - at
            if open_now[BACKWARD]:
                hidden += until - at
    return Overlap(iterations=len({(s.stage, s.iter) for s in spans}), sending=sending, hidden=hidden)


def seconds_of(spans: Iterable[Span]) -> dict[str, float]:
    """Return the sums by name, without reductions, which overlap the others."""
    sums = dict.fromkeys(PARTS, 0.0)
    for span in spans:
        if span.name != REDUCTION:
            sums[span.name] += span.seconds
    return sums
