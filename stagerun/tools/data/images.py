"""The images that `stagerun data import` stores: as a run imports them (`data.importing.images`), resized by options."""

from dataclasses import dataclass

import numpy as np
import simplejpeg
from PIL import ImageColor

from stagerun.base import order
from stagerun.base.errors import UsageError
from stagerun.base.recipe import InterpMode
from stagerun.command.options import flag, option
from stagerun.data import jpeg, pixels
from stagerun.data.datum import Image, raw_datum
from stagerun.data.importing import odd
from stagerun.data.importing.images import Pixels, PlainImport, Source, Stored
from stagerun.data.jpeg import BadImage
from stagerun.data.pixels import Draw
from stagerun.language.proto import caffe_pb2

QUALITY = 95  # of resized JPEGs
LARGEST_SIDE = 65500  # of a JPEG, in libjpeg


@dataclass(frozen=True, slots=True)
class ResizeOptions:
    background: str = option(
        "--background COLOUR",
        "The colour behind transparent images: a CSS name or #rrggbb.",
        default="white",
    )
    resize_shorter: int | None = option("--resize-shorter N", "Resize the shorter side to N pixels.", least=1)
    resize_height: int | None = option("--resize-height N", "Resize to exactly this height ...", least=1)
    resize_width: int | None = option("--resize-width N", "... and this width.", least=1)

    def checked(self) -> "ResizeOptions":
        """UsageError for options that exclude each other."""
        if (self.resize_height is None) != (self.resize_width is None):
            hint = "give both, or --resize-shorter, which keeps the picture's shape"
            raise UsageError("--resize-height and --resize-width go together", hint)
        if self.resize_height is not None and self.resize_shorter is not None:
            raise UsageError("--resize-shorter, and an exact size too", "give one of them")
        return self

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Return the new (height, width). The longer side is rounded half up."""
        if self.resize_height is not None and self.resize_width is not None:
            return self.resize_height, self.resize_width
        shorter, n = min(height, width), self.resize_shorter
        if n is None:
            return height, width
        height, width = ((2 * side * n + shorter) // (2 * shorter) for side in (height, width))
        return height, width

    def colour(self) -> odd.Colour:
        """Return the background in R, G, B."""
        try:
            red, green, blue = ImageColor.getrgb(self.background)[:3]
        except ValueError:
            raise UsageError(
                f"--background `{self.background}` is not a colour", "give a CSS name or #rrggbb"
            ) from None
        return red, green, blue

    def __str__(self) -> str:
        if self.resize_shorter is not None:
            return f"shorter side {self.resize_shorter}"
        return "as it is" if self.resize_height is None else f"height {self.resize_height}, width {self.resize_width}"


@dataclass(frozen=True, slots=True)
class ImportOptions:
    resize: ResizeOptions = ResizeOptions()
    raw: bool = flag("--raw", "Store pixels (channels x height x width, B, G, R) instead of encoded images.")
    no_shuffle: bool = flag("--no-shuffle", "Keep the order of the source.")
    split_val: str | None = option("--split-val PART", "Hold out a part of each class, such as 10%, for validation.")


class ImportWork(PlainImport):
    """`Work` of the engine by the options."""

    def __init__(self, source: Source, path: str, options: ImportOptions) -> None:
        super().__init__(source, path)
        self._options, self._size = options, options.resize.checked().size
        self._order = order.EveryRecord(1, len(source), not options.no_shuffle).at(0, len(source))
        self._background = options.resize.colour()
        self.identity = {
            **self.identity,
            "shuffle": "no" if options.no_shuffle else "seed 1",
            "pixels": "raw" if options.raw else "encoded",
            "size": str(options.resize),
            "background": "white" if self._background == odd.WHITE else f"#{bytes(self._background).hex()}",
        }

    def stored(self, name: str, content: bytes | Pixels) -> Stored:
        if isinstance(content, Pixels):
            return raw_datum(image := self._resized(content.array), 0), image, ()
        judged = odd.judge(content, name, background=self._background)
        image = self._resized(judged.image)
        if self._options.raw:
            return raw_datum(image, 0), image, judged.oddities
        if image is judged.image:
            return caffe_pb2.Datum(data=judged.data, encoded=True), image, judged.oddities
        if not judged.kind.endswith("JPEG"):
            data = odd.encode_png(image)
        elif max(image.shape[:2]) > LARGEST_SIDE:
            raise BadImage("too large for JPEG", f"{image.shape[1]} x {image.shape[0]} pixels")
        else:
            colours = ("GRAY", "Gray") if image.shape[2] == 1 else ("BGR", "420")
            data = bytes(simplejpeg.encode_jpeg(image, QUALITY, *colours))
        # Not `image`: the mean is over what is stored, which is decoded again.
        return caffe_pb2.Datum(data=data, encoded=True), None, judged.oddities

    def _resized(self, image: Image) -> Image:
        """Return the image itself if it has the size: area interpolation looks at all pixels to shrink, linear enlarges."""
        height, width = image.shape[:2]
        size = self._size(height, width)
        if size == (height, width):
            return image
        if size[0] * size[1] > jpeg.MAX_PIXELS:
            raise BadImage("too many pixels", f"{width} x {height} pixels would become {size[1]} x {size[0]}")
        mode = InterpMode.AREA if size[0] <= height and size[1] <= width else InterpMode.LINEAR
        return np.ascontiguousarray(pixels.apply(image, Draw(size=size, interp_mode=mode)))
