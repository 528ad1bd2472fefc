"""SVG as text. Everything from outside is escaped here: a text by `words` or `text`, an attribute by `element`."""

import math
import unicodedata
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import TypeVar

from stagerun.base.errors import UsageError
from stagerun.drawing.colours import INK

Place = tuple[float, float]

# Of the size of a text, by DejaVu Sans, which is the widest of those that a page may get.
_NARROW, _THIN, _WIDE = "ijlI.,:;|!'", 'frt()[]{}/\\ -"', "mwMW@%"


def element(kind: str, *inside: str, **attributes: str | float | None) -> str:
    """`inside` is markup. A `_` before a name's end is for Python, others stand for `-`; None leaves an attribute out."""
    said = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(value) if isinstance(value, str) else number(value)}"'
        for name, value in attributes.items()
        if value is not None
    )
    return f"<{kind}{said}>{''.join(inside)}</{kind}>" if inside else f"<{kind}{said}/>"


def words(text: str, x: float, y: float, kind: str = "", anchor: str | None = None) -> str:
    return element("text", escape(text), x=x, y=y, class_=kind or None, text_anchor=anchor)


def text(
    said: str, x: float, y: float, size: float = 11, fill: str = INK, anchor: str | None = None, turned: bool = False
) -> str:
    """As `words`, where no style says how. `turned`: from bottom to top."""
    turn = f"rotate(-90 {number(x)} {number(y)})" if turned else None
    return element("text", escape(said), x=x, y=y, font_size=size, fill=fill, text_anchor=anchor, transform=turn)


def document(name: str, width: float, height: float, *inside: str) -> bytes:
    """A file on white, of so many pixels."""
    paper = element("rect", width=width, height=height, fill="#ffffff")
    drawn = element(
        "svg", title(name), paper, *inside, xmlns="http://www.w3.org/2000/svg", width=width, height=height,
        viewBox=f"0 0 {number(width)} {number(height)}", font_family='"Helvetica Neue", Arial, "DejaVu Sans", sans-serif',
    )  # fmt: skip
    return drawn.encode() + b"\n"


def require_svg(file: str) -> None:
    """UsageError for a file that is to have another format."""
    if (ending := Path(file).suffix.lower()) != ".svg":
        hint = (
            f"name FILE.svg; `rsvg-convert FILE.svg -o {file}` makes a PNG of it"
            if ending == ".png"
            else "name FILE.svg"
        )
        raise UsageError(f"--plot {file}: pictures are written as SVG", hint)


def title(text: str) -> str:
    """What a browser shows beside the pointer."""
    return element("title", escape(text))


def number(value: float) -> str:
    """A tenth of a pixel is what anyone sees."""
    return f"{value:.1f}".removesuffix(".0")


def path(lines: Iterable[Sequence[Place]]) -> str:
    """The `d` of lines, each from place to place."""
    return "".join("M" + "L".join(f"{number(x)},{number(y)}" for x, y in line) for line in lines if line)


def wide(text: str, size: float) -> float:
    """Pixels that a text takes, hardly ever more."""
    return size * sum(map(_width, text))


def _width(c: str) -> float:
    if not c.isascii():
        return 1.0 if unicodedata.east_asian_width(c) in "WF" else 0.85
    return 0.34 if c in _NARROW else 0.41 if c in _THIN else 0.97 if c in _WIDE else 0.7 if c.isupper() else 0.63


def thinned(line: Sequence[Place], off: float = 0.15) -> list[Place]:
    """The places that are enough for no other to lie further than `off` above or below the line. Uprights stay."""
    found: list[Place] = list(line[:1])
    last, low, high = found[0] if found else (0.0, 0.0), -math.inf, math.inf
    for x, y in line[1:]:
        begin = found[-1]
        if x - begin[0] > 1e-9 and not low <= (y - begin[1]) / (x - begin[0]) <= high:
            found.append(last)
            begin, low, high = last, -math.inf, math.inf
        across = x - begin[0]
        if across > 1e-9:
            low, high = max(low, (y - off - begin[1]) / across), min(high, (y + off - begin[1]) / across)
        elif last != begin:
            found.append(last)
            low, high = -math.inf, math.inf
        last = x, y
        if across <= 1e-9:
            found.append(last)
            low, high = -math.inf, math.inf
    return [*found, last] if found and last != found[-1] else found


T = TypeVar("T")


def spaced(places: Iterable[tuple[float, T]], apart: float) -> list[tuple[float, list[T]]]:
    """Those that are closer than `apart` to the first of a group, together with it."""
    found: list[tuple[float, list[T]]] = []
    for x, held in sorted(places, key=lambda place: place[0]):
        if found and x - found[-1][0] < apart:
            found[-1][1].append(held)
        else:
            found.append((x, [held]))
    return found
