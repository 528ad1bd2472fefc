"""What a scenario of injected faults yields: one Trial after the other, which scripts/reliability counts, sums up and prints."""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Trial:
    """`faults` that were injected in it, and what came of them: `counts` by words, summed over trials (`{"saved": 1}`), and
    `largest`, of which the greatest is kept (`{"seconds until raised": 3.4}`). `wrong` says why it misses the aim, '' if it
    doesn't, with what is needed to do it again."""

    faults: int = 1
    counts: Mapping[str, int] = field(default_factory=dict)
    largest: Mapping[str, float] = field(default_factory=dict)
    wrong: str = ""


@dataclass(frozen=True)
class Scenario:
    """A row of the table. `trials(rng, folder)` goes on for as long as it is asked, or until there is nothing left to try; it works in
    `folder`, which is its own, and draws from `rng` alone. Each trial takes seconds, so that the whole can be stopped and
    continued. `wanted`: faults in all that the aim speaks of. `needs` says what is missing here ('' if nothing)."""

    name: str
    fault: str
    aim: str
    wanted: int
    trials: Callable[[random.Random, Path], Iterator[Trial]]
    needs: Callable[[], str] = lambda: ""
