"""Numbers and tables for people."""

import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

# C0 except tab and newline, DEL, C1; direction marks; line separators; lone surrogates, as in a name that isn't UTF-8.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def shown(text: str) -> str:
    """Return `text` with U+FFFD for each character that would control a terminal; the length stays, so that carets still fit."""
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text)


_terminals: list[Callable[[], int | None]] = []


@contextmanager
def printing_on(terminal: Callable[[], int | None]) -> Iterator[None]:
    """Fold tables, in all threads, to the columns that `terminal` returns (None: don't fold). For the command line."""
    _terminals.append(terminal)
    try:
        yield
    finally:
        _terminals.pop()


def terminal() -> int | None:
    """Return the columns of the terminal that output goes to; None for a pipe or a file."""
    return _terminals[-1]() if _terminals else None


_FOLDED = 32  # characters to which a long cell is folded before a table is cut
_NARROWEST = 12
_CARETS = re.compile(r"\s*\^+")
_GAP, _INSIDE = re.compile(r"\S {2,}"), re.compile(r"(?<=\S) (?=\S)")
_LABEL = re.compile(r"\s*\S+( \S+)* {2,}")


def columns(rows: Sequence[Sequence[str]], indent: int = 0) -> list[str]:
    """Return rows of cells as lines, columns as wide as their widest cell, no trailing spaces. For a narrower terminal, fold long cells, then
    cut the table into several, one below the other. `indent`: the width that the caller adds to each line."""
    natural = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    width = terminal()
    room = None if width is None else width - indent
    lines: list[str] = []
    for part in parts([min(w, _FOLDED) for w in natural], room):
        widths = [natural[i] for i in part]
        while room is not None and sum(widths) + 2 * len(widths) - 2 > room and max(widths) > _NARROWEST:
            widths[widths.index(max(widths))] -= 1
        lines += [""] if lines else []
        for row in rows:
            folded = [_folded(row[i], w) for i, w in zip(part, widths, strict=True)]
            for cells in zip_longest(*folded, fillvalue=""):
                lines.append("  ".join(cell.ljust(w) for cell, w in zip(cells, widths, strict=True)).rstrip())
    return lines


def parts(widths: Sequence[int], room: int | None) -> list[list[int]]:
    """Divide the columns of a table into parts no wider than `room`; the first column is in all."""
    divided = [[0]]
    for i in range(1, len(widths)):
        wide = sum(widths[j] + 2 for j in (*divided[-1], i)) - 2
        if room is not None and wide > room and len(divided[-1]) > 1:
            divided.append([0])
        divided[-1].append(i)
    return divided


def wrapped(text: str, width: int | None) -> str:
    """Break lines longer than `width` between words, the rest below the line's text. A row of Markdown stays whole; a source line with a
    caret below it is cut, and the caret with it."""
    if width is None:
        return text
    lines, broken = text.split("\n"), list[str]()
    for i, line in enumerate(lines):
        label = _LABEL.match(line)
        indent = len(line) - len(line.lstrip()) + 2 if label is None or label.end() > width / 2 else label.end()
        if carets := next(filter(_CARETS.fullmatch, lines[i : i + 2]), None):
            broken.append(_cut(line, width, carets.index("^")))
        elif line.startswith("|") or len(_GAP.findall(line)) < 2:
            broken += [line] if line.startswith("|") else _folded(line, width, " " * indent)
        else:  # between fields that are two spaces apart rather than inside one
            for part in _folded(_INSIDE.sub("\0", line), width, " " * indent):
                broken += _folded(part.replace("\0", " "), width, " " * indent)
    return "\n".join(broken)


def _cut(line: str, width: int, at: int) -> str:
    """Return the part of a line around the column `at`."""
    start = 0 if at < width * 3 // 4 else at - width // 2
    seen = line[start : start + width]
    if line.lstrip(" ^"):  # not the carets
        if start:
            seen = "..." + seen[3:]
        if len(line) > start + width:
            seen = seen[: width - 3] + "..."
    return seen


def _folded(text: str, width: int, indent: str = "") -> list[str]:
    if len(text) <= width:
        return [text]
    return textwrap.wrap(
        text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False, replace_whitespace=False
    )


def count(number: int, noun: str) -> str:
    """Return `1 worker`, `2 workers`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def between(least: float, most: float, form: str = "") -> str:
    """Return `12 to 40`; `40` if both look the same.

    >>> between(12, 40), between(0.999, 1.001, ".2f")
    ('12 to 40', '1.00')
    """
    low, high = f"{least:{form}}", f"{most:{form}}"
    return high if low == high else f"{low} to {high}"


def apart(values: Sequence[Any], digits: int = 4, show: Callable[[Any, int], str] = "{:.{}g}".format) -> list[str]:
    """Return each number with `digits` digits, or more if different numbers would look the same.

    >>> apart([0.9, 0.95]), apart([0.999996, 0.9999971, 1]), apart([0.1 + 0.2, 0.3])
    (['0.9', '0.95'], ['0.999996', '0.999997', '1'], ['0.3', '0.3'])
    """
    different = len({show(value, 12) for value in values})
    while len({show(value, digits) for value in values}) < different:
        digits += 1
    return [show(value, digits) for value in values]


def first(lines: Sequence[str], most: int = 20) -> list[str]:
    """Return the first lines, and the number of the others."""
    return [*lines[:most], *([f"and {len(lines) - most} more"] if len(lines) > most else [])]


MOST_LISTED = 5  # names in a line, if there may be hundreds


def listed(words: Sequence[str], most: int | None = None, last: str = "and") -> str:
    """Return `a`, `a and b`, `a, b and c`; of many the first `most`: `a, b and 7 more`. A single remaining word is named."""
    if most is not None and len(words) > most + 1:
        words = [*words[:most], f"{len(words) - most} more"]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"


def duration(seconds: float, short: str = "") -> str:
    """Return `42 s`, `3 min 05 s`, `2 h 07 min`, `3 d 04 h`. `short`: the format below a minute: `.1f` for tenths, `.3g` for `0.0123 s`."""
    whole = round(seconds)
    text = format(seconds, short) if short else str(whole)
    if float(text) < 60:
        return f"{text} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"


def percent(share: float | None) -> str:
    """Return `12.34 %`; '' for None."""
    return "" if share is None else f"{100 * share:.2f} %"


def size(count: float) -> str:
    """Return bytes as `512 B`, `1.5 MB`: powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
