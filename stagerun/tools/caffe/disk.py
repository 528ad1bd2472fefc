"""The files of a folder of Caffe's: the one place of the import that reads."""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from stagerun.base.errors import DataError, PermissionDenied, UsageError
from stagerun.language.parse import LARGEST
from stagerun.system.files import upward

SCRIPTS = (".sh", ".bash")
MOST_NAMED = 10  # files in a hint
LARGEST_MEAN = 64_000_000  # bytes of a mean image

CountLmdb = Callable[[str], tuple[int, int | None] | None]


class CaffeFolder:
    """A folder, read when it is asked for. Paths in its files begin at `root`, or where they are found from the folder upward,
    as Caffe is started in a folder above. DataError, PermissionDenied.
    """

    def __init__(self, folder: str, root: str | None, count_lmdb: CountLmdb) -> None:
        shown = os.path.normpath(folder)
        if not folder:
            raise UsageError("FOLDER is empty", "give the folder with the solver files; `.` is the working folder")
        self.name = os.path.basename(os.path.abspath(folder))
        self.shown = "" if shown == "." else shown
        self._folder = os.path.abspath(folder)
        self._root = root
        self._count_lmdb = count_lmdb
        if not os.path.isdir(self._folder):
            what = "is a file, and what is imported is a folder" if os.path.exists(folder) else "no such folder"
            raise DataError(f"{folder}: {what}", "give the folder with the solver files")
        if root is not None and not os.path.isdir(root):
            raise DataError(f"{root or '``'}: no such folder", "`--root` is the folder in which Caffe is started")

    def prototxts(self) -> dict[str, bytes]:
        return self._named(lambda name: name.endswith(".prototxt"))

    def scripts(self) -> dict[str, bytes]:
        """Scripts first, 2_collapse.sh before 10_again.sh, then READMEs."""
        found = self._named(lambda name: name.endswith(SCRIPTS) or name.upper().startswith("README"))

        def rank(name: str) -> tuple[bool, list[str]]:
            return not name.endswith(SCRIPTS), [
                part.zfill(9) if part.isdecimal() else part for part in re.split("([0-9]+)", name)
            ]

        return {name: found[name] for name in sorted(found, key=rank)}

    def _named(self, wanted: Callable[[str], bool]) -> dict[str, bytes]:
        with _reading(self._folder):
            names = sorted(os.listdir(self._folder))
        found = {}
        for name in names:
            if wanted(name) and os.path.isfile(path := os.path.join(self._folder, name)):
                found[name] = _bytes(path, os.path.join(self.shown, name), LARGEST + 1)
        return found

    def net(self, path: str) -> tuple[str, bytes] | None:
        beside = os.path.join(self.shown, os.path.basename(path))
        there = self._found(path) or (beside if os.path.isfile(beside) else "")
        return (there, _bytes(there, there, LARGEST + 1)) if there else None

    def beside(self, path: str, ending: str) -> list[str]:
        """Files with an ending in FOLDER, and where a path of Caffe's leads."""
        places = {self._folder, *(os.path.dirname(place) for place in self._places(path))}
        found = {name for place in places if os.path.isdir(place) for name in os.listdir(place)}
        return sorted(name for name in found if name.removesuffix(".h5").endswith(ending))[:MOST_NAMED]

    def file(self, path: str) -> str:
        """The absolute path of what a path of Caffe's means; '' if there is no such file."""
        there = self._found(path)
        return os.path.abspath(there) if there else ""

    def mean_file(self, path: str) -> tuple[str, bytes] | None:
        there = self._found(path)
        return (os.path.abspath(there), _bytes(there, there, LARGEST_MEAN)) if there else None

    def images(self, path: str, is_list: bool) -> tuple[str, int, int | None] | None:
        if is_list:
            there = self._found(path)
            return (there, _lines(there), None) if there else None
        for place in self._places(path):
            if os.path.isdir(place):
                return (os.path.abspath(place), *(self._count_lmdb(place) or (0, None)))
        return None

    def _found(self, path: str) -> str:
        """The file that a path of Caffe's means, '' if there is none. Only a regular file: opening a FIFO would wait, and reading
        a device may never end."""
        return next((place for place in self._places(path) if os.path.isfile(place)), "")

    def _places(self, path: str) -> Iterator[str]:
        """Where a path may lead: from --root, or from the folder and each one above it."""
        if not path or "\0" in path:
            return
        if os.path.isabs(path):
            yield path
            return
        if self._root is not None:
            yield os.path.normpath(os.path.join(self._root, path))
            return
        yield os.path.normpath(os.path.join(self.shown, path))
        yield from (_short(os.path.normpath(os.path.join(above, path))) for above in upward(self._folder))

    def above(self, path: str) -> bool:
        return self._root is None and not os.path.abspath(path).startswith(os.path.join(self._folder, ""))

    def meant(self, path: str) -> str:
        """Where a file is first looked for."""
        return next(self._places(path), path)


def _short(path: str) -> str:
    """A path below the working folder from there, any other as it is."""
    here = os.getcwd()
    return os.path.relpath(path, here) if path.startswith(here + os.sep) else path


def _bytes(path: str, shown: str, most: int) -> bytes:
    with _reading(shown), open(path, "rb") as file:
        return file.read(most)


def _lines(path: str) -> int:
    """The images of a list: its lines that are not empty."""
    with _reading(path), open(path, "rb") as file:
        return sum(1 for line in file if line.strip())


@contextmanager
def _reading(shown: str) -> Iterator[None]:
    try:
        yield
    except PermissionError as error:
        raise PermissionDenied(f"{shown}: may not be read", "ask its owner") from error
    except OSError as error:
        raise DataError(f"{shown}: can't be read: {error.strerror}", "check the disk") from error
