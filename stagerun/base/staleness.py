"""How stale the pushes of `sync_param { method: ASYNC }` were, and whose they were: of progress lines, `status` and `report`. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

BARS = 12  # of a histogram, at most


@dataclass(frozen=True, slots=True)
class Staleness:
    """By replica (the rank of its worker), how many pushes had which staleness. At least one push."""

    by_replica: Mapping[int, Mapping[int, int]]

    @property
    def counts(self) -> Mapping[int, int]:
        """How many pushes had which staleness, in all; ascending."""
        found: Counter[int] = Counter()
        for counts in self.by_replica.values():
            found.update(counts)
        return dict(sorted(found.items()))

    @property
    def pushes(self) -> int:
        return sum(self.counts.values())

    @property
    def mean(self) -> float:
        return sum(stale * number for stale, number in self.counts.items()) / self.pushes

    @property
    def largest(self) -> int:
        return max(self.counts)

    def of(self, replica: int) -> "Staleness":
        """That of one replica, which has pushed."""
        return Staleness({replica: self.by_replica[replica]})

    @property
    def shares(self) -> Mapping[int, float]:
        """Each replica's part of the pushes, 0 to 1."""
        return {rank: sum(counts.values()) / self.pushes for rank, counts in sorted(self.by_replica.items())}

    def bars(self, most: int = BARS) -> list[tuple[str, float]]:
        """A histogram from 0 to the largest: `3` or `20-29`, and its part of the pushes.

        >>> staleness_of([(0, 0), (3, 1), (3, 0), (5, 1)]).bars(3)
        [('0-1', 0.25), ('2-3', 0.5), ('4-5', 0.25)]
        """
        width = -(-(self.largest + 1) // most)
        parts = [0] * (self.largest // width + 1)
        for stale, number in self.counts.items():
            parts[stale // width] += number
        names = [f"{i * width}" if width == 1 else f"{i * width}-{(i + 1) * width - 1}" for i in range(len(parts))]
        return [(name, number / self.pushes) for name, number in zip(names, parts, strict=True)]

    def __str__(self) -> str:
        """`staleness 2.9, at most 7`"""
        return f"staleness {self.mean:.3g}, at most {self.largest}"


def staleness_of(pushes: Iterable[tuple[int | None, int | None]]) -> Staleness | None:
    """What (staleness, replica) of each push come to; None where none says either."""
    found: dict[int, Counter[int]] = {}
    for stale, replica in pushes:
        if stale is not None and replica is not None:
            found.setdefault(replica, Counter())[stale] += 1
    return Staleness({rank: dict(sorted(found[rank].items())) for rank in sorted(found)}) if found else None


def histogram(found: Staleness, width: int = 40) -> list[str]:
    """As lines of text: a bar for each staleness, then each replica's part."""
    bars = found.bars()
    wide, top = max(len(name) for name, _ in bars), max(share for _, share in bars)
    lines = [
        f"{name:>{wide}}  {100 * share:5.1f} %  {'#' * round(width * share / top)}".rstrip() for name, share in bars
    ]
    parts = ", ".join(f"{rank} {100 * share:.1f} %" for rank, share in found.shares.items())
    return [*lines, f"by replica: {parts}"]
