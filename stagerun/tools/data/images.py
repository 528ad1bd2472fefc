"""The work of `stagerun data import`: images of a source as a run imports them (`data.importing.images`), and the command's options.

What must be encoded anew, because it is resized, stays what it was, JPEG (quality 95 unless given) or PNG; with `quality` given every
picture is encoded as JPEG of that quality. Sizes shrink with OpenCV's INTER_AREA, which looks at all pixels, and grow with INTER_LINEAR.
"""

from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import simplejpeg
from PIL import ImageColor

from stagerun.base import order
from stagerun.base.errors import UsageError
from stagerun.base.recipe import InterpMode
from stagerun.data import jpeg, pixels
from stagerun.data.datum import Image, raw_datum
from stagerun.data.importing import odd
from stagerun.data.importing.images import PlainImport, Stored
from stagerun.data.importing.items import Pixels, Source
from stagerun.data.jpeg import BadImage
from stagerun.data.pixels import Draw
from stagerun.language.proto import caffe_pb2

DEFAULT_QUALITY = 95
_LARGEST_SIDE = 65500  # of a JPEG, in libjpeg


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportOptions:
    seed: int | None = 1  # of the shuffle; None: the source's own order
    limit: int | None = None  # only the first so many, after the shuffle
    raw: bool = False  # pixels in place of encoded images
    shorter: int | None = None  # pixels of the shorter side
    exact: tuple[int, int] | None = None  # (height, width)
    quality: int | None = None  # 1 .. 100, of JPEGs
    background: str | None = None  # what shows through transparent images: a name or #rrggbb; None: white


class ImportWork(PlainImport):
    """`Work` of the engine, by the options."""

    def __init__(self, source: Source, path: str, options: ImportOptions, pixels_alone: bool = False) -> None:
        """`pixels_alone`: the format holds pixels, and no encoded images."""
        super().__init__(source, path)
        count, shuffled = min(len(source), options.limit or len(source)), options.seed is not None
        self._order = order.EveryRecord(options.seed or 0, len(source), shuffled).at(0, count)
        if pixels_alone and options.quality is not None:
            raise UsageError(
                f"--quality is for encoded images; {source.kind} holds pixels, which are stored as they are",
                "leave --quality out",
            )
        if pixels_alone and options.background is not None:
            raise UsageError(
                f"--background is for transparent images; {source.kind} has none", "leave --background out"
            )
        self._options = options
        self._background, background = _colour(options.background or "white")
        self.identity = {
            **self.identity,
            "images": count,
            "shuffle": f"seed {options.seed}" if shuffled else "no",
            "pixels": "raw" if options.raw else "encoded",
            "size": _size_text(options),
            "quality": options.quality or "as it is",
            "background": background,
        }

    def stored(self, name: str, content: bytes | Pixels) -> Stored:
        oddities: tuple[str, ...]
        if isinstance(content, Pixels):
            image, data, family, oddities = content.array, None, "", ()
        else:
            judged = odd.judge(content, name, background=self._background)
            image, data, oddities = judged.image, judged.data, judged.oddities
            family = "JPEG" if judged.kind.endswith("JPEG") else "PNG"
        image, same = self._resized(image)
        if self._options.raw or not family:
            return raw_datum(image, 0), image, oddities
        if data is not None and same and self._options.quality is None:
            return caffe_pb2.Datum(data=data, encoded=True), image, oddities
        # Decoded again: the mean is that of what is stored, and what can't be decoded isn't.
        return caffe_pb2.Datum(data=self._encoded(image, family), encoded=True), None, oddities

    def _resized(self, image: Image) -> tuple[Image, bool]:
        """The image in the wanted size, and whether it had it."""
        height, width = image.shape[:2]
        size = _wanted(self._options, height, width)
        if size == (height, width):
            return image, True
        if size[0] * size[1] > jpeg.MAX_PIXELS:
            raise BadImage("too many pixels", f"{width} x {height} pixels would become {size[1]} x {size[0]}")
        shrinks = size[0] <= height and size[1] <= width
        mode = InterpMode.AREA if shrinks else InterpMode.LINEAR
        return np.ascontiguousarray(pixels.apply(image, Draw(size=size, interp_mode=mode))), False

    def _encoded(self, image: Image, family: str) -> bytes:
        if family == "PNG" and self._options.quality is None:
            return odd.encode_png(image)
        if max(image.shape[:2]) > _LARGEST_SIDE:
            raise BadImage("too large for JPEG", f"{image.shape[1]} x {image.shape[0]} pixels")
        colours = ("GRAY", "Gray") if image.shape[2] == 1 else ("BGR", "420")
        return bytes(
            simplejpeg.encode_jpeg(np.ascontiguousarray(image), self._options.quality or DEFAULT_QUALITY, *colours)
        )


def _colour(text: str) -> tuple[odd.Colour, str]:
    """(R, G, B) of a colour, and one name for it: `white` or #rrggbb. UsageError."""
    with suppress(ValueError):
        red, green, blue, *more = ImageColor.getrgb(text)
        if not more:  # a fourth number would be the colour's own alpha
            name = f"#{red:02x}{green:02x}{blue:02x}"
            return (red, green, blue), "white" if name == "#ffffff" else name
    raise UsageError(f"--background `{text}` is not an opaque colour", "give a name as in CSS, or #rrggbb")


def _size_text(options: ImportOptions) -> str:
    if options.shorter is not None:
        return f"shorter side {options.shorter}"
    return "as it is" if options.exact is None else f"height {options.exact[0]}, width {options.exact[1]}"


def _wanted(options: ImportOptions, height: int, width: int) -> tuple[int, int]:
    if options.exact is not None:
        return options.exact
    if options.shorter is None:
        return height, width
    n = options.shorter
    # The longer side is rounded half up, in whole numbers.
    return (
        (n, (2 * width * n + height) // (2 * height))
        if height <= width
        else ((2 * height * n + width) // (2 * width), n)
    )
