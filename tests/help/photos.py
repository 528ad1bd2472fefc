"""JPEG files with something to learn in them, in class folders."""

from pathlib import Path

import cv2
import numpy as np


def make_folder(root: Path, per_class: int = 24, classes: int = 3, seed: int = 1) -> Path:
    """ROOT/CLASS/N.jpg: of each class another direction of stripes, under soft noise; sizes differ."""
    rng = np.random.default_rng(seed)
    for label in range(classes):
        folder = root / f"class{label}"
        folder.mkdir(parents=True)
        for n in range(per_class):
            (folder / f"{n:03}.jpg").write_bytes(jpeg(picture(rng, label * np.pi / classes)))
    return root


def picture(rng: np.random.Generator, direction: float) -> np.ndarray:
    """uint8[height, width, 3], sides from 40 to 63 pixels."""
    height, width = (int(side) for side in rng.integers(40, 64, 2))
    y, x = np.mgrid[:height, :width]
    stripes = np.sin((np.cos(direction) * x + np.sin(direction) * y) * 0.7)[:, :, None]
    image = 128 + 70 * stripes * rng.uniform(0.5, 1, 3) + rng.normal(0, 10, (height, width, 3))
    return np.clip(image, 0, 255).astype(np.uint8)


def jpeg(image: np.ndarray, quality: int = 90) -> bytes:
    return cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, quality])[1].tobytes()
