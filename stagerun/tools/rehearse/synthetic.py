"""Images for a rehearsal where the real ones are not: of the right shape and about the right work to decode."""

from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from stagerun.base.recipe import Schedule
from stagerun.data import index
from stagerun.language.proto import caffe_pb2
from stagerun.plan.rehearsal import synthetic_images, with_sources
from stagerun.tools.data.indexing import build
from stagerun.tools.data.new_lmdb import write_lmdb

# Different pictures; records beyond that repeat them. Decoding takes as long, and an LMDB of this size stays in memory, which a
# slow disk of real data would not.
PICTURES = 32
QUALITY = 90
SYNTHETIC_IMAGES = 512


def write_synthetic(
    folder: str, records: int, height: int, width: int, channels: int, num_classes: int, encoded: bool
) -> None:
    """An LMDB of `records` Datums, JPEG or raw bytes, of soft noise with labels 0 .. num_classes-1, and its side file, which some
    transforms need. Errors of `write_lmdb`, `indexing.build` and `index.save`."""
    rng = np.random.default_rng(1)
    pictures = [_picture(rng, height, width, channels) for _ in range(min(records, PICTURES))]
    contents = [_jpeg(p) if encoded else np.ascontiguousarray(p.transpose(2, 0, 1)).tobytes() for p in pictures]

    def datum(i: int) -> bytes:
        record = caffe_pb2.Datum(channels=channels, height=height, width=width, encoded=encoded)
        record.data = contents[i % len(contents)]
        record.label = int(rng.integers(num_classes))
        return record.SerializeToString()

    write_lmdb(folder, (datum(i) for i in range(records)))
    index.save(build(folder, pixels=False).index, folder)


def with_synthetic(schedule: Schedule, folder: Path) -> Schedule:
    """The schedule with the images that `make_images` makes in the folder."""
    train, val = ((str(folder / kind), SYNTHETIC_IMAGES) for kind in ("train", "val"))
    return with_sources(schedule, train, val)


def make_images(schedule: Schedule, folder: Path) -> None:
    """LMDBs of images as the schedule's. Errors as of `write_synthetic`."""
    shape, classes = synthetic_images(schedule), min(stage.model.num_classes for stage in schedule.stages)
    for kind in ("train", "val"):
        write_synthetic(
            str(folder / kind), SYNTHETIC_IMAGES, shape.height, shape.width, shape.channels, classes, shape.encoded
        )


def _picture(rng: np.random.Generator, height: int, width: int, channels: int) -> NDArray[np.uint8]:
    """uint8[height, width, channels]: large soft spots and fine grain, which a JPEG of QUALITY 90 stores in about 4.5 bits
    per pixel, as much as photographs of ImageNet take."""
    coarse = rng.integers(0, 256, (max(2, height // 24), max(2, width // 24), channels), dtype=np.uint8)
    soft = cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC).reshape(height, width, channels)
    grain = rng.normal(0, 20, (height, width, channels))
    return np.clip(soft + grain, 0, 255).astype(np.uint8)


def _jpeg(picture: NDArray[np.uint8]) -> bytes:
    _, data = cv2.imencode(".jpg", picture, [cv2.IMWRITE_JPEG_QUALITY, QUALITY])
    return data.tobytes()
