"""Where the time of an iteration goes: stretches of a clock, as one rank saw them. Values, and sums over them."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

# What the training thread does, one after the other. `wait`: from the end of backward until the sum of the gradients is there.
DATA, FORWARD, BACKWARD, WAIT, UPDATE = PARTS = ("data", "forward", "backward", "wait", "update")
# Beside it: a piece of the gradients (or the tail that travels with them) is on its way, from its launch to its sum.
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
    """Collects them on one rank. Reductions end in threads of their own; appending to a list is safe there."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.found: list[Span] = []
        self.on = True  # else nothing is added
        self.stage, self.iter = "", 0

    def add(self, name: str, started: float, ended: float) -> None:
        if self.on:
            self.found.append(Span(name, started, ended, self.iter, stage=self.stage))

    def reduction(self, size: int) -> Callable[[], None]:
        """A piece of `size` bytes leaves; the answer is called when its sum is there."""
        started, iter, stage = self.clock(), self.iter, self.stage
        return lambda: self.found.append(Span(REDUCTION, started, self.clock(), iter, size, stage))


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Seconds of one rank, summed over its iterations. `sending`: at least one reduction was under way; `hidden`: while backward went on."""

    iterations: int
    sending: float
    hidden: float


def overlap(spans: Sequence[Span]) -> Overlap:
    """Reductions that are under way at one time count once."""
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
    """Summed by name, reductions left out, which lie beside the others."""
    sums = dict.fromkeys(PARTS, 0.0)
    for span in spans:
        if span.name != REDUCTION:
            sums[span.name] += span.seconds
    return sums
