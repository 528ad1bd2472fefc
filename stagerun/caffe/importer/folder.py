"""The files of a folder of Caffe's: the one place of the import that reads."""

import io
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from stagerun.base.errors import DataError, StagerunError, UsageError
from stagerun.language.disk import first_record
from stagerun.language.parse import LARGEST
from stagerun.language.proto import caffe_pb2
from stagerun.system.files import upward
from stagerun.system.image_sets import first_value
from stagerun.system.lmdb_file import check_file

SCRIPTS = (".sh", ".bash")


@dataclass(frozen=True, slots=True)
class Count:
    """Of an LMDB at `place`. `number` is 0 if nothing says it; `counted`: in the LMDB."""

    place: str
    number: int = 0
    channels: int | None = None
    counted: bool = True


class CaffeFolder:
    """Paths in its files lead from the folder or from one above it, where Caffe was started. DataError."""

    def __init__(self, folder: str) -> None:
        if not folder:
            raise UsageError("FOLDER is empty", "give the folder with the solver files; `.` is the working folder")
        if not os.path.isdir(folder):
            raise DataError(f"{folder}: no such folder", "give the folder with the solver files")
        shown = os.path.normpath(folder)
        self.shown = "" if shown == "." else shown
        self._folder = os.path.abspath(folder)

    def scripts(self) -> dict[str, bytes]:
        """Scripts first, 2_collapse.sh before 10_again.sh, then READMEs."""
        found = self.files(lambda name: name.endswith(SCRIPTS) or name.upper().startswith("README"))

        def rank(name: str) -> tuple[bool, str]:
            return not name.endswith(SCRIPTS), re.sub("[0-9]+", lambda digits: digits[0].zfill(9), name)

        return {name: found[name] for name in sorted(found, key=rank)}

    def files(self, wanted: Callable[[str], bool]) -> dict[str, bytes]:
        with _reading(self._folder):
            names = sorted(os.listdir(self._folder))
        paths = {name: os.path.join(self.shown, name) for name in names if wanted(name)}
        return {name: _bytes(path) for name, path in paths.items() if os.path.isfile(path)}

    def net(self, path: str) -> tuple[str, bytes] | None:
        """The place of a net, by its path or beside the solver, and its text."""
        beside = os.path.join(self.shown, os.path.basename(path))
        there = next(filter(os.path.isfile, (*self._places(path), beside)), "")
        return (there, _bytes(there)) if there else None

    def file(self, path: str) -> str:
        """The absolute path of what a path of Caffe's means; '' if there is no such file."""
        # Only a regular file: opening a FIFO would wait, and reading a device may never end.
        there = next(filter(os.path.isfile, self._places(path)), "")
        return os.path.abspath(there) if there else ""

    def mean_file(self, path: str) -> tuple[str, bytes] | None:
        return (there, _bytes(there, 64_000_000)) if (there := self.file(path)) else None

    def lmdb(self, path: str) -> Count | None:
        """None if it isn't there. One that can't be read has no number: `run` will say why."""
        if (place := next(filter(os.path.isdir, self._places(path)), None)) is None:
            return None
        number, channels = 0, None
        with suppress(StagerunError):
            number, first = check_file(place), first_record(place)
            channels = (first.channels or _channels_of_image(place)) if first is not None else None
        return Count(os.path.abspath(place), number, channels)

    def _places(self, path: str) -> Iterator[str]:
        """Where a path may lead: from the folder, or from each one above it."""
        if not path or "\0" in path:
            return
        yield os.path.normpath(os.path.join(self.shown, path))
        for above in upward(self._folder):
            place = os.path.normpath(os.path.join(above, path))
            short = os.path.relpath(place)
            yield place if short.startswith("..") else short


def _channels_of_image(path: str) -> int | None:
    """Those of the first record of an LMDB, an encoded image; None where it can't be read."""
    from PIL import Image

    with suppress(DecodeError, OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        datum = caffe_pb2.Datum.FromString(first_value(path))
        with Image.open(io.BytesIO(datum.data)) as image:
            return 1 if image.mode in ("1", "L", "I", "I;16") else 3
    return None


def _bytes(path: str, most: int = LARGEST + 1) -> bytes:
    with _reading(path), open(path, "rb") as file:
        return file.read(most)


@contextmanager
def _reading(shown: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"{shown}: can't be read: {error.strerror}", "check the disk, and its permissions") from error
