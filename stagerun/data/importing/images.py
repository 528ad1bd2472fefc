"""The work of `stagerun data import`: one image of a source -> one Datum, by rule.

Encoded images keep their bytes where `odd` keeps them and nothing was asked that changes pixels. What must be encoded anew,
because it is resized, stays what it was, JPEG (quality 95 unless given) or PNG; with `quality` given every picture is encoded
as JPEG of that quality. Formats that hold pixels are stored as pixels, as Caffe's own converters do.

Sizes shrink with OpenCV's INTER_AREA, which looks at all pixels, and grow with INTER_LINEAR.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import ImageColor

from stagerun.base import order
from stagerun.base.errors import DataError, UsageError
from stagerun.base.recipe import InterpMode
from stagerun.data import jpeg, pixels
from stagerun.data.datum import SEVERAL, Image, parse, raw_datum
from stagerun.data.importing import odd
from stagerun.data.importing.engine import Made
from stagerun.data.importing.items import Item, Pixels, Source
from stagerun.data.importing.partial import Note
from stagerun.data.jpeg import BadImage
from stagerun.data.pixels import Draw
from stagerun.data.rows import Statistics, look
from stagerun.language.proto import caffe_pb2

# What decides the records besides source and options: it changes with the rules here and in `odd`.
VERSION = 3
DEFAULT_QUALITY = 95
LONGEST_KEY = 511  # LMDB's limit, bytes
_MOST = 10**8  # keys have eight digits
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


class ImportWork:
    """`Work` of the engine. Position p is the image at place p of the order; what is left out keeps its number."""

    def __init__(self, source: Source, path: str, options: ImportOptions, pixels_alone: bool = False) -> None:
        """`pixels_alone`: the format holds pixels, and no encoded images."""
        if not len(source):
            raise DataError(f"{path}: there are no images in it", "check the path")
        if len(source) >= _MOST:
            raise UsageError(f"{path}: {len(source)} images; keys of eight digits number fewer than 100 million")
        if pixels_alone and options.quality is not None:
            raise UsageError(
                f"--quality is for encoded images; {source.kind} holds pixels, which are stored as they are",
                "leave --quality out",
            )
        if pixels_alone and options.background is not None:
            raise UsageError(
                f"--background is for transparent images; {source.kind} has none", "leave --background out"
            )
        self._source, self._options = source, options
        self._background, self.background = _colour(options.background or "white")
        count = min(len(source), options.limit or len(source))
        self._order: NDArray[np.int64] = order.indices(
            options.seed or 0, len(source), 0, count, options.seed is not None
        )
        self.title = f"stagerun data import: {source.kind} {path}"
        self.classes = source.classes
        self.ignored = source.ignored
        self.statistics: Statistics | None = None
        self.prepared_from = ""
        self.identity: Mapping[str, Any] = {
            "version": VERSION,
            "format": source.kind,
            "source": source.signature,
            "images": count,
            "shuffle": "no" if options.seed is None else f"seed {options.seed}",
            "pixels": "raw" if options.raw else "encoded",
            "size": _size_text(options),
            "quality": options.quality or "as it is",
            "background": self.background,
        }

    def __len__(self) -> int:
        return len(self._order)

    def make(self, position: int) -> Made:
        i = int(self._order[position])
        name = f"image {i} of the source"
        try:
            item = self._source.item(i)
            name = item.name
            key = b"%08d_" % position + name.encode(errors="surrogateescape")
            return self._make(key, item, self._source.read(i))
        except MemoryError:
            # No fault of the image: to leave it out would make the result depend on the machine.
            raise UsageError(f"{name}: not enough memory to decode it", "use fewer --threads") from None
        except DataError as error:
            reason = error.reason if isinstance(error, BadImage) else "can't be read"
            notes = (Note(name, reason, error.message, bad=True),)
            return Made(b"", None, notes=notes)

    def _make(self, key: bytes, item: Item, content: bytes | Pixels) -> Made:
        if len(key) > LONGEST_KEY:
            raise BadImage("name too long", f"its key would have {len(key)} bytes, LMDB's have at most {LONGEST_KEY}")
        if item.several is None and not 0 <= item.label < 2**31:
            raise BadImage("bad label", f"the label is {item.label}; labels count from 0")
        oddities: tuple[str, ...]
        if isinstance(content, Pixels):
            image, data, family, oddities = content.array, None, "", ()
        else:
            judged = odd.judge(content, item.name, background=self._background)
            image, data, oddities = judged.image, judged.data, judged.oddities
            family = "JPEG" if judged.kind.endswith("JPEG") else "PNG"
        image, same = self._resized(image)
        if self._options.raw or not family:
            datum, decoded = raw_datum(image, max(0, item.label)), image
        elif data is not None and same and self._options.quality is None:
            datum, decoded = caffe_pb2.Datum(data=data, encoded=True), image
        else:
            # Decoded again by `look`: the mean is that of what is stored, and what can't be decoded isn't.
            datum, decoded = caffe_pb2.Datum(data=self._encoded(image, family), encoded=True), None
        if item.several is None:
            datum.label = item.label
        else:
            datum.label = SEVERAL
            datum.float_data.extend(item.several)
        notes = tuple(Note(item.name, oddity) for oddity in oddities)
        record = datum.SerializeToString()
        return Made(key, record, item.label, look(parse(record), True, decoded), notes)

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
