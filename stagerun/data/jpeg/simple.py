"""The tier of the required dependencies: simplejpeg, which decodes whole files, given smaller files.

Of a file with restart markers, the segments around the part make a file of their own (`slices`). Of any other, the
rows below the part are left out by a smaller height in the header: a scan runs from top to bottom, so libjpeg stops
early and skips the rest.
"""

import numpy as np
import simplejpeg

from stagerun.data.jpeg import slices
from stagerun.data.jpeg.decoder import Decoder, Pixels, Request, Scratch, is_written, mark, scaled
from stagerun.data.jpeg.header import Buffer, Header, Reach, as_bytes

# Reduced pictures of two scales of libjpeg may have one size, if this is all they have: which one is meant isn't sure.
_TINY = 8


class SimpleDecoder(Decoder):
    tier = "simplejpeg"

    def __init__(self) -> None:
        self._scratch, self._pixels = Scratch(), Scratch()

    def fast(self, data: Buffer, header: Header, request: Request) -> Pixels | None:
        source = np.frombuffer(as_bytes(data), np.uint8)
        window = slices.window(header, request)
        sliced = slices.cut(source, header, window, self._scratch) if window else None
        if window and sliced is not None:
            pixels = self._decode(sliced, window.height, window.width, request, strict=False)
            y, x = request.top - window.top // request.shrink, request.left - window.left // request.shrink
        else:
            pixels = self._decode_upper(source, header, request)
            y, x = request.top, request.left
        return None if pixels is None else pixels[y : y + request.height, x : x + request.width]

    def _decode_upper(self, source: Pixels, header: Header, request: Request) -> Pixels | None:
        """The picture down to below the part, where that leaves something out."""
        height = (request.bottom + 1) * request.shrink  # one row more: the colour is smoothed with it
        if height >= header.height or header.reach is not Reach.PART:
            return self._decode(source, header.height, header.width, request, header.reach is not Reach.PART)
        if not source.flags.writeable:
            data = self._scratch.of(source.size)
            data[:] = source
            source = data
        # In memory that may be written to, the height is put right again: the next call may ask for another part.
        slices.write_size(source, header.frame_at, height, header.width)
        try:
            return self._decode(source, height, header.width, request, strict=False)
        finally:
            slices.write_size(source, header.frame_at, header.height, header.width)

    def _decode(self, source: Pixels, height: int, width: int, request: Request, strict: bool) -> Pixels | None:
        """The whole of a file that should be height x width; None if simplejpeg thinks otherwise or can't, or, if `strict`,
        warns. Of a file of one scan warnings are no errors, among them the one about the rows left out."""
        shape = scaled(height, request.shrink), scaled(width, request.shrink), request.channels
        reduce = {} if request.shrink == 1 else {"min_height": shape[0], "min_width": shape[1]}
        if reduce and max(height, width) <= _TINY:
            return None
        pixels = self._pixels.of(shape[0] * shape[1] * shape[2])
        mark(pixels.reshape(shape))
        try:
            decoded = simplejpeg.decode_jpeg(
                source, "BGR" if request.channels == 3 else "GRAY", buffer=pixels, strict=strict, **reduce
            )
        except ValueError:
            return None
        return decoded if decoded.shape == shape and is_written(decoded) else None
