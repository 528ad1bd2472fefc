"""A folder of class folders, looked at without opening an image and without numpy: `check` and `plan` ask, too.

Class folders sorted by name are labels 0, 1, ...; within a class, folders sorted by path, files sorted by name. Hidden
files and folders are left out. Links to files and folders are followed, but for those that lead back to where they are.
What has an image's name and is not a folder is an image, also a link that leads nowhere, or a pipe: reading it says what it is.
Files of other names are no images, nor is what lies beside the class folders; `Listed.ignored` has them.
"""

import errno
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from stagerun.base.errors import DataError, PermissionDenied, StorageError, UsageError, listing
from stagerun.base.text import count

# In any case of letters. Beside ImageFolder's there are the other two names of JPEGs, and GIF.
IMAGE_SUFFIXES = (
    ".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".gif",
)  # fmt: skip
SPLITS = ("train", "val", "test")
_HELD_OUT = {"val", "valid", "validation", "test", "testing", "eval", "dev"}
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
    """Whether a `source` is one, and not an LMDB. Not where that can't be seen: whoever opens it reports why."""
    try:
        if os.path.exists(os.path.join(path, "data.mdb")):
            return False
        with os.scandir(path) as entries:
            return any(entry.name[0] != "." and is_folder(entry) for entry in entries)
    except (OSError, ValueError):
        return False


def listed(root: str, most: int | None = None) -> Listed:
    """DataError if there are no class folders, one of them has no images, or more files lie beside them than images in them; UsageError as in
    `check_classes`. DataError as soon as there are more than `most` images: no folder after that is read."""
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
        beside = sorted(entry.name for entry in os.scandir(root) if not is_folder(entry) and entry.name[0] != ".")
    except OSError as error:
        can_not_open(error.filename or root, error)
    check_classes(root, folders, names)
    if empty := [name for name, images in zip(folders, counts, strict=True) if images == 0]:
        shown = ", ".join(empty[:5]) + (f" and {len(empty) - 5} more" if len(empty) > 5 else "")
        raise DataError(
            f"{root}: no images in the class folder{'s' if len(empty) > 1 else ''} {shown}",
            f"remove what is not a class; images end in {', '.join(IMAGE_SUFFIXES)}",
        )
    if len(beside) > len(names):
        shown = ", ".join(beside[:3]) + ", ..." * (len(beside) > 3)
        raise DataError(
            f"{root}: {count(len(beside), 'file')} lie beside the class folders ({shown}), and {count(len(names), 'image')} in them",
            "put the images of each class into a folder of its own, or give a list of `path label` lines; move other files elsewhere",
        )
    return Listed(root, folders, tuple(counts), tuple(names), (*beside, *ignored))


def class_folders(root: str) -> tuple[str, ...]:
    """The classes, which need no images here. Errors as in `listed`."""
    try:
        with os.scandir(root) as entries:
            found = sorted(entry.name for entry in entries if entry.name[0] != "." and is_folder(entry))
    except OSError as error:
        can_not_open(error.filename or root, error)
    check_classes(root, found)
    return tuple(found)


def small(root: str) -> Listed:
    """`listed`, of a folder that a schedule names, with MOST images."""
    return listed(root, MOST)


def seen(found: Listed) -> Seen:
    """Sizes and times of the images, none of which is opened. One that can't be asked counts as without: reading it says why."""
    files, state, total = hashlib.sha256(), hashlib.sha256(), 0
    for name in found.names:
        try:
            status = os.stat(os.path.join(found.root, name))
            size, changed = status.st_size, status.st_mtime_ns
        except OSError:
            size = changed = -1
        text = f"{name}\0{size}\0".encode(errors="surrogateescape")
        files.update(text)
        state.update(text + b"%d\0" % changed)
        total += max(0, size)
    return Seen(files.hexdigest(), state.hexdigest(), total)


def check_classes(root: str, classes: Sequence[str], names: Iterable[str] = ()) -> None:
    """DataError without classes. UsageError where the folders are sets (`train` and `val`) and not classes, or where by the images' `names`
    the class folders lie a folder further down."""
    if not classes:
        raise DataError(f"{root}: no class folders in it", "give a folder with one folder of images per class")
    words = {name: name.lower() for name in classes}
    sets = [name for name, word in words.items() if word in {"train", "training", *_HELD_OUT}]
    held_out = [name for name in sets if words[name] in _HELD_OUT]
    # One of these names may be that of a class: CIFAR-100 has trains.
    if len(sets) == len(classes) or (held_out and len(sets) > 1):
        are = "its folders are" if len(sets) == len(classes) else "among its folders are"
        raise UsageError(f"{root}: {are} {listing(sets, 'and')}, which are not classes", _each(root, sets))
    inner: dict[str, dict[str, None]] = {name: {} for name in classes}
    for name in names:
        first, *below, _ = name.split("/")
        inner[first][below[0] if below else ""] = None
    if repeated := [name for name, below in inner.items() if (set(below) & set(classes)) - {name}]:
        raise UsageError(
            f"{root}: the folder {repeated[0]} holds folders named as others beside it: {listing(tuple(inner[repeated[0]])[:4], 'and')}",
            f"{_each(root, repeated)}, or move {repeated[0]} elsewhere",
        )
    own = tuple(inner[classes[0]])
    if len(classes) == 1 and len(own) > 1 and "" not in own:
        raise UsageError(
            f"{root}: its one folder, {classes[0]}, holds only folders: {listing(own[:4], 'and')}", _each(root, classes)
        )


def _each(root: str, folders: Sequence[str]) -> str:
    if not os.path.isdir(root):
        return f"unpack it, and import {listing(folders, 'and')} by themselves"
    commands = [f"stagerun data import {os.path.join(root, name)} LMDB_{name.upper()}" for name in folders[:4]]
    return f"give one of them at a time: {listing(commands, 'and')}"


def files_below(root: str, folder: str) -> Iterator[str]:
    """Paths relative to root, POSIX, of all that is not a folder and not hidden. OSError if a folder can't be read."""
    for place in sorted(_folders(root, folder, ())):
        entries = os.scandir(os.path.join(root, place))
        yield from (
            f"{place}/{name}" for name in sorted(e.name for e in entries if e.name[0] != "." and not is_folder(e))
        )


def is_folder(entry: "os.DirEntry[str]") -> bool:
    """Or a link to one. OSError if that can't be known."""
    try:
        return entry.is_dir()
    except OSError as error:
        # A link to itself, or through a file: as one to a name that isn't there, for which `is_dir` says False by itself.
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENAMETOOLONG):
            return False
        raise


def _folders(root: str, folder: str, above: tuple[tuple[int, int], ...]) -> Iterator[str]:
    """The folder and all below it; `above` are those that it is in, by device and inode: a link to one is a loop."""
    found = os.stat(os.path.join(root, folder))
    here = (found.st_dev, found.st_ino)
    if here in above:
        return
    yield folder
    for entry in os.scandir(os.path.join(root, folder)):
        if entry.name[0] != "." and is_folder(entry):
            yield from _folders(root, f"{folder}/{entry.name}", (*above, here))


def can_not_open(path: str, error: OSError) -> NoReturn:
    """The error for a path that the user named."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        raise DataError(f"{path}: no such file or folder", "check the name") from None
    if isinstance(error, IsADirectoryError):
        raise DataError(f"{path}: is a folder, not a file", "give the file in it") from None
    if isinstance(error, PermissionError):
        raise PermissionDenied(f"{path}: may not be read", "ask its owner, or copy it") from None
    raise StorageError(f"{path}: can't be read: {error.strerror}", "check the disk") from None
