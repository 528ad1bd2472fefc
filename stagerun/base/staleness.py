"""How stale the pushes of `sync_param { method: ASYNC }` were: of progress lines, `status` and `report`. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Staleness:
    """Of at least one push."""

    pushes: int
    mean: float
    largest: int

    def __str__(self) -> str:
        """`staleness 2.9, at most 7`"""
        return f"staleness {self.mean:.3g}, at most {self.largest}"


def staleness_of(pushes: Iterable[int | None]) -> Staleness | None:
    """None where no iteration is a push, which has a number."""
    found = [stale for stale in pushes if stale is not None]
    return Staleness(len(found), sum(found) / len(found), max(found)) if found else None
