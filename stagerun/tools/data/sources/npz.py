"""numpy's .npz with the arrays of a split: `train_images` and `train_labels` as MedMNIST has them, or `x_train` and `y_train` as Keras.

A .npz is a zip of .npy files: a magic number, a header in the form of a Python dict, and the elements (numpy: lib/format.py). An array
of objects is pickled, and reading it could run code: it is refused by its header, and nothing is left to numpy to load. The
arrays of one split are held in memory.
"""

import errno
import math
import os
import re
import struct
import zipfile
import zlib
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from stagerun.base.errors import DataError, UsageError
from stagerun.data.importing.items import (
    DAMAGED,
    LARGEST_LABEL,
    Item,
    Pixels,
    State,
    regular,
    signature,
)
from stagerun.system.image_folder import SPLITS, can_not_open
from stagerun.tools.data.sources.format import Format, Sign, SourceOptions

_PAIRS = ("{}_images", "{}_labels"), ("x_{}", "y_{}")
_MAGIC = b"\x93NUMPY"
_LONGEST_HEADER = 10_000  # numpy's own limit
_HEADER = re.compile(
    rb"\{\s*'descr':\s*'(?P<type>[<>|=]?[biufcmMOSUV][0-9]{0,3})',\s*'fortran_order':\s*(?P<fortran>True|False),"
    rb"\s*'shape':\s*\((?P<shape>[0-9L, ]{0,100})\),?\s*\}\s*"
)
_INTEGER = re.compile(r"[<>|=]?[iu][1248]")
_PIECE = 1 << 20
# Deflate makes at most 1032 bytes of one. Real pictures shrink to a tenth or so: what is large and shrinks more is made to fill memory.
_MOST_FROM_A_BYTE = 100
_ANY_RATIO = 1 << 30  # bytes that may be unpacked whatever the ratio
# What zipfile raises for a damaged zip.
_BROKEN = (zipfile.BadZipFile, zlib.error, EOFError, struct.error, ValueError, RuntimeError, OverflowError)


@dataclass(frozen=True, slots=True, eq=False)
class Npz:
    kind = "npz"
    ignored = ()
    classes = ()
    name: str
    pictures: NDArray[np.uint8]  # [n, height, width, 3], R, G, B, or [n, height, width, 1]
    labels: NDArray[np.int32]
    state: State

    @property
    def signature(self) -> str:
        return signature(self.kind, self.name, self.state)

    def __len__(self) -> int:
        return len(self.labels)

    def item(self, i: int) -> Item:
        return Item(f"{self.name}/{i:05d}", int(self.labels[i]))

    def read(self, i: int) -> Pixels:
        return Pixels(np.ascontiguousarray(self.pictures[i][:, :, ::-1]))


def open_npz(path: str, options: SourceOptions) -> Npz:
    """DataError unless the arrays of the split are there, whole, and are pictures with one label each."""
    try:
        with open(path, "rb", opener=regular) as stream:
            found = os.fstat(stream.fileno())
            with zipfile.ZipFile(stream) as archive:
                names = _names(path, archive.namelist(), options.part)
                pictures, labels = (_Member(f"{path}: `{name}`", archive, name, found.st_size) for name in names)
                _check(pictures, labels)
                state = State(os.path.realpath(path), found.st_size, found.st_mtime_ns)
                return Npz(names[0], _pictures(pictures), _labels(labels), state)
    except (*_BROKEN, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # which is a place before the first byte
            can_not_open(path, error)
        raise DataError(f"{path}: can't be read as a zip: {str(error) or 'it ends too early'}", DAMAGED) from None


def _names(path: str, members: list[str], split: str) -> tuple[str, str]:
    """The arrays of images and labels."""
    arrays = {name.removesuffix(".npy") for name in members if name.endswith(".npy")}
    if not arrays:
        raise DataError(f"{path}: a zip, but no array is in it", "if it holds images, unpack it, and give their folder")
    found = [pair for pair in _pairs(split) if arrays.issuperset(pair)]
    if len(found) > 1:
        raise DataError(f"{path}: holds both {found[0][0]} and {found[1][0]}", "save it again with one of them")
    if found:
        return found[0]
    others = [other for other in SPLITS if any(arrays.issuperset(pair) for pair in _pairs(other))]
    wanted = ", nor ".join(f"{images} with {labels}" for images, labels in _pairs(split))
    held = ", ".join(sorted(arrays)[:8]) + ", ..." * (len(arrays) > 8)
    hint = f"with --split it can be {' or '.join(others)}" if others else "save the arrays under such names"
    raise DataError(f"{path}: no {wanted} is in it; it holds {held}", hint)


def _pairs(split: str) -> list[tuple[str, str]]:
    return [(images.format(split), labels.format(split)) for images, labels in _PAIRS]


class _Member:
    """An array in the zip: what its header says, and its elements once they are asked for."""

    def __init__(self, place: str, archive: zipfile.ZipFile, name: str, file_size: int) -> None:
        self.place, self._archive, self._info = place, archive, archive.getinfo(name + ".npy")
        packed, unpacked = self._info.compress_size, self._info.file_size
        if self._info.flag_bits & 1 or self._info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise DataError(f"{place}: encrypted, or packed as numpy doesn't", "save it with numpy.savez_compressed")
        if packed > file_size:
            raise DataError(f"{place}: has {packed} bytes, but the file only {file_size}", DAMAGED)
        if unpacked > max(_ANY_RATIO, packed * _MOST_FROM_A_BYTE):
            raise DataError(
                f"{place}: {packed} bytes would become {unpacked}", "if these are pictures, save them with numpy.savez"
            )
        with archive.open(self._info) as stream:
            self._start, self.type, self._fortran, self.shape = _header(stream, place)
        if self._start + math.prod(self.shape) * np.dtype(self.type).itemsize != unpacked:
            raise DataError(f"{place}: its header says {self}, its length is another", DAMAGED)

    def __str__(self) -> str:
        return f"{np.dtype(self.type).name}[{', '.join(map(str, self.shape))}]"

    def read(self) -> NDArray[Any]:
        try:
            array = np.empty(math.prod(self.shape), self.type)
        except MemoryError:
            raise UsageError(f"{self.place}: {self} is more than memory has", "import it on a larger machine") from None
        view = array.view(np.uint8).data
        with self._archive.open(self._info) as stream:
            stream.read(self._start)  # seeking would turn the checksum off
            at = 0
            while n := stream.readinto(view[at : at + _PIECE]):  # type: ignore[attr-defined]
                at += n
            if at < len(view) or stream.read(1):  # which compares the checksum
                raise DataError(f"{self.place}: ends at byte {at} of {len(view)}", DAMAGED)
        return array.reshape(self.shape, order="F" if self._fortran else "C")


def _header(stream: IO[bytes], place: str) -> tuple[int, str, bool, tuple[int, ...]]:
    """(where the elements begin, their type, whether the first index runs fastest, shape)."""
    start = stream.read(8)
    if len(start) < 8 or start[:6] != _MAGIC or start[6] not in (1, 2):
        raise DataError(f"{place}: not an .npy of version 1 or 2", DAMAGED)
    field = stream.read(2 if start[6] == 1 else 4)
    length = int.from_bytes(field, "little")
    found = _HEADER.fullmatch(stream.read(length)) if length <= _LONGEST_HEADER else None
    if found is None:
        raise DataError(f"{place}: its header is not that of a plain array", "save it as numpy.savez does")
    kind = found["type"].decode()
    if kind.lstrip("<>|=").startswith("O"):
        raise DataError(
            f"{place}: holds Python objects, which are pickled, and reading that could run code",
            "save it as an array of numbers",
        )
    try:
        np.dtype(kind)
    except TypeError:
        raise DataError(f"{place}: `{kind}` is not a type of numbers", DAMAGED) from None
    shape = tuple(int(n) for n in re.findall(rb"[0-9]+", found["shape"]))
    return len(start) + len(field) + length, kind, found["fortran"] == b"True", shape


def _check(pictures: _Member, labels: _Member) -> None:
    """Before anything is unpacked. DataError."""
    shape = pictures.shape
    if np.dtype(pictures.type) != np.uint8:
        raise DataError(f"{pictures.place}: holds {pictures}, not unsigned bytes", "save 0 to 255 as uint8")
    if not (len(shape) == 3 or (len(shape) == 4 and shape[3] in (1, 3))) or 0 in shape:
        raise DataError(
            f"{pictures.place}: holds {pictures}, which are not pictures",
            "pictures are [number, height, width] or [number, height, width, 3]",
        )
    if not _INTEGER.fullmatch(labels.type):
        raise DataError(f"{labels.place}: holds {labels}, not whole numbers", "save labels 0, 1, 2, ... as int64")
    if len(labels.shape) == 2 and labels.shape[1] > 1:
        raise DataError(
            f"{labels.place}: holds {labels}: {labels.shape[1]} labels for each picture",
            "pictures with one label are read; if one of these numbers is 1 and the others 0, save `labels.argmax(1)`",
        )
    if labels.shape not in ((shape[0],), (shape[0], 1)):
        raise DataError(
            f"{labels.place}: holds {labels} for {shape[0]} pictures", "save a label for each picture, in their order"
        )


def _pictures(member: _Member) -> NDArray[np.uint8]:
    array: NDArray[np.uint8] = member.read().view(np.uint8)
    return array[:, :, :, None] if array.ndim == 3 else array


def _labels(member: _Member) -> NDArray[np.int32]:
    labels = member.read().reshape(-1)
    if len(strange := np.flatnonzero((labels < 0) | (labels > LARGEST_LABEL))):
        raise DataError(
            f"{member.place}: picture {strange[0]} has the label {labels[strange[0]]}", "labels are 0, 1, 2, ..."
        )
    return labels.astype(np.int32)


FORMAT = Format(
    name="npz",
    about="numpy's .npz with train_images and train_labels as MedMNIST has them, or x_train and y_train as Keras",
    open=open_npz,
    reads=("split",),
    file=Sign("a .npz", lambda place: place.start.startswith(b"PK\x03\x04")),
    pixels=True,
)
