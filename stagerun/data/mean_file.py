"""The mean image of a transform (`mean_file`), which Caffe's compute_image_mean makes."""

import hashlib
import os
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from stagerun.base.errors import DataError
from stagerun.base.recipe import Transform
from stagerun.base.text import count
from stagerun.data.weights import regular_file
from stagerun.system.files import mapped

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def mean_image(transform: Transform, channels: int, digest: str = "") -> "NDArray[np.float32] | None":
    """float32 [height, width, channels] in B, G, R: the `mean_file` that has the `digest`, where one is given; None of a transform without.
    UsageError, DataError."""
    if transform.mean_file is None:
        return None
    path = regular_file(Path(transform.mean_path), "`mean_file` is relative to the schedule's folder")
    seen = os.stat(path)
    found, read = _mean(str(path), transform.mean_file, seen.st_size, seen.st_mtime_ns)
    if digest and read != digest:
        text = f"{transform.mean_file} is another file than before: its sha256 is {read[:12]}, and was {digest[:12]}"
        raise DataError(
            text, "a snapshot needs the one that it was trained with; `run` takes a new one when it is started again"
        )
    if found.shape[2] != channels:
        text = f"{transform.mean_file} has {count(found.shape[2], 'channel')}, and the images have {channels}"
        raise DataError(text, "make it of these images, with Caffe's compute_image_mean")
    return found


@lru_cache(maxsize=4)
def _mean(path: str, name: str, *changes: int) -> "tuple[NDArray[np.float32], str]":
    """The mean, and the sha256 of the bytes that it was made of."""
    import numpy as np

    from stagerun.base import caffe_file

    data = bytes(mapped(Path(path)))
    try:
        found = caffe_file.read_mean(data)
    except ValueError as error:
        raise DataError(f"{name}: {error}", "it is not a mean image of Caffe's (.binaryproto)") from error
    if not np.isfinite(found).all():
        raise DataError(f"{name} is not all numbers: it has NaN or infinity", "make it anew, with compute_image_mean")
    return np.ascontiguousarray(found.transpose(1, 2, 0), np.float32), hashlib.sha256(data).hexdigest()
