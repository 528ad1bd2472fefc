"""A contact sheet: many pictures on one, each with lines of text under it. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import cv2
import numpy as np
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
    cutout: Rectangle | None = None,
    zero: Sequence[float] = (0.0,),
) -> Image:
    """The image as the network gets it, made visible again.

    `cutout` has the colour that is 0 for
    the network: `zero`, the mean (one number, or one per channel in B, G, R).
    """
    if cutout is not None:
        image = image.copy()
        rows, columns = slice(cutout.top, cutout.top + cutout.height), slice(cutout.left, cutout.left + cutout.width)
        image[rows, columns] = np.clip(np.rint(zero), 0, 255).astype(np.uint8)
    return image


def _columns_of(tiles: int) -> int:
    """Columns of a sheet that is about half as wide again as high."""
    return min(tiles, math.ceil(math.sqrt(1.5 * tiles)))


def pixels_of(tiles: int, lines: int, box: int) -> int:
    """About how many pixels a sheet has."""
    columns = _columns_of(tiles)
    return columns * (box + _GAP) * -(-tiles // columns) * (box + _GAP + lines * _LINE)


def sheet(tiles: Sequence[Tile], heading: Sequence[str], box: int) -> Image:
    """uint8[height, width, 3] in B, G, R: the heading, then the tiles (1 or more) row by row, each picture in a square of `box`
    pixels, down left, next to its lines.

    Pictures smaller than that are enlarged a whole number of times, so that their pixels can be told apart; larger ones shrink.
    Text that is too long for its line loses its middle.
    """
    columns = _columns_of(len(tiles))
    step = box + _GAP
    width = columns * step + _GAP
    font, large = _font(_TEXT), _font(_HEADING)
    head = [part for line in heading for part in _wrap(line, large, width - 2 * _GAP)]
    top = _GAP + len(head) * (_HEADING + 5) + (_GAP if head else 0)
    high = box + max(len(tile.lines) for tile in tiles) * _LINE + _GAP + _GAP // 2
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
        for n, line in enumerate(tile.lines):
            draw.text((left, y + box + 2 + n * _LINE), _shorten(line, font, box), _INK, font)
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
    """Lines that fit into `width` pixels."""
    lines: list[str] = []
    for word in text.split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and font.getlength(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(_shorten(word, font, width))
    return lines


def _shorten(text: str, font: _Font, width: int) -> str:
    """The text, or as much of its beginning and end as fits: keys end in what tells them apart, classes begin with it."""
    shown, kept = text, len(text)
    while kept > 1 and font.getlength(shown) > width:
        kept -= 1
        shown = f"{text[: kept - kept // 2]}...{text[len(text) - kept // 2 :]}"
    return shown
