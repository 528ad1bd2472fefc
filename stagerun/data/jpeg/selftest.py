"""Whether a tier gives the pixels it should, before it is trusted: a library found may be of any version."""

import itertools

import cv2
import numpy as np

from stagerun.data.jpeg.decoder import Decoder, Request, by_opencv
from stagerun.data.jpeg.header import read_header

_SIZE = 72, 192  # 12 blocks of 16 pixels across, 6 of 32: intervals of 4 and 3, as `prepare` writes them
_SAMPLINGS = (
    cv2.IMWRITE_JPEG_SAMPLING_FACTOR_420,
    cv2.IMWRITE_JPEG_SAMPLING_FACTOR_422,
    cv2.IMWRITE_JPEG_SAMPLING_FACTOR_440,
    cv2.IMWRITE_JPEG_SAMPLING_FACTOR_444,
    cv2.IMWRITE_JPEG_SAMPLING_FACTOR_411,
)
_REQUESTS = (  # rows and columns of the reduced picture
    Request(3, 1, 0, 0, *_SIZE),
    Request(3, 1, 21, 30, 33, 45),
    Request(3, 2, 10, 15, 16, 22),
    Request(3, 4, 5, 9, 9, 25),
    Request(3, 8, 2, 6, 5, 12),
)
_GREY = Request(1, 1, 0, 0, *_SIZE), Request(1, 1, 21, 30, 33, 45), Request(1, 2, 10, 15, 16, 22)


def same_pixels(decoder: Decoder) -> bool:
    """Whether small pictures and parts of them, with restart markers and without, of every sampling, progressive and grey, are
    as OpenCV decodes them, reduced too.

    By the tier itself: `decode` would ask OpenCV where the tier fails.
    """
    colour = [picture(interval, sampling) for interval, sampling in itertools.product((0, 1, 4), _SAMPLINGS)]
    colour += [picture(3, cv2.IMWRITE_JPEG_SAMPLING_FACTOR_411), picture(progressive=True)]
    grey = [picture(interval, grey=True) for interval in (0, 4)]
    cases = [*itertools.product(colour, _REQUESTS), *itertools.product(grey, (*_GREY, _REQUESTS[1]))]
    return all(_is_same(decoder, data, wanted) for data, wanted in cases)


def _is_same(decoder: Decoder, data: bytes, wanted: Request) -> bool:
    header = read_header(data)
    pixels = decoder.fast(data, header, wanted)
    return pixels is not None and np.array_equal(pixels, by_opencv(data, header, wanted))


def picture(
    interval: int = 0,
    sampling: int = cv2.IMWRITE_JPEG_SAMPLING_FACTOR_420,
    *,
    progressive: bool = False,
    grey: bool = False,
) -> bytes:
    """A JPEG of stripes and edges, with a restart marker after every `interval` MCUs."""
    y, x = np.mgrid[: _SIZE[0], : _SIZE[1]]
    image = np.stack([3 * x + y, (x ^ y) * 2, 5 * y + (x // 9 % 2) * 90], axis=-1).astype(np.uint8)
    options = [
        *(cv2.IMWRITE_JPEG_RST_INTERVAL, interval),
        *(cv2.IMWRITE_JPEG_SAMPLING_FACTOR, sampling),
        *(cv2.IMWRITE_JPEG_PROGRESSIVE, int(progressive)),
    ]
    _, data = cv2.imencode(".jpg", image[..., 1] if grey else image, options)
    return data.tobytes()
