"""A folder -> recipe.Schedule, and texts -> a new folder: the part of the language that reads and writes files."""

import os
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from google.protobuf.message import DecodeError

from stagerun.base import recipe
from stagerun.base.errors import DataError, PermissionDenied, Problem, RecipeError, Span, StagerunError, UsageError
from stagerun.language import labels
from stagerun.language.code import MISSING, Text, Unreadable
from stagerun.language.nets import Files, First
from stagerun.language.parse import LARGEST
from stagerun.language.proto import caffe_pb2
from stagerun.language.resolve import SCHEDULE_FILE, Folder, stage_nodes
from stagerun.system.files import upward, write_whole, writing
from stagerun.system.image_folder import is_class_folder, small
from stagerun.system.image_sets import first_value
from stagerun.system.lmdb_file import check_file

LARGEST_MEAN = 64_000_000  # bytes of a mean image
NOT_SAVED: Mapping[str, bytes] = {}


def load(folder: str | Path, overrides: Sequence[str] = (), edited: Mapping[str, bytes] = NOT_SAVED) -> recipe.Schedule:
    """The schedule in a folder, with the changes of `--set`. RecipeError with every mistake of every file, sorted by
    place; paths in it start with `folder` as it was given. Where `images` is not written, the LMDB's own count is read.
    `edited` has what an editor holds of files, by their paths below the folder: it counts in place of what is on disk.
    """
    shown = os.path.normpath(folder)
    _require_folder(shown, edited)
    text = partial(_text, shown, edited)
    nets = Files(text, partial(_found, shown), first_record, _content)
    place = "" if shown == "." else shown
    read_labels = partial(text, most=labels.MOST)
    return Folder(text, os.path.abspath(shown), place, _records, nets, read_labels).schedule(overrides)


def files_in(folder: str, edited: Mapping[str, bytes] = NOT_SAVED) -> dict[str, Text]:
    """schedule.prototxt, and the files of the stages that it names: their bytes, or why they can't be read; not those that no stage needs
    and that aren't there. RecipeError if the folder isn't there. `edited`: as in `load`."""
    _require_folder(folder, edited)
    texts = {SCHEDULE_FILE: _text(folder, edited, SCHEDULE_FILE)}
    for node in stage_nodes(texts[SCHEDULE_FILE]):
        if node.file is not None and node.file not in texts:
            text = _text(folder, edited, node.file)
            if text != MISSING or not node.filled:
                texts[node.file] = text
    return texts


def _require_folder(folder: str, edited: Mapping[str, bytes]) -> None:
    if SCHEDULE_FILE in edited or os.path.isdir(folder):
        return
    message, hint = "there is no such folder", "give the folder that holds schedule.prototxt"
    if os.path.isfile(folder):
        message, hint = "this is a file, and a schedule is a folder", f"give {os.path.dirname(folder) or '.'}"
    raise RecipeError([Problem(message, Span(folder, 1, 1), hint=hint)])


def _text(folder: str, edited: Mapping[str, bytes], name: str, most: int = LARGEST) -> Text:
    """The bytes of a file, one more than `most` at most."""
    typed = edited.get(os.path.normpath(name))
    return typed[: most + 1] if typed is not None else _bytes(os.path.join(folder, name), most + 1)


def _bytes(path: str, most: int) -> bytes | Unreadable:
    try:
        # Opening a FIFO would wait for a writer, and reading a device may never end.
        if not stat.S_ISREG(os.stat(path).st_mode):
            return Unreadable("this is not a regular file")
        with open(path, "rb") as file:
            return file.read(most)
    except (FileNotFoundError, NotADirectoryError):
        return MISSING
    except PermissionError:
        return Unreadable("no permission to read it")
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        return Unreadable(f"can't be read ({error.strerror if isinstance(error, OSError) else error})")


def _records(path: str) -> int:
    """The records of the LMDB in a folder, by its two meta pages; or the images in its class folders. DataError, UsageError,
    PermissionDenied."""
    if is_class_folder(path):
        try:
            return len(small(path).names)
        except DataError as error:  # it is here, so that its own hint helps, not that for an LMDB elsewhere
            raise UsageError(error.message, error.hint) from None
    found = check_file(path)
    if not found:
        raise DataError(f"{path}: the LMDB is empty")
    return found


def _found(folder: str, path: str, net: str) -> str:
    """The absolute path of what a path in a net of Caffe's means: from the net's folder, from the schedule's, or from one above either, as
    Caffe is started in a folder above. '' if nothing is there."""
    if not path or "\0" in path:
        return ""
    starts = [os.path.dirname(os.path.abspath(net)), os.path.abspath(folder)]
    order = [*starts, *(up for start in starts for up in upward(start))]
    return next((place for start in order if os.path.exists(place := os.path.normpath(os.path.join(start, path)))), "")


def first_record(path: str) -> First | None:
    """The shape of the first record of the LMDB in a folder; None where it can't be read, which is reported when it is opened."""
    with suppress(StagerunError, DecodeError):
        datum = caffe_pb2.Datum.FromString(first_value(path))
        known = datum.channels in (1, 3) and not datum.encoded
        return First(datum.channels, (datum.height, datum.width)) if known else First(None, None)
    return None


def _content(path: str) -> bytes | None:
    """The bytes of a file that a net names, as a mean image."""
    data = _bytes(path, LARGEST_MEAN)
    return None if isinstance(data, Unreadable) else data


# -- a new folder


def refuse_existing(out: str) -> None:
    """UsageError if `out` is empty, or something other than an empty folder is there already."""
    if not out:
        raise UsageError("`--out` is empty", "give a new folder: `--out solvers/NAME`")
    try:
        if os.path.lexists(out) and not (os.path.isdir(out) and not os.listdir(out)):
            raise UsageError(f"{out} is there already", "give a new folder: nothing is overwritten")
    except OSError as error:
        raise PermissionDenied(f"{out}: may not be read", "give another folder") from error


def write_folder(out: str, texts: Mapping[str, str]) -> None:
    """Writes a folder whole or not at all: made beside its place, then renamed. UsageError if something is there, StorageError,
    PermissionDenied."""
    refuse_existing(out)
    target = Path(os.path.abspath(out))
    with writing(out, "check the disk and the path, or give a folder that you may write to"):
        target.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as aside:
            for name, text in texts.items():
                path = Path(aside, target.name, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                write_whole(path, text.encode())
            # Takes the place of an empty folder; fails if something came into it meanwhile.
            os.rename(Path(aside, target.name), target)
