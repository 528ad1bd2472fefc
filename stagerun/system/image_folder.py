"""The list of images in a folder of class folders. Opens no image and needs no numpy: `check` and `plan` use it.

Class folders sorted by name are labels 0, 1, ...; within a class, folders are sorted by path, files by name. Hidden files and folders are
skipped. Links are followed, except to a folder above. Everything with an image's name that isn't a folder counts as an image, even a broken
link or a pipe: reading it reports the error. `Listed.ignored` has all other files, and files outside of class folders.
"""

import errno
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from stagerun.base.errors import DataError, PermissionDenied, StorageError, UsageError, listing
from stagerun.base.text import count

# In upper or lower case. ImageFolder's, two more of JPEG, and GIF.
IMAGE_SUFFIXES = (
    ".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".gif",
)  # fmt: skip
SPLITS = ("train", "val", "test")
# Names of folders that hold a part of the set, not a class; the first that exists validates.
TRAINING = ("train", "training")
HELD_OUT = ("val", "valid", "validation", "dev", "eval", "test", "testing")
# Images of a `source` that is a folder: each command asks for the size and time of every file.
MOST = 100_000


def is_image(name: str) -> bool:
    return name.lower().endswith(IMAGE_SUFFIXES) and not name.startswith(".")


@dataclass(frozen=True, slots=True)
class Listed:
    """`names`: paths of the images relative to `root`, POSIX, in the order of their labels; `counts`: how many each class has."""

    root: str
    classes: tuple[str, ...]
    counts: tuple[int, ...]
    names: tuple[str, ...]
    ignored: tuple[str, ...]


class Seen(NamedTuple):
    """Digests in hex. `files`: over the names and sizes of all images; `state`: over their times of change, too. `bytes`: of all."""

    files: str
    state: str
    bytes: int


def is_class_folder(path: str) -> bool:
    """Return whether a `source` is a folder of class folders, and not an LMDB. False if unreadable: opening it reports why."""
    try:
        if os.path.exists(os.path.join(path, "data.mdb")):
            return False
        with os.scandir(path) as entries:
            return any(entry.name[0] != "." and is_folder(entry) for entry in entries)
    except (OSError, ValueError):
        return False


def listed(root: str, most: int | None = None) -> Listed:
    """List the images. DataError without class folders, for one without images, for more files outside of them than images inside, and, before
    the next folder is read, for more than `most` images; UsageError as in `check_classes`."""
    folders = class_folders(root)
    try:
        names: list[str] = []
        ignored: list[str] = []
        counts = []
        for name in folders:
            before = len(names)
            for path in files_below(root, name):
                (names if is_image(path.rpartition("/")[2]) else ignored).append(path)
            if most is not None and len(names) > most:
                raise DataError(
                    f"{root}: more than {most} images in class folders, and a `source` has {most} at most",
                    f"make an LMDB of it, and name that: stagerun data import {root} LMDB",
                )
            counts.append(len(names) - before)
        outside = sorted(entry.name for entry in os.scandir(root) if not is_folder(entry) and entry.name[0] != ".")
    except OSError as error:
        can_not_open(error.filename or root, error)
    check_classes(root, folders, names)
    if empty := [name for name, images in zip(folders, counts, strict=True) if images == 0]:
        shown = ", ".join(empty[:5]) + (f" and {len(empty) - 5} more" if len(empty) > 5 else "")
        raise DataError(
            f"{root}: no images in the class folder{'s' if len(empty) > 1 else ''} {shown}",
            f"remove what is not a class; images end in {', '.join(IMAGE_SUFFIXES)}",
        )
    if len(outside) > len(names):
        shown = ", ".join(outside[:3]) + ", ..." * (len(outside) > 3)
        raise DataError(
            f"{root}: {count(len(outside), 'file')} outside of the class folders ({shown}), and {count(len(names), 'image')} in them",
            "put the images of each class into a folder of its own, or give a list of `path label` lines; move other files elsewhere",
        )
    return Listed(root, folders, tuple(counts), tuple(names), (*outside, *ignored))


def class_folders(root: str) -> tuple[str, ...]:
    """Return the class folders, even without images. Errors as in `listed`."""
    try:
        with os.scandir(root) as entries:
            names = sorted(entry.name for entry in entries if entry.name[0] != "." and is_folder(entry))
    except OSError as error:
        can_not_open(error.filename or root, error)
    check_classes(root, names)
    return tuple(names)


def small(root: str) -> Listed:
    """Return `listed` of a schedule's source, which may have MOST images."""
    return listed(root, MOST)


def seen(images: Listed) -> Seen:
    """Digest sizes and times of the images. An unreadable one counts without: reading it reports why."""
    files, state, total = hashlib.sha256(), hashlib.sha256(), 0
    for name in images.names:
        try:
            status = os.stat(os.path.join(images.root, name))
            size, changed = status.st_size, status.st_mtime_ns
        except OSError:
            size = changed = -1
        text = f"{name}\0{size}\0".encode(errors="surrogateescape")
        files.update(text)
        state.update(text + b"%d\0" % changed)
        total += max(0, size)
    return Seen(files.hexdigest(), state.hexdigest(), total)


def check_classes(root: str, classes: Sequence[str], names: Iterable[str] = ()) -> None:
    """DataError without classes. UsageError if the folders are sets (`train` and `val`), or if the class folders are one level further down
    by the images' `names`."""
    if not classes:
        raise DataError(f"{root}: no class folders in it", "give a folder with one folder of images per class")
    words = {name: name.lower() for name in classes}
    sets = [name for name, word in words.items() if word in (*TRAINING, *HELD_OUT)]
    held_out = [name for name in sets if words[name] in HELD_OUT]
    # One of these names may be a class: CIFAR-100 has trains.
    if len(sets) == len(classes) or (held_out and len(sets) > 1):
        are = "its folders are" if len(sets) == len(classes) else "among its folders are"
        raise UsageError(f"{root}: {are} {listing(sets, 'and')}, which are not classes", _each(root, sets))
    inner: dict[str, dict[str, None]] = {name: {} for name in classes}
    for name in names:
        first, *below, _ = name.split("/")
        inner[first][below[0] if below else ""] = None
    if repeated := [name for name, below in inner.items() if (set(below) & set(classes)) - {name}]:
        raise UsageError(
            f"{root}: the folder {repeated[0]} holds folders with names of its siblings: {listing(tuple(inner[repeated[0]])[:4], 'and')}",
            f"{_each(root, repeated)}, or move {repeated[0]} elsewhere",
        )
    below_it = tuple(inner[classes[0]])
    if len(classes) == 1 and len(below_it) > 1 and "" not in below_it:
        raise UsageError(
            f"{root}: its one folder, {classes[0]}, holds only folders: {listing(below_it[:4], 'and')}",
            _each(root, classes),
        )


def _each(root: str, folders: Sequence[str]) -> str:
    if not os.path.isdir(root):
        return f"unpack it, and import {listing(folders, 'and')} separately"
    commands = [f"stagerun data import {os.path.join(root, name)} LMDB_{name.upper()}" for name in folders[:4]]
    return f"give one of them at a time: {listing(commands, 'and')}"


def files_below(root: str, folder: str) -> Iterator[str]:
    """Yield POSIX paths relative to root of all visible files. OSError for an unreadable folder."""
    for path, names in sorted(_folders(root, folder, ())):
        yield from (f"{path}/{name}" for name in sorted(names))


def is_folder(entry: "os.DirEntry[str]") -> bool:
    """Return whether an entry is a folder, or a link to one. OSError if unknown."""
    try:
        return entry.is_dir()
    except OSError as error:
        # A link to itself, or through a file, is a broken link, for which `is_dir` returns False.
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENAMETOOLONG):
            return False
        raise


def _folders(root: str, folder: str, above: tuple[tuple[int, int], ...]) -> Iterator[tuple[str, list[str]]]:
    """Yield the folder and all below it, each with the names of its files; `above`: its ancestors, by device and inode, to which a link would
    be a loop."""
    status = os.stat(os.path.join(root, folder))
    here, files = (status.st_dev, status.st_ino), []
    if here in above:
        return
    for entry in os.scandir(os.path.join(root, folder)):
        if entry.name[0] == ".":
            continue
        if is_folder(entry):
            yield from _folders(root, f"{folder}/{entry.name}", (*above, here))
        else:
            files.append(entry.name)
    yield folder, files


def can_not_open(path: str, error: OSError) -> NoReturn:
    """Raise the error for an unreadable path of the user."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        raise DataError(f"{path}: no such file or folder", "check the name") from None
    if isinstance(error, IsADirectoryError):
        raise DataError(f"{path}: is a folder, not a file", "name the file in it") from None
    if isinstance(error, PermissionError):
        raise PermissionDenied(f"{path}: may not be read", "ask its owner, or copy it") from None
    raise StorageError(f"{path}: can't be read: {error.strerror}", "check the disk") from None
