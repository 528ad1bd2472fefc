"""Slurm's short forms: `node[1-3,7]` for names of hosts, `2(x3),1` for a number per node."""

import re

# What one may expand to; a list of a larger cluster than there are is a mistake.
_MOST = 1 << 17
_COUNTED = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def expand(text: str) -> list[str]:
    """The names, in their order: several groups of brackets in a name vary like the digits of a number, the last one
    fastest. ValueError with what is wrong."""
    names: list[str] = []
    for part in _split(text):
        names += _expand_one(part)
        if len(names) > _MOST:
            raise ValueError(f"`{text[:40]}` names more than {_MOST} hosts")
    return names


def per_node(text: str) -> list[int]:
    """`2(x3),1` is [2, 2, 2, 1]. ValueError."""
    numbers: list[int] = []
    for part in text.split(","):
        match = _COUNTED.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"`{part}` in `{text[:40]}` is not a number of tasks, like `2` or `2(x3)`")
        times = int(match[2] or 1)
        if len(numbers) + times > _MOST:
            raise ValueError(f"`{text[:40]}` counts more than {_MOST} nodes")
        numbers += [int(match[1])] * times
    return numbers


def _split(text: str) -> list[str]:
    """At the commas that are in no bracket."""
    parts, begin, inside = [], 0, False
    for at, c in enumerate(text):
        if c in "[]":
            if inside == (c == "["):
                raise ValueError(f"`{text[:40]}` has brackets that don't match")
            inside = c == "["
        elif c == "," and not inside:
            parts.append(text[begin:at])
            begin = at + 1
    if inside:
        raise ValueError(f"`{text[:40]}` has brackets that don't match")
    parts.append(text[begin:])
    if not all(part.strip() for part in parts):
        raise ValueError(f"`{text[:40]}` has an empty name")
    return [part.strip() for part in parts]


def _expand_one(part: str) -> list[str]:
    begin = part.find("[")
    if begin < 0:
        return [part]
    end = part.index("]", begin)
    middle = [number for piece in part[begin + 1 : end].split(",") for number in _range(piece, part)]
    rest = _expand_one(part[end + 1 :]) if end + 1 < len(part) else [""]
    if len(middle) * len(rest) > _MOST:
        raise ValueError(f"`{part[:40]}` names more than {_MOST} hosts")
    return [f"{part[:begin]}{number}{more}" for number in middle for more in rest]


def _range(piece: str, part: str) -> list[str]:
    """`08-11` is 08, 09, 10, 11: as wide as the first one is written."""
    first, dash, last = piece.strip().partition("-")
    last = last if dash else first
    if not (first.isascii() and first.isdigit() and last.isascii() and last.isdigit() and int(first) <= int(last)):
        raise ValueError(f"`{piece}` in `{part[:40]}` is not a number or a range of numbers")
    if int(last) - int(first) >= _MOST:
        raise ValueError(f"`{part[:40]}` names more than {_MOST} hosts")
    return [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
