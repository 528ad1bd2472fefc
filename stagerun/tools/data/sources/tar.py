"""Tars of images read in place: ImageNet's own (a tar of a tar per class; a flat one of val), and a tar of class folders.

The headers are gone through once; an image is then one pread. A validation set, tar or folder, takes its labels from a ground truth
file (`truth`). Items are sorted by class, folder and name, as in `folder`.

Nothing is unpacked, so a name never becomes a path: those with `..` or a leading `/` are refused all the same, since keys are made from them.
"""

import io
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from stagerun.base.errors import DataError, UsageError
from stagerun.data.importing.items import LARGEST_FILE, regular
from stagerun.system.image_folder import can_not_open, check_classes, is_image
from stagerun.tools.data.sources.archive import DAMAGED, Archive, Archived
from stagerun.tools.data.sources.format import SourceOptions
from stagerun.tools.data.sources.truth import classes_and_labels, read_synsets, read_truth

_MOST_EMPTY = 1 << 24  # bytes behind the last member; tar fills up to 10 KiB by default

Read = Callable[[int, int], bytes]  # (offset, length) -> exactly so many bytes; DataError at the end of the file


@dataclass(frozen=True, slots=True)
class Member:
    """A file in a tar. `at` is the offset of its first byte; a link or a device is not `regular`, and has no bytes."""

    name: str
    at: int
    size: int
    regular: bool


class _Stretch(io.RawIOBase):
    """Bytes start .. end of what `read` reads, as a file."""

    def __init__(self, read: Read, start: int, end: int) -> None:
        self._read, self._start, self._size, self._at = read, start, end - start, 0

    def seek(self, at: int, whence: int = 0) -> int:
        if at < 0:
            raise tarfile.ReadError("a negative size")
        self._at = at
        return at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        if size < 0:
            raise tarfile.ReadError("a negative size")
        data = self._read(self._start + self._at, max(0, min(size, self._size - self._at)))
        self._at += len(data)
        return data


def members(read: Read, start: int, end: int, place: str) -> Iterator[Member]:
    """The files of the tar in bytes start .. end of what `read` reads. DataError, with `place`, if it is damaged."""
    try:
        file = _Stretch(read, start, end)
        archive: Any = tarfile.TarFile(fileobj=cast(Any, file), encoding="utf-8", errors="surrogateescape")
        while (found := archive.next()) is not None:
            archive.members.clear()  # of a million it would fill memory
            if not 0 <= found.size < 1 << 62:
                raise tarfile.ReadError("a negative size")
            at = start + found.offset_data
            # Links and folders have no bytes, whatever their size says.
            size = 0 if found.issym() or found.islnk() or found.isdev() or found.isdir() else found.size
            if at + size > end:
                text = f"`{found.name}` has {size} bytes, but the archive ends at {end}"
                raise DataError(f"{place} at byte {start + found.offset}: {text}", DAMAGED)
            if found.issparse():
                raise DataError(f"{place} at byte {at}: a sparse file", "make the tar without --sparse")
            if not found.isdir():
                yield Member(_safe(found.name, place), at, size, found.isreg())
        file.seek(archive.offset)
        rest = file.read(tarfile.BLOCKSIZE)
    except (tarfile.TarError, ValueError, RecursionError) as error:
        raise DataError(f"{place}: not a tar, or damaged: {error}", DAMAGED) from None
    # tarfile takes a damaged header for the end of the archive. A whole one may lack its two empty blocks, as GNU tar allows too.
    at = start + archive.offset
    if rest.strip(b"\0") or 0 < len(rest) < tarfile.BLOCKSIZE or at > end:
        raise DataError(f"{place} at byte {at}: not a tar header, or cut off within one", DAMAGED)
    if end - at > _MOST_EMPTY:
        raise DataError(f"{place}: nothing in the last {end - at} bytes", "was its download broken off? get it again")


def _safe(name: str, place: str) -> str:
    """Without a leading `./`."""
    words = name.split("/")
    if name.startswith("/") or ".." in words or "\0" in name or not name:
        raise DataError(f"{place}: a member named `{name!r}`, outside of the archive's folder", "is it a data set?")
    return "/".join(word for word in words if word not in ("", "."))


def archive_names(path: str) -> list[str]:
    """The first names in a .tar.gz; [] if it is none. Unpacks a little of it."""
    names: list[str] = []
    try:
        with open(path, "rb", opener=regular) as stream:
            start = zlib.decompressobj(wbits=31).decompress(stream.read(1 << 16), 1 << 20)
        names.extend(member.name for member in members(lambda at, length: start[at : at + length], 0, 1 << 62, path))
    except DataError:  # where what was unpacked ends
        pass
    except zlib.error:
        return []
    except OSError as error:
        can_not_open(path, error)
    return names


def only_files(found: Iterator[Member], place: str) -> Iterator[Member]:
    """Those that hold bytes of their own. DataError for links: following them isn't safe, leaving them out isn't right."""
    for member in found:
        if not member.regular:
            raise DataError(
                f"{place}: `{member.name}` is a link or a device, not a file",
                "make the tar with the files themselves (tar --dereference --hard-dereference)",
            )
        if member.size > LARGEST_FILE and not member.name.endswith(".tar"):
            raise DataError(f"{place}: `{member.name}` has {member.size} bytes", "is it an image?")
        yield member


_NO_TRUTH = (
    "give --ground-truth: lines of `name synset` or `name label` (Caffe's val.txt), a synset per line, "
    "or Kaggle's LOC_val_solution.csv"
)


def open_tar(path: str, options: SourceOptions) -> Archived:
    """DataError if it is damaged, holds no images, or they come without labels."""
    archive = Archive(path)
    found = list(_contents(archive, 0, archive.size, path))
    inner = [member for member in found if member.name.endswith(".tar")]
    images = [member for member in found if is_image(member.name.rpartition("/")[2])]
    if inner and images:
        raise DataError(f"{path}: holds both tars and images", "give a tar of a tar per class, or one of class folders")
    if inner and options.ground_truth is not None:
        raise UsageError(f"{path}: its images are by class already", "--ground-truth is for a validation set")
    if inner:
        return _by_class("imagenet", archive, _tar_per_class(archive, inner), options)
    if not images:
        raise DataError(f"{path}: no images in it", "give a tar of class folders, or one of ImageNet's own")
    images = _below_the_top(images, options)
    if options.ground_truth is None and any("/" in member.name for member in images):
        return _by_class("folder", archive, _folder_per_class(images, path), options)
    images.sort(key=lambda member: member.name)
    names = [member.name for member in images]
    labels, classes = by_truth(path, names, options)
    return Archived("imagenet", classes, archive, tuple(names), labels, _places(images))


def _contents(archive: Archive, start: int, end: int, place: str) -> Iterable[Member]:
    return only_files(members(archive.read, start, end, place), place)


def by_truth(path: str, names: list[str], options: SourceOptions) -> tuple[NDArray[np.int32], tuple[str, ...]]:
    if options.ground_truth is None:
        raise DataError(f"{path}: {len(names)} images without classes", _NO_TRUTH)
    synsets = read_synsets(options.synsets) if options.synsets else None
    labels, classes = read_truth(options.ground_truth, names, synsets)
    return np.array(labels, np.int32), classes


def _by_class(kind: str, archive: Archive, found: dict[str, list[Member]], options: SourceOptions) -> Archived:
    names = sorted(found)
    check_classes(archive.path, names, (member.name for images in found.values() for member in images))
    classes, labels = classes_and_labels(archive.path, names, options.synsets)
    ordered = [sorted(found[name], key=lambda member: member.name.rpartition("/")[::2]) for name in names]
    return Archived(
        kind,
        classes,
        archive,
        tuple(member.name for images in ordered for member in images),
        np.repeat(np.array(labels, np.int32), [len(images) for images in ordered]),
        _places(member for images in ordered for member in images),
    )


def _tar_per_class(archive: Archive, inner: list[Member]) -> dict[str, list[Member]]:
    found: dict[str, list[Member]] = {}
    for tar in inner:
        name = tar.name.rpartition("/")[2].removesuffix(".tar")
        place = f"{archive.path}: {tar.name}"
        images = []
        for member in _contents(archive, tar.at, tar.at + tar.size, place):
            if is_image(member.name.rpartition("/")[2]):
                below = f"{name}/{member.name.removeprefix(name + '/')}"
                images.append(Member(below, member.at, member.size, True))
        if not images:
            raise DataError(f"{place}: no images in it", "is it damaged?")
        if name in found:
            raise DataError(f"{archive.path}: two tars of the class {name}", "is it damaged?")
        found[name] = images
    return found


def _below_the_top(images: list[Member], options: SourceOptions) -> list[Member]:
    """Without the one folder that all of them are in (`train/`), if there is one and it isn't the only class."""
    first = images[0].name.partition("/")[0] + "/"
    if not all(member.name.startswith(first) for member in images):
        return images
    shorter = [Member(m.name.removeprefix(first), m.at, m.size, True) for m in images]
    return shorter if options.ground_truth or any("/" in member.name for member in shorter) else images


def _folder_per_class(images: list[Member], path: str) -> dict[str, list[Member]]:
    found: dict[str, list[Member]] = {}
    for member in images:
        name, below, _ = member.name.partition("/")
        if not below:
            raise DataError(f"{path}: `{name}` is in no class folder, others are", "give a tar of class folders alone")
        found.setdefault(name, []).append(member)
    return found


def _places(found: Iterable[Member]) -> NDArray[np.int64]:
    return np.array([(member.at, member.size) for member in found], np.int64)
