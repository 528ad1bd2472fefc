"""IDX files, the format of MNIST and Fashion-MNIST, plain or gzipped -> LMDB."""

import gzip
import math
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stagerun.data.write import write_lmdb
from stagerun.errors import DataError
from stagerun.proto import caffe_pb2

_UNSIGNED_BYTE = 0x08
_LARGEST = 1 << 32  # bytes; all of MNIST's family have less than 1 GB


def read_idx(path: str) -> NDArray[np.uint8]:
    """The array of an IDX file of unsigned bytes, in the shape that it states. DataError unless the file is whole."""
    try:
        with Path(path).open("rb") as stream:
            zipped = stream.read(2) == b"\x1f\x8b"
        with gzip.open(path) if zipped else open(path, "rb") as stream:
            header = stream.read(4)
            if len(header) < 4 or header[:2] != b"\0\0" or header[2] != _UNSIGNED_BYTE or header[3] == 0:
                raise DataError(f"{path}: not an IDX file of unsigned bytes", "give the file as it was published")
            dims = stream.read(4 * header[3])
            shape = tuple(int(n) for n in np.frombuffer(dims[: len(dims) // 4 * 4], ">u4"))
            if math.prod(shape) > _LARGEST:
                raise DataError(f"{path}: its header says {shape}, more than 4 GiB", "it is damaged; get it again")
            # One byte more than stated is asked for, so that a file that is too long is noticed as well.
            data = stream.read(math.prod(shape) + 1)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file", "check the name") from None
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: can't be read: {error}", "it is damaged or cut off; get it again") from None
    if len(shape) != header[3] or len(data) != math.prod(shape):
        raise DataError(
            f"{path}: its header says {shape}, its length is another", "it is damaged or cut off; get it again"
        )
    return np.frombuffer(data, np.uint8).reshape(shape)


def import_idx(images: str, labels: str, out: str) -> int:
    """Writes an LMDB of raw 1 x height x width Datums to folder `out`, keys by place in the files; their number.

    DataError if a file is damaged, the two don't belong together, or `out` exists.
    """
    pictures, classes = read_idx(images), read_idx(labels)
    if pictures.ndim != 3 or classes.ndim != 1 or len(pictures) != len(classes):
        raise DataError(
            f"{images} holds {pictures.shape}, {labels} holds {classes.shape}: not images and their labels",
            "give the images first, and both of the same set",
        )
    return write_lmdb(out, _datums(pictures, classes))


def _datums(pictures: NDArray[np.uint8], classes: NDArray[np.uint8]) -> Iterator[bytes]:
    height, width = pictures.shape[1:]
    for picture, label in zip(pictures, classes, strict=True):
        datum = caffe_pb2.Datum(channels=1, height=height, width=width, data=picture.tobytes(), label=int(label))
        yield datum.SerializeToString()
