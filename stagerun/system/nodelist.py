"""Slurm's short forms: `node[1-3,7]` for names of hosts, `2(x3),1` for a number per node."""

import re
from collections.abc import Iterator

# What one may expand to; a list of a larger cluster than there are is a mistake.
_MOST = 1 << 17
_PART = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
_RANGE = re.compile(r"\s*([0-9]+)(?:-([0-9]+))?\s*")
_COUNTED = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def expand(text: str) -> list[str]:
    """The names, in their order: several groups of brackets in a name vary like the digits of a number, the last one
    fastest. ValueError with what is wrong."""
    parts = _PART.findall(text)
    if ",".join(parts) != text or not all(part.strip() for part in parts or [""]):
        raise ValueError(f"`{text[:40]}` has an empty name, or brackets that don't match")
    return [name for part in parts for name in _expand_one(part.strip())]


def _expand_one(part: str) -> Iterator[str]:
    head, bracket, rest = part.partition("[")
    if not bracket:
        yield part
        return
    inside, _, tail = rest.partition("]")
    for piece in inside.split(","):
        found = _RANGE.fullmatch(piece)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if found is None or not first <= last < first + _MOST:
            raise ValueError(f"`{piece}` in `{part[:40]}` is not a number or a range of numbers")
        for number in range(first, last + 1):  # `08-11` is 08, 09, 10, 11: as wide as the first one is written
            yield from (f"{head}{number:0{len(found[1])}d}{more}" for more in _expand_one(tail))


def per_node(text: str) -> list[int]:
    """`2(x3),1` is [2, 2, 2, 1]. ValueError."""
    numbers: list[int] = []
    for part in text.split(","):
        match = _COUNTED.fullmatch(part.strip())
        times = int(match[2] or 1) if match is not None else 0
        if match is None or times > _MOST:
            raise ValueError(f"`{part}` in `{text[:40]}` is not a number of tasks, like `2` or `2(x3)`")
        numbers += [int(match[1])] * times
    return numbers
