"""Whether a tier gives the pixels it should, before it is trusted: a library found may be of any version."""

import itertools

import cv2
import numpy as np

from stagerun.data.jpeg.decoder import Decoder, Request, by_opencv
from stagerun.data.jpeg.header import read_header

_SIZE = 72, 104
_SAMPLINGS = (
    cv2.IMWRITE_JPEG_SAMPLING_FACTOR_420,
    cv2.IMWRITE_JPEG_SAMPLING_FACTOR_422,
    cv2.IMWRITE_JPEG_SAMPLING_FACTOR_440,
    cv2.IMWRITE_JPEG_SAMPLING_FACTOR_444,
)
_REQUESTS = (Request(3, 1, 0, 0, *_SIZE), Request(3, 1, 21, 30, 33, 45), Request(3, 2, 10, 15, 16, 22))


def same_pixels(decoder: Decoder) -> bool:
    """Whether small pictures and parts of them, with restart markers and without, are as OpenCV decodes them.

    By the tier itself: `decode` would ask OpenCV where the tier fails.
    """
    for interval, sampling in itertools.product((0, 1), _SAMPLINGS):
        data = picture(interval, sampling)
        header = read_header(data)
        for wanted in _REQUESTS:
            expected = by_opencv(data, header, wanted)
            pixels = decoder.fast(data, header, wanted)
            if pixels is None or not np.array_equal(pixels, expected):
                return False
    return True


def picture(interval: int = 0, sampling: int = cv2.IMWRITE_JPEG_SAMPLING_FACTOR_420) -> bytes:
    """A JPEG of stripes and edges, with a restart marker after every `interval` MCUs."""
    y, x = np.mgrid[: _SIZE[0], : _SIZE[1]]
    image = np.stack([3 * x + y, (x ^ y) * 2, 5 * y + (x // 9 % 2) * 90], axis=-1).astype(np.uint8)
    options = [cv2.IMWRITE_JPEG_RST_INTERVAL, interval, cv2.IMWRITE_JPEG_SAMPLING_FACTOR, sampling]
    _, data = cv2.imencode(".jpg", image, options)
    return data.tobytes()
