"""Tars of images read in place: ImageNet's own (a tar of a tar per class; a flat one of val), and a tar of class folders.

The headers are gone through once; an image is then one pread. A validation set, tar or folder, takes its labels from a ground truth
file (`truth`). Items are sorted by class, folder and name, as in `folder`.

The table of contents is made by going from header to header: POSIX ustar and pax, and GNU's long names. Why not tarfile: it takes a
damaged header in the middle for the end of the archive and says nothing, and on some of the Pythons that we run on a header with a
negative size keeps it busy for ever. Nothing is unpacked, so a name never becomes a path: those with `..` or a leading `/` are refused
all the same, since keys are made from them.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stagerun.base.errors import DataError, UsageError
from stagerun.data.importing.items import (
    DAMAGED,
    LARGEST_FILE,
    Archive,
    Archived,
    Names,
    regular,
)
from stagerun.system.image_folder import can_not_open, check_classes, is_image
from stagerun.tools.data.sources.format import SourceOptions
from stagerun.tools.data.sources.truth import classes_and_labels, read_synsets, read_truth

BLOCK = 512
_LONGEST_NAME = 1 << 16
_FOLDER, _LONG_NAME, _LONG_LINK, _PAX, _GLOBAL = b"5", b"L", b"K", b"x", b"g"
_REGULAR = (b"0", b"\0", b"7")
_EMPTY = (b"1", b"2", b"3", b"4", b"5", b"6")  # links, devices, folders, pipes
_MOST_EMPTY = 1 << 24  # bytes behind the last member; tar fills up to 10 KiB by default

Read = Callable[[int, int], bytes]  # (offset, length) -> exactly so many bytes; DataError at the end of the file


@dataclass(frozen=True, slots=True)
class Member:
    """A file in a tar. `at` is the offset of its first byte; a link or a device is not `regular`, and has no bytes."""

    name: str
    at: int
    size: int
    regular: bool


def members(read: Read, start: int, end: int, place: str) -> Iterator[Member]:
    """The files of the tar in bytes start .. end of what `read` reads. DataError, with `place`, if it is damaged."""
    at, name, size = start, "", None
    while at + BLOCK <= end:
        header = read(at, BLOCK)
        if not header.strip(b"\0"):
            if end - at > _MOST_EMPTY:
                raise DataError(
                    f"{place}: nothing in the last {end - at} bytes", "was its download broken off? get it again"
                )
            return
        kind, stated = _check(header, f"{place} at byte {at}")
        # Links and folders have no bytes, whatever their size says.
        length = 0 if kind in _EMPTY else stated if size is None else size
        body = at + BLOCK
        if body + length > end:
            raise DataError(
                f"{place} at byte {at}: `{name or _name(header)}` has {length} bytes, but the archive ends at {end}",
                DAMAGED,
            )
        at = body + (length + BLOCK - 1) // BLOCK * BLOCK
        if kind in (_LONG_NAME, _PAX):
            if length > _LONGEST_NAME:
                raise DataError(f"{place} at byte {body}: a name of {length} bytes", DAMAGED)
            data = read(body, length)
            if kind == _LONG_NAME:
                name = _text(data.split(b"\0")[0])
            else:
                name, size = _pax(data, f"{place} at byte {body}", name)
            continue  # it is about the next header
        if kind not in (_FOLDER, _LONG_LINK, _GLOBAL):
            shown = name or _name(header)
            if not (kind == b"\0" and shown.endswith("/")):  # how folders were written before there was a type for them
                yield Member(_safe(shown, place), body, length, kind in _REGULAR)
        if kind not in (_LONG_LINK, _GLOBAL):
            name, size = "", None
    if at < end or at == start:  # a whole one may lack its two empty blocks, as GNU tar allows too
        raise DataError(f"{place}: the archive ends at {end}, within a header", DAMAGED)


def _check(header: bytes, place: str) -> tuple[bytes, int]:
    """(type, size)."""
    try:
        # The sum counts its own 8 bytes as blanks.
        if int(header[148:156].strip(b" \0") or b"0", 8) != sum(header) - sum(header[148:156]) + 8 * 32:
            raise ValueError
        field = header[124:136]
        binary = field[0] & 0x80
        size = int.from_bytes(field, "big") - (0x80 << 88) if binary else int(field.strip(b" \0") or b"0", 8)
        if not 0 <= size < 1 << 62:
            raise ValueError
    except ValueError:
        raise DataError(f"{place}: not a tar header", DAMAGED) from None
    return header[156:157], size


def _name(header: bytes) -> str:
    name = header[:100].split(b"\0")[0]
    if header[257:263] == b"ustar\0" and header[345] != 0:
        name = header[345:500].split(b"\0")[0] + b"/" + name
    return _text(name)


def _pax(data: bytes, place: str, name: str) -> tuple[str, int | None]:
    """Name and size out of `length key=value\\n` records."""
    size = None
    at = 0
    try:
        while at < len(data) and data[at]:
            space = data.index(b" ", at, at + 20)
            end = at + int(data[at:space])
            key, _, value = data[space + 1 : end - 1].partition(b"=")
            if end <= space or end > len(data):
                raise ValueError
            if key == b"path":
                name = _text(value)
            elif key == b"size":
                size = int(value)
                if size < 0:
                    raise ValueError
            elif key.startswith(b"GNU.sparse"):
                raise DataError(f"{place}: a sparse file", "make the tar without --sparse")
            at = end
    except ValueError:
        raise DataError(f"{place}: a malformed pax header", DAMAGED) from None
    return name, size


def _text(name: bytes) -> str:
    return name.decode(errors="surrogateescape")


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
    return Archived("imagenet", classes, archive, Names(names), labels, _places(images))


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
        Names(member.name for images in ordered for member in images),
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
