"""What a scenario of injected faults yields: one Trial after the other, which scripts/dev reliability counts, sums up and prints."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Trial:
    """`faults` that were injected in it, and what came of them: `counts` by words, summed over trials (`{"saved": 1}`), and
    `largest`, of which the greatest is kept (`{"seconds until raised": 3.4}`). `wrong` says why it misses the aim, '' if it
    doesn't, with what is needed to do it again."""

    faults: int = 1
    counts: Mapping[str, int] = field(default_factory=dict)
    largest: Mapping[str, float] = field(default_factory=dict)
    wrong: str = ""
