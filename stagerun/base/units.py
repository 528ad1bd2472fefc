"""Exact arithmetic with epochs, images, iterations and seconds, and with the classes' shares of an epoch (`sampling`). Pure, no numpy."""

import re
from collections.abc import Sequence
from fractions import Fraction

from stagerun.base.recipe import Sampling, Solver

_NUMBER = r"([0-9]+(?:\.[0-9]+)?)"
_WORDS = re.compile(rf"(?:{_NUMBER} *d)? *(?:{_NUMBER} *h)? *(?:{_NUMBER} *(?:min|m))? *(?:{_NUMBER} *s)?")
_CLOCK = re.compile(r"(?:([0-9]+)-)?([0-9]+):([0-5][0-9]):([0-5][0-9])")
_SECONDS = (86400, 3600, 60, 1)


def iterations(epochs: float, images: int, batch_size: int) -> int:
    """Return the iterations nearest to `epochs` of `images`, at `batch_size` images each; halves round up; at least 1."""
    return max(1, int(exact(epochs, images, batch_size) + Fraction(1, 2)))


def exact(epochs: float, images: int, batch_size: int) -> Fraction:
    """Return the iterations of `epochs` of `images`, unrounded, for the decimal number as written (2.3 is 23/10, not its nearest double)."""
    return Fraction(repr(float(epochs))) * images / batch_size


def epochs(iterations: int, images: int, batch_size: int) -> float:
    """Return the epochs of `images` in `iterations`."""
    return iterations * batch_size / images


def seconds(text: str) -> float:
    """Read a length of time: `4h`, `90m`, `3h30m`, `1.5 h`, `2d`, `45s`; `1:30:00` and `1-12:00:00`, as job schedulers write them.

    ValueError for anything else, a number without a unit, `1:30` (minutes to one, hours to another) and nothing at all.

    >>> seconds("3h30m"), seconds("1:30:00"), seconds("2 d 04 h")
    (12600.0, 5400.0, 187200.0)
    """
    match = _WORDS.fullmatch(text.strip()) or _CLOCK.fullmatch(text.strip())
    parts = match.groups() if match else ()
    total = sum(Fraction(part) * unit for part, unit in zip(parts, _SECONDS, strict=False) if part)
    if not total or total > 10**12:
        raise ValueError(text)
    return float(total)


def shares(weights: Sequence[Fraction], images: int) -> list[int]:
    """Return how many of `images` each class gets by its weight: within one of the exact share. Weights are 0 or more, one at least above 0.

    By largest remainders (Hamilton's method), of equal ones the first. In whole numbers, so that all machines agree.

    >>> shares([Fraction(1), Fraction(1), Fraction(1), Fraction(0)], 100)
    [34, 33, 33, 0]
    """
    total = sum(weights)
    exact = [images * weight / total for weight in weights]
    whole = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda c: whole[c] - exact[c])
    for c in by_remainder[: images - sum(whole)]:
        whole[c] += 1
    return whole


def weights_of(solver: Solver, sizes: Sequence[int]) -> list[Fraction]:
    """Return the relative frequency of each class; `sizes`: the images of each."""
    if solver.sampling is Sampling.BALANCED:
        return [Fraction(1 if size else 0) for size in sizes]
    return [Fraction(size) for size in sizes]


def sampling_text(solver: Solver, sizes: Sequence[int], images: int) -> str:
    """Return the effect of `sampling` on an epoch of `images` images, for `plan`; `sizes`: () if unknown."""
    name = solver.sampling.value
    weights = weights_of(solver, sizes) if sizes else []
    if not any(weights):
        return name
    drawn = {c: n for c, n in enumerate(shares(weights, images)) if n}
    seen = sum(min(n, sizes[c]) for c, n in drawn.items())
    ends = dict.fromkeys(end(drawn, key=lambda c: (sizes[c], c)) for end in (min, max))  # the rarest and the commonest
    times = ", of ".join(f"class {c} ({sizes[c]}) {drawn[c] / sizes[c]:.3g} times" for c in ends)
    return f"{name}: an epoch has {seen} of {images} images; each of {times}"
