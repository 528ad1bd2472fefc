"""The fastest tier: what `turbojpeg` does, in two compiled calls per picture."""

from typing import TYPE_CHECKING

from stagerun.data.jpeg import slices
from stagerun.data.jpeg.decoder import Pixels, Request, mark
from stagerun.data.jpeg.header import Header
from stagerun.data.jpeg.slices import Window
from stagerun.data.jpeg.turbo import Library, Region, TurboDecoder, is_usable, pixel_format, shape_of

if TYPE_CHECKING:
    from stagerun.data.jpeg.kernels import Kernels

_WHOLE = Region()


class CompiledDecoder(TurboDecoder):
    tier = "compiled"

    def __init__(self, library: Library, kernels: "Kernels") -> None:
        super().__init__(library)
        self._kernels = kernels

    def _cut(self, source: Pixels, header: Header, window: Window) -> Pixels | None:
        data = self._scratch.of(source.size + slices.MARKER)
        cells = window.cells
        size = self._kernels.cut(
            source,
            data,
            header.scan_at,
            header.frame_at,
            cells.rows,
            cells.columns,
            window.first_row,
            window.rows,
            window.first_column,
            window.columns,
            window.height,
            window.width,
        )
        return data[:size] if size else None

    def _decode(
        self, source: Pixels, height: int, width: int, wanted: Region | None, request: Request, forgiving: bool
    ) -> Pixels | None:
        shape = shape_of(height, width, wanted, request)
        flat = self._pixels.of(shape[0] * shape[1] * shape[2])
        pixels = flat.reshape(shape)
        mark(pixels)
        region = wanted or _WHOLE
        outcome = self._kernels.decode(
            source,
            source.size,
            height,
            width,
            request.shrink,
            region.x,
            region.y,
            region.width,
            region.height,
            flat,
            request.channels,
            pixel_format(request),
        )
        return pixels if is_usable(outcome, pixels, forgiving) else None
