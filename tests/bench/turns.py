"""What all benches share: sides take turns, so that a machine whose speed drifts slows all, and what is printed is ratios with their spread."""

import argparse
import statistics
from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def parser(about: str | None, **defaults: int) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument(
        "--rounds", type=int, default=defaults["rounds"], help="blocks of each side; each round gives one ratio"
    )
    made.add_argument("--threads", type=int, default=defaults.get("threads"), help="of each side")
    return made


def turns(sides: Sequence[T], rounds: int) -> Iterator[T]:
    """Who goes first changes, so that what a block leaves behind (heat, caches, dirty pages) falls on all alike."""
    for n in range(rounds):
        yield from (*sides[n % len(sides) :], *sides[: n % len(sides)])


def spread(values: Sequence[float], digits: int = 3) -> str:
    """The median, and the quartiles where there are several."""
    if len(values) < 2:
        return f"{values[0]:.{digits}f}"
    low, median, high = statistics.quantiles(values, n=4)
    return f"{median:.{digits}f} ({low:.{digits}f} - {high:.{digits}f})"


def ratio(ours: Sequence[float], others: Sequence[float]) -> str:
    return spread([a / b for a, b in zip(ours, others, strict=True)])
