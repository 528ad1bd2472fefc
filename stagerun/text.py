"""Numbers and rows as people read them."""

import re
from collections.abc import Sequence

# C0 but tab and newline, DEL, C1; what turns the direction of writing; line separators; halves of a pair, as in a name that isn't UTF-8.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def shown(text: str) -> str:
    """`text` with U+FFFD for each character that would command a terminal, as long as before: a caret still points at its place."""
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text)


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as lines, columns as wide as their widest cell, no trailing spaces."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def count(number: int, noun: str) -> str:
    """`1 worker`, `2 workers`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """`42 s`, `3 min 05 s`, `2 h 07 min`, `3 d 04 h`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"


def size(count: float) -> str:
    """Bytes as `512 B`, `1.5 MB`: powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
