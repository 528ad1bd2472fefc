"""Sources of images: options, archives, and texts with their mistakes, for the readers of all formats; and images that are files: in class
folders, in a tar of them, or named by a list or a table. Tars are read in place: nothing is unpacked."""

import csv
import os
import re
import tarfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, NamedTuple

import click
import numpy as np
from numpy.typing import NDArray

from stagerun.base.errors import DataError, Problems, RecipeError, Span
from stagerun.command.options import option
from stagerun.data.importing.images import (
    LARGEST_FILE,
    Files,
    Item,
    Pixels,
    bytes_of,
    digest_of_names,
    folder_files,
    read_whole,
    refuse,
    regular,
    signature,
)
from stagerun.system.image_folder import SPLITS, can_not_open, check_classes, is_image, listed

LARGEST_LABEL = 2**31 - 1  # Datum.label is an int32
LARGEST_TEXT = 1 << 30
DAMAGED = "it is damaged or cut off; get it again"
MOST_MISTAKES = 20


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """Facts about SOURCE that its content doesn't show."""

    root: str | None = option(
        "--root PATH", "list, csv: the folder or tar of the images.  [default: the list's folder]"
    )
    synsets: str | None = option("--synsets FILE", "folder, tar: the classes in the order of their labels.")
    split: str | None = option(
        "--split",
        "idx, cifar: the part to import, if SOURCE has several.  [default: train]",
        type=click.Choice(SPLITS),
    )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Images:
    """A `Source` of two functions."""

    kind: str
    length: int
    signature: str
    item: Callable[[int], Item]
    read: Callable[[int], bytes | Pixels]
    classes: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()

    def __len__(self) -> int:
        return self.length


class Archive:
    """A large file that any number of threads read in pieces. It is closed when nothing refers to it any more."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._fd = regular(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            can_not_open(path, error)
        weakref.finalize(self, os.close, self._fd)
        status = os.fstat(self._fd)
        self.size = status.st_size
        # In signatures, as version 1 of the import wrote it.
        self.state = f"State(path={os.path.realpath(path)!r}, size={self.size}, changed={status.st_mtime_ns})"

    def read(self, at: int, length: int) -> bytes:
        """Return exactly `length` bytes from offset `at`. DataError if the file ends before, or one image can't have so many bytes."""
        location = f"{self.path}: {length} bytes at {at}"
        if not 0 <= length <= min(LARGEST_FILE, self.size - at):
            raise DataError(f"{location}, but the file ends at {self.size}, or one image can't have so many", DAMAGED)
        data = b""
        try:  # some file systems give less than a read wants
            while len(data) < length and (more := os.pread(self._fd, length - len(data), at + len(data))):
                data += more
        except OSError as error:
            refuse(self.path, error)
        if len(data) < length:
            raise DataError(f"{location}: the file became shorter", "is something still writing it?")
        return data


class Text:
    """A text file that the user named, and the mistakes in it: up to MOST_MISTAKES are reported at once, with their places."""

    def __init__(self, path: str) -> None:
        try:
            data = bytes_of(path, LARGEST_TEXT)
        except OSError as error:
            can_not_open(path, error)
        if data is None or b"\0" in data:
            raise DataError(f"{path}: larger than {LARGEST_TEXT >> 20} MiB, or with NUL bytes", "give a text file")
        # Bytes that are not UTF-8 become surrogates, as in file names.
        self.text = data.decode(errors="surrogateescape").removeprefix("\N{BYTE ORDER MARK}")
        self.path, self._lines = path, self.text.split("\n")
        self._problems = Problems([(path, self.text)])

    def __iter__(self) -> Iterator[tuple[int, str]]:
        """Yield number and text of every line that isn't blank. A name may hold any character but a newline."""
        for number, line in enumerate(self._lines, start=1):
            if line.strip():
                yield number, line.strip(" \t\r")

    def mistake(self, number: int, word: str, message: str, hint: str) -> None:
        """Add a mistake at the last occurrence of `word` in a line. RecipeError for too many."""
        column = max(0, self._lines[number - 1].rfind(word)) + 1
        self._problems.add(Span(self.path, number, column, max(1, len(word))), message, hint)
        if self._problems.count(self.path) >= MOST_MISTAKES:
            self.check()

    def check(self) -> None:
        """RecipeError for the mistakes, if any."""
        if self._problems:
            raise RecipeError(self._problems.all())


# -- files

LARGEST_CLASS = 1 << 24  # integers up to it are exact in Datum.float_data


def open_folder(path: str, options: SourceOptions) -> Files:
    """Class folders in torchvision's order (`system.image_folder`)."""
    images = listed(path)
    classes, labels = _labels_of(path, images.classes, options.synsets)
    return replace(folder_files(images), classes=classes, labels=np.repeat(labels, images.counts))


def _labels_of(path: str, names: Sequence[str], synsets: str | None) -> tuple[tuple[str, ...], NDArray[np.int32]]:
    """Return the classes, and the label of each class in `names`: its index, or its line in the file `synsets`, such as `n01440764` or
    `n01440764 tench, Tinca tinca` (Caffe's synset_words.txt). Words alone are not unique: ImageNet has two cranes."""
    lines = {line.split()[0]: line for _, line in Text(synsets)} if synsets is not None else {n: n for n in names}
    order = {synset: label for label, synset in enumerate(lines)}
    if missing := [name for name in names if name not in order]:
        raise DataError(f"{path}: the class {missing[0]} is not in {synsets}", "is it the file of another set?")
    return tuple(lines.values()), np.array([order[name] for name in names], np.int32)


# -- tar


class Member(NamedTuple):
    name: str
    at: int
    size: int


def _images_in(path: str) -> tuple[Archive, list[Member], bool]:
    """Return the images of a tar, and whether it holds tars: ImageNet's has one for each class."""
    images, tars = list[Member](), list[str]()

    def walk(file: IO[bytes], start: int, end: int, folder: str, location: str) -> None:
        """Add the images of the tar in bytes `start` to `end`, which is `file`."""
        tar: Any = tarfile.TarFile(fileobj=file, encoding="utf-8", errors="surrogateescape")
        while (member := tar.next()) is not None:
            tar.members.clear()  # a million would fill memory
            words, at = member.name.split("/"), start + member.offset_data
            name = folder + "/".join(word for word in words if word not in ("", ".")).removeprefix(folder)
            if member.isdir():
                continue
            # A key contains the name, so a name outside of the archive's folder is refused, though it never becomes a path.
            if not member.isreg() or member.issparse() or words[0] == "" or ".." in words:
                message = (
                    f"{location}: `{member.name}` is a link, a device or sparse, or outside of the archive's folder"
                )
                raise DataError(message, "make the tar of plain files (tar --dereference --hard-dereference)")
            if not 0 <= member.size <= end - at:
                raise DataError(f"{location}: `{member.name}` has {member.size} bytes, and {end - at} remain", DAMAGED)
            if name.endswith(".tar"):
                tars.append(name)
                inner = f"{words[-1].removesuffix('.tar')}/"
                walk(tar.extractfile(member), at, at + member.size, inner, f"{location}: {name}")
            elif is_image(words[-1]):
                images.append(Member(name, at, member.size))
        # tarfile takes a damaged header for the end of the archive. A whole one may lack its two empty blocks, as GNU tar allows too; a
        # download that broke off may leave zeros.
        file.seek(tar.offset)
        rest, empty = file.read(tarfile.BLOCKSIZE), end - start - tar.offset
        if rest.strip(b"\0") or 0 < len(rest) < tarfile.BLOCKSIZE or empty > 1 << 24:
            raise DataError(
                f"{location} at byte {start + tar.offset}: not a tar header, or cut off within one", DAMAGED
            )

    archive = Archive(path)
    try:
        with open(path, "rb", opener=regular) as file:
            walk(file, 0, archive.size, "", path)
    except (tarfile.TarError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: not a tar, or damaged: {error}", "get it again; or gunzip it") from None
    return archive, images, bool(tars)


def open_tar(path: str, options: SourceOptions) -> Images:
    """A tar of class folders, or of a tar for each class (ILSVRC2012_img_train.tar)."""
    archive, images, is_imagenet = _images_in(path)
    top = {member.name.partition("/")[0] for member in images}
    below = [member._replace(name=member.name.partition("/")[2]) for member in images]
    if len(top) == 1 and any("/" in member.name for member in below):  # `train/` above the classes
        images = below
    if not images or not all("/" in member.name for member in images):
        hint = "give a tar of class folders; or a list of `path label` lines, and the tar as --root"
        raise DataError(f"{path}: no images in it, or some in no class folder", hint)
    images.sort(key=lambda member: (member.name.partition("/")[0], *member.name.rpartition("/")[::2]))
    in_class = [member.name.partition("/")[0] for member in images]
    names, counts = np.unique(in_class, return_counts=True)
    check_classes(path, names.tolist(), (member.name for member in images))
    classes, labels = _labels_of(path, names.tolist(), options.synsets)
    kind = "imagenet" if is_imagenet else "folder"
    return archived(kind, archive, images, np.repeat(labels, counts), lambda i: archive.read(*images[i][1:]), classes)


def archived(
    kind: str,
    archive: Archive,
    members: Sequence[Member],
    labels: NDArray[np.int32],
    read: Callable[[int], bytes],
    classes: tuple[str, ...] = (),
) -> Images:
    """Return images that are pieces of one archive."""
    offsets = np.array([(member.at, member.size) for member in members], np.int64)
    names = digest_of_names(member.name for member in members)
    return Images(
        kind=kind,
        length=len(members),
        signature=signature(kind, archive.state, names, labels, offsets, *classes),
        item=lambda i: Item(members[i].name, int(labels[i])),
        read=read,
        classes=classes,
    )


# -- list: `path label` lines of convert_imageset; csv: a table of images with several labels each


def open_list(path: str, options: SourceOptions) -> Images:
    """The label is the last word of a line: a path may hold spaces."""
    text, names, labels = Text(path), list[str](), list[int]()
    for number, line in text:
        *name, label = re.split(r"[ \t]+(?=[^ \t]*$)", line)
        if not name:
            text.mistake(number, line, "a line needs a path and a label", "a line is `path label`")
        elif not (label.isascii() and label.isdigit() and len(label) <= 10 and int(label) <= LARGEST_LABEL):
            message = f"`{label}` is not a label: an integer from 0 to {LARGEST_LABEL}"
            text.mistake(number, label, message, "a line is `path label`")
        else:
            names += name
            labels.append(int(label))
    text.check()
    read, root = _reader(path, options, names)
    return Images(
        kind="list",
        length=len(names),
        signature=signature("list", root, digest_of_names(names), np.array(labels, np.int32)),
        item=lambda i: Item(names[i], labels[i]),
        read=read,
    )


def _reader(path: str, options: SourceOptions, names: list[str]) -> tuple[Callable[[int], bytes], str]:
    """Return the reader of a list's images, and the real path of their folder or tar. DataError if they are missing."""
    root = options.root if options.root is not None else str(Path(path).parent)
    if os.path.isfile(root):
        archive, images, _ = _images_in(root)
        members = {member.name: member for member in images}
        missing = [name for name in names if name not in members]
    else:
        missing = [] if any(os.path.lexists(os.path.join(root, name)) for name in names) else names[:3]
    if missing or not names:
        message = f"{path}: names {len(names)} images; not in {root}: {', '.join(missing[:3])}"
        raise DataError(message, "give the folder, or the tar, of its relative paths as --root")
    if os.path.isfile(root):
        return lambda i: archive.read(*members[names[i]][1:]), os.path.realpath(root)
    return lambda i: read_whole(os.path.join(root, names[i])), os.path.realpath(root)


def open_csv(path: str, options: SourceOptions) -> Images:
    """Below a line that names the two columns each line has a path and the image's classes, with spaces, `;` or `|` between: numbers from 0,
    or names. An image may have no class."""
    text, words = Text(path), dict[str, list[str]]()
    example = "the first line names the columns, as `image,classes`; other lines are like `cat.jpg,3 14`"
    for number, line in text:
        name, *cells = [cell.strip() for cell in next(csv.reader([line]))]
        if number == 1 and is_image(name):
            text.mistake(number, line, "the first line has to name the columns", example)
        elif not name or len(cells) != 1 or name in words:
            text.mistake(number, line, "a line needs a path, which no line above has, and one more column", example)
        else:
            words[name] = [word for word in re.split(r"[ ;|\t]+", cells[0]) if word]
    text.check()
    names = list(words)[1:]
    several_words = [words[name] for name in names]
    classes = tuple(sorted({word for each in several_words for word in each}))
    numbers = {word: number for number, word in enumerate(classes)}
    if all(word.isascii() and word.isdigit() for word in classes):
        numbers = {word: int(word[:10]) for word in classes}
        classes = ()
    if too_large := [word for word, number in numbers.items() if number > LARGEST_CLASS]:
        raise DataError(f"{path}: class {too_large[0]} is larger than {LARGEST_CLASS}", "classes count from 0")
    several = [tuple(sorted({numbers[word] for word in each})) for each in several_words]
    read, root = _reader(path, options, names)
    ends = np.cumsum([len(each) for each in several], dtype=np.int64)
    flat = np.array([number for each in several for number in each], np.int32)
    return Images(
        kind="csv",
        length=len(names),
        signature=signature("csv", root, digest_of_names(names), flat, ends, *classes),
        item=lambda i: Item(names[i], -1, several[i]),
        read=read,
        classes=classes,
    )
