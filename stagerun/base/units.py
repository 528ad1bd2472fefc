"""Epochs, images, iterations and seconds, converted in exact arithmetic. Pure."""

import re
from fractions import Fraction

_NUMBER = r"([0-9]+(?:\.[0-9]+)?)"
_WORDS = re.compile(rf"(?:{_NUMBER} *d)? *(?:{_NUMBER} *h)? *(?:{_NUMBER} *(?:min|m))? *(?:{_NUMBER} *s)?")
_CLOCK = re.compile(r"(?:([0-9]+)-)?([0-9]+):([0-5][0-9]):([0-5][0-9])")
_SECONDS = (86400, 3600, 60, 1)


def iterations(epochs: float, images: int, batch_size: int) -> int:
    """Iterations nearest to `epochs` of `images`, at `batch_size` images each; halves round up; at least 1."""
    return max(1, int(exact(epochs, images, batch_size) + Fraction(1, 2)))


def exact(epochs: float, images: int, batch_size: int) -> Fraction:
    """The iterations that `epochs` of `images` take, unrounded, on the decimal number as written (2.3 is 23/10, not its nearest double)."""
    return Fraction(repr(float(epochs))) * images / batch_size


def epochs(iterations: int, images: int, batch_size: int) -> float:
    """Epochs of `images` that so many iterations take."""
    return iterations * batch_size / images


def seconds(text: str) -> float:
    """A length of time: `4h`, `90m`, `3h30m`, `1.5 h`, `2d`, `45s`; `1:30:00` and `1-12:00:00`, as job schedulers write them.

    ValueError for anything else, a number without a unit, `1:30` (minutes to one, hours to another) and nothing at all.

    >>> seconds("3h30m"), seconds("1:30:00"), seconds("2 d 04 h")
    (12600.0, 5400.0, 187200.0)
    """
    found = _WORDS.fullmatch(text.strip()) or _CLOCK.fullmatch(text.strip())
    parts = found.groups() if found else ()
    total = sum(Fraction(part) * unit for part, unit in zip(parts, _SECONDS, strict=False) if part)
    if not total or total > 10**12:
        raise ValueError(text)
    return float(total)
