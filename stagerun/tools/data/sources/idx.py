"""IDX files, plain or gzipped: MNIST, Fashion-MNIST, EMNIST, KMNIST, QMNIST; a pair of images and labels, held in memory."""

import gzip
import math
import os
import re
import zlib
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from stagerun.base.errors import DataError, UsageError
from stagerun.data.datum import raw_datum
from stagerun.data.importing.items import signature
from stagerun.tools.data.new_lmdb import write_lmdb
from stagerun.tools.data.sources.archive import DAMAGED, InMemory, unzipped
from stagerun.tools.data.sources.format import Format, Place, Sign, SourceOptions
from stagerun.tools.data.sources.tar import archive_names

_UNSIGNED_BYTE = 0x08
_MOST_DIMENSIONS = 3  # pictures; labels have one
_LARGEST = 1 << 32  # bytes; all of MNIST's family have less than 1 GB
# What a small gzip makes of itself can't be known before: it may be anything up to about a thousand times its size.
_LARGEST_UNPACKED = 1 << 30


def read_idx(path: str) -> NDArray[np.uint8]:
    """The array of an IDX file of unsigned bytes, in the shape that it states. DataError unless the file is whole."""
    try:
        with unzipped(path) as (stream, zipped):
            shape = _shape(stream, path)
            wanted = math.prod(shape)
            if zipped and wanted > _LARGEST_UNPACKED:
                raise DataError(f"{path}: its header says {shape}, more than 1 GiB", "unpack it first: gunzip")
            data = stream.read(wanted + 1)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file", "check the name") from None
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: can't be read: {error}", DAMAGED) from None
    if len(data) != wanted:
        raise DataError(f"{path}: its header says {shape}, its length is another", DAMAGED)
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
        raise DataError(f"{path}: ends within its header", DAMAGED)
    shape = tuple(int(n) for n in np.frombuffer(dims, ">u4"))
    if math.prod(shape) > _LARGEST:
        raise DataError(f"{path}: its header says {shape}, more than 4 GiB", "it is damaged; get it again")
    if 0 in shape:
        raise DataError(f"{path}: its header says {shape}: there is nothing in it", DAMAGED)
    return shape


_IMAGES = re.compile(r"(?P<set>.*?)(?P<split>train|t10k|test)-images[-.]idx3-ubyte(\.gz)?")
_TRAIN, _TEST = ("train",), ("t10k", "test")


def _is_folder_of_it(place: Place) -> bool:
    return any(_IMAGES.fullmatch(name) for name in place.names)


def _is_file_of_it(place: Place) -> bool:
    # The fourth byte is the number of dimensions. Where it is 0, this may be the length of a TFRecord's first record, 512 KiB.
    plain = place.start[:3] == b"\0\0\x08" and place.start[3:4] != b"\0"
    return plain or (place.gzipped and not archive_names(place.path))


def open_idx(path: str, options: SourceOptions) -> InMemory:
    """`path` is the folder of a pair, or the file of images. DataError if one is missing or damaged."""
    if os.path.isdir(path):
        images = _images_in(path, options.part)
    else:
        options.refuse_split(f"{path} is one file of images")
        images = path
    pictures = read_idx(images)
    if pictures.ndim != 3:
        raise DataError(f"{images}: holds {pictures.shape}, which are not pictures", "give the file of images")
    labels = options.labels or _labels_of(images)
    classes = read_idx(labels)
    if classes.ndim != 1 or len(pictures) != len(classes) or 0 in pictures.shape:
        raise DataError(
            f"{images} holds {pictures.shape}, {labels} holds {classes.shape}: not images and their labels",
            "give the file of images, and with --labels that of its labels",
        )
    name = Path(images).name.removesuffix(".gz")
    names = tuple(f"{name}/{i:05d}" for i in range(len(classes)))
    same = signature("idx", name, *pictures.shape, pictures, classes)
    return InMemory("idx", (), same, names, classes, pictures[:, :, :, None])


def _images_in(folder: str, split: str) -> str:
    found = [match for name in sorted(os.listdir(folder)) if (match := _IMAGES.fullmatch(name))]
    found = [match for match in found if match["split"] in (_TRAIN if split == "train" else _TEST)]
    if len({(match["set"], match["split"]) for match in found}) > 1:
        raise UsageError(
            f"{folder}: several sets in it: {', '.join(match[0] for match in found)}", "give the file of images itself"
        )
    if not found:
        name = "train-images-idx3-ubyte" if split == "train" else "t10k-images-idx3-ubyte"
        raise DataError(f"{folder}: no {name} or {name}.gz in it", "check the folder, or give the file of images")
    return os.path.join(folder, found[0][0])  # where both are there, the one without .gz


def _labels_of(images: str) -> str:
    folder, name = os.path.split(images)
    wanted = name.replace("images", "labels").replace("idx3", "idx1").removesuffix(".gz")
    for candidate in (wanted, wanted + ".gz"):
        if wanted not in (name, name.removesuffix(".gz")) and os.path.isfile(file := os.path.join(folder, candidate)):
            return file
    raise DataError(f"{images}: its labels are not beside it, as {wanted} or {wanted}.gz", "name them with --labels")


def import_idx(images: str, labels: str, out: str) -> int:
    """Writes an LMDB of raw 1 x height x width Datums to folder `out`, keys by place in the files; their number.

    DataError if a file is damaged, the two don't belong together, or `out` exists.
    """
    pair = open_idx(images, SourceOptions(labels=labels))
    records = zip(pair.pictures, pair.labels.tolist(), strict=True)
    return write_lmdb(out, (raw_datum(image, label).SerializeToString() for image, label in records))


FORMAT = Format(
    name="idx",
    about="MNIST, Fashion-MNIST, EMNIST and the like, gzipped or not",
    open=open_idx,
    reads=("split", "labels"),
    folder=Sign("IDX files", _is_folder_of_it),
    file=Sign("an IDX file", _is_file_of_it),
    pixels=True,
)
