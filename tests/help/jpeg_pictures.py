"""JPEGs of every kind that a data set may hold, and of some that it shouldn't."""

import io

import cv2
import numpy as np
from PIL import Image

SAMPLINGS = {"4:4:4": 0x111111, "4:2:2": 0x211111, "4:2:0": 0x221111, "4:4:0": 0x121111, "4:1:1": 0x411111}
FRAME, SCAN, INTERVAL, END = b"\xff\xc0", b"\xff\xda", b"\xff\xdd", b"\xff\xd9"


def image(height: int, width: int, seed: int = 0) -> np.ndarray:
    """uint8[height, width, 3]: slopes, edges and noise, so that every block has coefficients of its own."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    waves = np.stack([3 * y + x, 120 + 90 * np.sin(x / 5 + y / 9), 40 * ((x // 11 + y // 7) % 5)], axis=-1)
    noise = cv2.GaussianBlur(rng.normal(0, 60, (height, width, 3)), (3, 3), 0)
    return np.clip(waves + noise, 0, 255).astype(np.uint8)


def jpeg(
    height: int, width: int, sampling: str = "4:2:0", interval: int = 0,
    grey: bool = False, progressive: bool = False, quality: int = 90, seed: int = 0,
) -> bytes:  # fmt: skip
    """`interval` is in MCUs from one restart marker to the next; 0: there are none."""
    pixels = image(height, width, seed)
    options = {
        cv2.IMWRITE_JPEG_SAMPLING_FACTOR: SAMPLINGS[sampling],
        cv2.IMWRITE_JPEG_RST_INTERVAL: interval,
        cv2.IMWRITE_JPEG_PROGRESSIVE: int(progressive),
        cv2.IMWRITE_JPEG_QUALITY: quality,
    }
    flat = [number for pair in options.items() for number in pair]
    return cv2.imencode(".jpg", pixels[..., 1] if grey else pixels, flat)[1].tobytes()


def by_pillow(mode: str, height: int = 70, width: int = 90, **options: object) -> bytes:
    """A JPEG of Pillow's: CMYK, RGB kept as it is, EXIF, ..."""
    stream = io.BytesIO()
    Image.fromarray(image(height, width)).convert(mode).save(stream, "JPEG", quality=90, **options)
    return stream.getvalue()


def whole(data: bytes, channels: int = 3, shrink: int = 1) -> np.ndarray:
    """What OpenCV decodes, in Caffe's manner; reduced by libjpeg."""
    color = "GRAYSCALE" if channels == 1 else "COLOR"
    flags = getattr(cv2, f"IMREAD_{color}" if shrink == 1 else f"IMREAD_REDUCED_{color}_{shrink}")
    flags |= cv2.IMREAD_IGNORE_ORIENTATION
    pixels = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
    return pixels.reshape(*pixels.shape[:2], channels)


def changed(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]
