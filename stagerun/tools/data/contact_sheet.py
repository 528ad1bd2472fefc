"""A contact sheet: many pictures on one, each with lines of text under it. Pure."""

import textwrap
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pillow
from PIL import ImageDraw, ImageFont

from stagerun.data.datum import Image
from stagerun.data.jpeg import Rectangle

# Anything larger is not worth looking at, and fills memory.
MOST_PIXELS = 200_000_000

_TEXT, _HEADING = 13, 15  # sizes of the letters, pixels
_LINE = 16
_GAP = 8
_PAPER, _INK, _WRONG, _EDGE = (255, 255, 255), (32, 32, 32), (176, 0, 0), (208, 208, 208)


_Font: TypeAlias = ImageFont.FreeTypeFont | ImageFont.ImageFont


@dataclass(frozen=True, slots=True)
class Tile:
    """One picture, uint8[height, width, 1 or 3] in B, G, R, and the lines under it; or what is `wrong` with it, in its place."""

    picture: Image | None
    lines: tuple[str, ...]
    wrong: str = ""


def as_trained(
    image: Image,
    lighting: NDArray[np.float32] | None = None,
    cutout: Rectangle | None = None,
    zero: Sequence[float] = (0.0,),
) -> Image:
    """The image as the network gets it, made visible again.

    `lighting` (B, G, R) is added, rounded and clipped to 0 .. 255, which training doesn't do; `cutout` has the colour that is 0 for
    the network: `zero`, the mean (one number, or one per channel in B, G, R).
    """
    if lighting is not None:
        image = np.clip(np.rint(image + lighting), 0, 255).astype(np.uint8)
    if cutout is not None:
        image = image.copy()
        rows, columns = slice(cutout.top, cutout.top + cutout.height), slice(cutout.left, cutout.left + cutout.width)
        image[rows, columns] = np.clip(np.rint(zero), 0, 255).astype(np.uint8)
    return image


def columns_of(tiles: int) -> int:
    """Columns of a sheet that is about half as wide again as high."""
    return next(n for n in range(1, tiles + 1) if n * n * 2 >= tiles * 3 or n == tiles)


def pixels_of(tiles: int, lines: int, box: int) -> int:
    """About how many pixels a sheet has."""
    columns = columns_of(tiles)
    return columns * (box + _GAP) * -(-tiles // columns) * (box + _GAP + lines * _LINE)


def sheet(tiles: Sequence[Tile], heading: Sequence[str], box: int) -> Image:
    """uint8[height, width, 3] in B, G, R: the heading, then the tiles (1 or more) row by row, each picture in a square of `box`
    pixels, down left, next to its lines.

    Pictures smaller than that are enlarged a whole number of times, so that their pixels can be told apart; larger ones shrink.
    Text that two lines are too short for loses its middle.
    """
    columns = columns_of(len(tiles))
    step = box + _GAP
    width = columns * step + _GAP
    font, large = _font(_TEXT), _font(_HEADING)
    head = [part for line in heading for part in _wrap(line, large, width - 2 * _GAP)]
    top = _GAP + len(head) * (_HEADING + 5) + (_GAP if head else 0)
    said = [[part for line in tile.lines for part in _folded(line, font, box)] for tile in tiles]
    lines = max(map(len, said))
    high = box + lines * _LINE + _GAP + _GAP // 2
    paper = Pillow.new("RGB", (width, top + -(-len(tiles) // columns) * high + _GAP // 2), _PAPER)
    draw = ImageDraw.Draw(paper)
    for i, line in enumerate(head):
        draw.text((_GAP, _GAP + i * (_HEADING + 5)), line, _INK, large)
    for i, tile in enumerate(tiles):
        left, y = _GAP + i % columns * step, top + i // columns * high
        if tile.picture is None:
            draw.rectangle((left, y, left + box - 1, y + box - 1), None, _EDGE)
            for n, line in enumerate(_wrap(tile.wrong, font, box - 8)[: (box - 8) // _LINE]):
                draw.text((left + 4, y + 4 + n * _LINE), line, _WRONG, font)
        else:
            fitted = _fit(tile.picture, box)
            paper.paste(Pillow.fromarray(fitted[:, :, ::-1].copy()), (left, y + box - fitted.shape[0]))
        for n, line in enumerate(said[i]):
            draw.text((left, y + box + 2 + n * _LINE), line, _INK, font)
    return np.asarray(paper)[:, :, ::-1]


def _font(size: int) -> _Font:
    """DejaVu Sans, which has the letters of most languages; without it Pillow's own, which has those of ASCII alone."""
    try:
        return ImageFont.truetype("DejaVuSans.ttf", size)
    except OSError:
        return ImageFont.load_default(size)


def png(image: Image) -> bytes:
    """uint8[height, width, 3] in B, G, R as a PNG file."""
    _, data = cv2.imencode(".png", image)
    return data.tobytes()


def _fit(image: Image, box: int) -> Image:
    """In B, G, R, at most `box` high and wide."""
    if image.shape[2] == 1:
        image = np.repeat(image, 3, axis=2)
    longer = max(image.shape[:2])
    if longer <= box:
        times = box // longer
        return image.repeat(times, axis=0).repeat(times, axis=1)
    height, width = (max(1, round(side * box / longer)) for side in image.shape[:2])
    return np.asarray(cv2.resize(image, (width, height), interpolation=cv2.INTER_AREA), np.uint8)


def _wrap(text: str, font: _Font, width: int) -> list[str]:
    """Lines that fit into `width` pixels; for proportional letters, by their mean width in this text."""
    if isinstance(font, ImageFont.FreeTypeFont) and font.getname()[0] == "Aileron":  # Pillow's own
        text = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    letters = max(1, int(len(text) * width / max(1.0, font.getlength(text))))
    while letters > 1 and any(font.getlength(line) > width for line in textwrap.wrap(text, letters)):
        letters -= 1
    return textwrap.wrap(text, letters)


def _folded(text: str, font: _Font, width: int) -> list[str]:
    """The text in one line or two."""
    first, *rest = _wrap(text, font, width) or [""]
    return [first, _shorten(text.removeprefix(first).strip(), font, width)] if rest else [first]


def _shorten(text: str, font: _Font, width: int) -> str:
    """The text, or as much of its beginning and end as fits: keys end in what tells them apart, classes begin with it."""
    if font.getlength(text) <= width:
        return text
    kept = len(text) - 1
    while kept > 1 and font.getlength(_without_middle(text, kept)) > width:
        kept -= 1
    return _without_middle(text, kept)


def _without_middle(text: str, kept: int) -> str:
    return f"{text[: kept - kept // 2]}...{text[len(text) - kept // 2 :]}"
