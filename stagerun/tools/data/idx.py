"""IDX files, the format of MNIST and Fashion-MNIST, plain or gzipped -> LMDB."""

import gzip
import math
import zlib
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from stagerun.data.write import write_lmdb
from stagerun.errors import DataError
from stagerun.proto import caffe_pb2
from stagerun.tools.data.regular import regular

_UNSIGNED_BYTE = 0x08
_MOST_DIMENSIONS = 3  # pictures; labels have one
_LARGEST = 1 << 32  # bytes; all of MNIST's family have less than 1 GB
# What a small gzip makes of itself can't be known before: it may be anything up to about a thousand times its size.
_LARGEST_UNPACKED = 1 << 30
_PIECE = 1 << 20
_AGAIN = "it is damaged or cut off; get it again"


def read_idx(path: str) -> NDArray[np.uint8]:
    """The array of an IDX file of unsigned bytes, in the shape that it states. DataError unless the file is whole."""
    try:
        with open(path, "rb", opener=regular) as file:
            zipped = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            with gzip.open(file) if zipped else file as stream:
                shape = _shape(stream, path)
                wanted = math.prod(shape)
                if zipped and wanted > _LARGEST_UNPACKED:
                    raise DataError(f"{path}: its header says {shape}, more than 1 GiB", "unpack it first: gunzip")
                data = _upto(stream, wanted)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file", "check the name") from None
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: can't be read: {error}", _AGAIN) from None
    if len(data) != wanted:
        raise DataError(f"{path}: its header says {shape}, its length is another", _AGAIN)
    array = np.frombuffer(data, np.uint8).reshape(shape)
    array.flags.writeable = False
    return array


def _shape(stream: BinaryIO | gzip.GzipFile, path: str) -> tuple[int, ...]:
    """What the header says, as far as that can be."""
    header = stream.read(4)
    if len(header) < 4 or header[:2] != b"\0\0" or header[2] != _UNSIGNED_BYTE or header[3] == 0:
        raise DataError(f"{path}: not an IDX file of unsigned bytes", "give the file as it was published")
    if header[3] > _MOST_DIMENSIONS:
        raise DataError(f"{path}: {header[3]} dimensions; pictures have 3, labels 1", "give one of these")
    dims = stream.read(4 * header[3])
    if len(dims) < 4 * header[3]:
        raise DataError(f"{path}: ends within its header", _AGAIN)
    shape = tuple(int(n) for n in np.frombuffer(dims, ">u4"))
    if math.prod(shape) > _LARGEST:
        raise DataError(f"{path}: its header says {shape}, more than 4 GiB", "it is damaged; get it again")
    if 0 in shape:
        raise DataError(f"{path}: its header says {shape}: there is nothing in it", _AGAIN)
    return shape


def _upto(stream: BinaryIO | gzip.GzipFile, wanted: int) -> bytearray:
    """So many bytes, fewer where the stream ends, one more where it doesn't. Memory is taken for what there is alone."""
    data = bytearray()
    while len(data) <= wanted and (piece := stream.read(min(_PIECE, wanted + 1 - len(data)))):
        data += piece
    return data


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
