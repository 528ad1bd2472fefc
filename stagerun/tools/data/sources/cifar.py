"""CIFAR-10 and CIFAR-100 in the binary version, from its folder or its .tar.gz: a row per picture, held in memory.

A row is one byte of label (CIFAR-100: coarse, then fine, which is the label), and 32 x 32 bytes each of red, green, blue
(https://www.cs.toronto.edu/~kriz/cifar.html). The Python version is pickled: reading it could run code, so it is refused.
"""

import gzip
import os
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stagerun.base.errors import DataError, UsageError
from stagerun.data.importing.items import DAMAGED, Item, Pixels, read_whole, signature, unzipped
from stagerun.system.image_folder import can_not_open
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

_PYTHON = re.compile(
    r"(.*/)?(cifar-10-batches-py|cifar-100-python)(/.*)?|(.*/)?(data_batch_[1-5]|test_batch|batches\.meta)"
)
_PYTHON_100 = ("train", "test", "meta")  # CIFAR-100's, where the folder has another name


@dataclass(frozen=True, slots=True, eq=False)
class Cifar:
    kind = "cifar"
    ignored = ()
    classes: tuple[str, ...]
    files: tuple[str, ...]
    ends: tuple[int, ...]  # how many pictures there are up to the end of each file
    rows: NDArray[np.uint8]  # [n, label bytes + 3072]

    @property
    def signature(self) -> str:
        return signature(self.kind, *self.files, *self.ends, self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def item(self, i: int) -> Item:
        file = next(k for k, end in enumerate(self.ends) if i < end)
        first = self.ends[file - 1] if file else 0
        return Item(f"{self.files[file].removesuffix('.bin')}/{i - first:05d}", int(self.rows[i, -_PIXELS - 1]))

    def read(self, i: int) -> Pixels:
        planes = self.rows[i, -_PIXELS:].reshape(3, _SIDE, _SIDE)
        return Pixels(np.ascontiguousarray(planes[::-1].transpose(1, 2, 0)))


def _is_cifar(names: list[str], folder: str | None = None) -> bool:
    """Whether the names of files and folders, in a folder or an archive, are those of CIFAR, of either version."""
    known = {name for version in _VERSIONS for name in (version.folder, *version.train, *version.test)}
    return _is_python(names, folder) or any(not known.isdisjoint(name.split("/")) for name in names)


def _is_python(names: list[str], folder: str | None) -> bool:
    if folder is not None and set(names) >= set(_PYTHON_100):
        return all(os.path.isfile(os.path.join(folder, name)) for name in _PYTHON_100)
    return any(_PYTHON.fullmatch(name) for name in names)


def open_cifar(path: str, options: SourceOptions) -> Cifar:
    """UsageError for the Python version, DataError if a file is missing or damaged."""
    if os.path.isdir(path):
        return _opened(path, os.listdir(path), options, lambda name: read_whole(os.path.join(path, name), _LARGEST))
    files = _unpacked(path)
    return _opened(path, list(files), options, lambda name: files[name])


def _unpacked(path: str) -> dict[str, bytes]:
    """The files of a .tar.gz, or of a tar."""
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
    return {member.name: data[member.at : member.at + member.size] for member in found if member.regular}


def _opened(path: str, names: list[str], options: SourceOptions, read: Callable[[str], bytes]) -> Cifar:
    for version in _VERSIONS:
        wanted = version.train if options.part == "train" else version.test
        # The files lie in the folder or archive itself, or in the folder that they were published in.
        for name in names:
            if name == version.folder and os.path.isdir(inner := os.path.join(path, name)):
                return open_cifar(inner, options)
            if name.rpartition("/")[2] in (*version.train, *version.test):
                return _read(path, name[: name.rfind("/") + 1], set(names), version, wanted, read)
    if _is_python(names, path if os.path.isdir(path) else None):
        raise UsageError(
            f"{path}: this is CIFAR's Python version, which is pickled, and reading that could run code",
            "get the binary version: https://www.cs.toronto.edu/~kriz/cifar.html",
        )
    raise DataError(f"{path}: neither data_batch_1.bin (CIFAR-10) nor train.bin (CIFAR-100) is in it", "is it CIFAR?")


def _read(
    path: str, folder: str, names: set[str], version: _Version, wanted: tuple[str, ...], read: Callable[[str], bytes]
) -> Cifar:
    if missing := [name for name in wanted if folder + name not in names]:
        raise DataError(f"{path}: {', '.join(missing)} missing", "get the archive again, or unpack all of it")
    width = version.label_bytes + _PIXELS
    parts = []
    for name in wanted:
        data = np.frombuffer(read(folder + name), np.uint8)
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
    if folder + version.names in names:
        text = read(folder + version.names).decode(errors="replace")
        classes = tuple(line.strip() for line in text.splitlines() if line.strip())
        if len(classes) != version.classes:
            raise DataError(f"{Path(path) / version.names}: {len(classes)} names, not {version.classes}", DAMAGED)
    return Cifar(classes, wanted, tuple(np.cumsum([len(part) for part in parts]).tolist()), rows)


FORMAT = Format(
    name="cifar",
    about="CIFAR-10 and CIFAR-100 in the binary version, the folder or its .tar.gz",
    open=open_cifar,
    reads=("split",),
    folder=Sign("CIFAR's binary files", lambda place: _is_cifar(place.names, place.path)),
    file=Sign("CIFAR's .tar.gz", lambda place: place.gzipped and _is_cifar(archive_names(place.path))),
    pixels=True,
)
