"""CIFAR-10 and CIFAR-100 in the binary version, from its folder or its .tar.gz: a row per picture, held in memory.

A row is one byte of label (CIFAR-100: coarse, then fine, which is the label), and 32 x 32 bytes each of red, green, blue
(https://www.cs.toronto.edu/~kriz/cifar.html). The Python version is pickled: reading it could run code, so it is refused.
"""

import gzip
import os
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stagerun.base.errors import DataError, UsageError
from stagerun.data.importing.items import read_whole, signature
from stagerun.system.image_folder import can_not_open
from stagerun.tools.data.sources.archive import DAMAGED, InMemory, unzipped
from stagerun.tools.data.sources.format import Format, Sign, SourceOptions
from stagerun.tools.data.sources.tar import archive_names, members

_SIDE = 32
_PIXELS = 3 * _SIDE * _SIDE
_LARGEST = 1 << 30  # bytes of the archive, unpacked; both have less than 190 MB


@dataclass(frozen=True, slots=True)
class _Version:
    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    names: str
    label_bytes: int  # the last one counts
    classes: int


_VERSIONS = (
    _Version(
        "cifar-10-batches-bin", tuple(f"data_batch_{i}.bin" for i in range(1, 6)), ("test_batch.bin",),
        "batches.meta.txt", 1, 10,
    ),
    _Version("cifar-100-binary", ("train.bin",), ("test.bin",), "fine_label_names.txt", 2, 100),
)  # fmt: skip

_PYTHON = {"cifar-10-batches-py", "cifar-100-python", "data_batch_1", "test_batch", "batches.meta"}


def _is_cifar(names: Iterable[str]) -> bool:
    """Whether the names of files and folders, in a folder or an archive, are those of CIFAR, of either version."""
    known = {name for version in _VERSIONS for name in (version.folder, *version.train, *version.test)}
    return not (known | _PYTHON).isdisjoint(part for name in names for part in name.split("/"))


def open_cifar(path: str, options: SourceOptions) -> InMemory:
    """UsageError for the Python version, DataError if a file is missing or damaged."""
    if os.path.isdir(path):
        # The files lie in the folder or archive itself, or in the folder that they were published in.
        inner = [version.folder for version in _VERSIONS if os.path.isdir(os.path.join(path, version.folder))]
        folder = os.path.join(path, *inner[:1])
        names, read = set(os.listdir(folder)), lambda name: read_whole(os.path.join(folder, name), _LARGEST)
    else:
        files = _unpacked(path)
        names, read = set(files), lambda name: files[name]
    for version in _VERSIONS:
        wanted = version.train if options.part == "train" else version.test
        if not names.isdisjoint((*version.train, *version.test)):
            return _read(path, names, version, wanted, read)
    if not names.isdisjoint({*_PYTHON, "meta"}):
        raise UsageError(
            f"{path}: this is CIFAR's Python version, which is pickled, and reading that could run code",
            "get the binary version: https://www.cs.toronto.edu/~kriz/cifar.html",
        )
    raise DataError(f"{path}: neither data_batch_1.bin (CIFAR-10) nor train.bin (CIFAR-100) is in it", "is it CIFAR?")


def _unpacked(path: str) -> dict[str, bytes]:
    """The files of a .tar.gz, or of a tar, by their names without folders."""
    try:
        with unzipped(path) as (stream, _):
            data = stream.read(_LARGEST + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: can't be unpacked: {error}", DAMAGED) from None
    except OSError as error:
        can_not_open(path, error)
    if len(data) > _LARGEST:
        raise DataError(f"{path}: holds more than {_LARGEST >> 20} MiB", "is it CIFAR?")
    found = members(lambda at, length: data[at : at + length], 0, len(data), path)
    return {file.name.rpartition("/")[2]: data[file.at : file.at + file.size] for file in found if file.regular}


def _read(
    path: str, names: set[str], version: _Version, wanted: tuple[str, ...], read: Callable[[str], bytes]
) -> InMemory:
    if missing := [name for name in wanted if name not in names]:
        raise DataError(f"{path}: {', '.join(missing)} missing", "get the archive again, or unpack all of it")
    width = version.label_bytes + _PIXELS
    parts = []
    for name in wanted:
        data = np.frombuffer(read(name), np.uint8)
        if len(data) == 0 or len(data) % width:
            raise DataError(
                f"{Path(path) / name}: {len(data)} bytes are not a whole number of rows of {width}", DAMAGED
            )
        parts.append(data.reshape(-1, width))
    rows = np.concatenate(parts)
    labels = rows[:, version.label_bytes - 1]
    if labels.max() >= version.classes:
        bad = int(np.argmax(labels >= version.classes))
        raise DataError(f"{path}: picture {bad} has label {labels[bad]}, above {version.classes - 1}", DAMAGED)
    classes: tuple[str, ...] = ()
    if version.names in names:
        text = read(version.names).decode(errors="replace")
        classes = tuple(line.strip() for line in text.splitlines() if line.strip())
        if len(classes) != version.classes:
            raise DataError(f"{Path(path) / version.names}: {len(classes)} names, not {version.classes}", DAMAGED)
    counts = [len(part) for part in parts]
    same = signature("cifar", *wanted, *np.cumsum(counts).tolist(), rows)
    keys = tuple(f"{f.removesuffix('.bin')}/{i:05d}" for f, n in zip(wanted, counts, strict=True) for i in range(n))
    planes = rows[:, -_PIXELS:].reshape(-1, 3, _SIDE, _SIDE)
    pictures = np.ascontiguousarray(planes[:, ::-1].transpose(0, 2, 3, 1))
    return InMemory("cifar", classes, same, keys, np.ascontiguousarray(labels), pictures)


FORMAT = Format(
    name="cifar",
    about="CIFAR-10 and CIFAR-100 in the binary version, the folder or its .tar.gz",
    open=open_cifar,
    reads=("split",),
    folder=Sign("CIFAR's binary files", lambda place: _is_cifar(place.names)),
    file=Sign("CIFAR's .tar.gz", lambda place: place.gzipped and _is_cifar(archive_names(place.path))),
    pixels=True,
)
