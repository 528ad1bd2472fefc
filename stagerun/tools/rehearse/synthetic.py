"""Images for a rehearsal where the real ones are not: of the right shape and about the right work to decode."""

from dataclasses import dataclass, replace
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from stagerun.base.recipe import Data, Sampling, Schedule, Source
from stagerun.data import index
from stagerun.language.networks import known_of
from stagerun.language.proto import caffe_pb2
from stagerun.schedule.image_size import largest_crop_size
from stagerun.tools.data.indexing import build
from stagerun.tools.data.new_lmdb import write_lmdb

# Different pictures; records beyond that repeat them. Decoding takes as long, and an LMDB of this size stays in memory, which a
# slow disk of real data would not.
PICTURES = 32
QUALITY = 90
SYNTHETIC_IMAGES = 512


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Images that would do for all stages. `encoded`: as JPEG, since a stage resizes; else raw, all of one size."""

    height: int
    width: int
    channels: int
    encoded: bool

    def __str__(self) -> str:
        return f"{self.height} x {self.width}, {'JPEG' if self.encoded else 'raw'}"


# The side lengths of an average photograph of ImageNet, which has about 110 kB there.
PHOTOGRAPH = (375, 500)


def synthetic_images(schedule: Schedule) -> Synthetic:
    """The shape of images to rehearse with where the real ones are not."""
    transforms = [t for s in schedule.stages for t in (s.solver.transform, s.solver.test_transform)]
    channels, models = schedule.model.channels, [stage.model for stage in schedule.stages]
    side = max(largest_crop_size(t) or 0 for t in transforms)
    if any(t.random_aspect_ratio or t.random_resize or t.random_resized_crop for t in transforms):
        side = max(side, min(PHOTOGRAPH))
        height, width = (one * side // min(PHOTOGRAPH) for one in PHOTOGRAPH)
        return Synthetic(height, width, channels, encoded=True)
    side = max(side, *(max(model.input_shape[1:], default=0) for model in models))
    side = side or max(32, *(known_of(model).smallest for model in models))
    return Synthetic(side, side, channels, encoded=False)


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
    """The schedule with the images that `make_images` makes in the folder; `val` only where it has some. Every image then comes equally often:
    a few hundred need not have an image of each class."""

    def source(old: Source, kind: str) -> Source:
        at = str(folder / kind)
        made = replace(old, source=at, path=at, images=SYNTHETIC_IMAGES)
        return replace(made, labels=None, labels_path=None, labels_digest=None)

    def elsewhere(data: Data) -> Data:
        return replace(data, train=source(data.train, "train"), val=tuple(source(one, "val") for one in data.val))

    moved = schedule.with_data(elsewhere)
    stages = (replace(s, solver=replace(s.solver, sampling=Sampling.UNIFORM)) for s in moved.stages)
    return replace(moved, stages=tuple(stages))


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
