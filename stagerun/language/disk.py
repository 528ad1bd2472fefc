"""The part of the language that reads and writes files: a schedule from a folder, a new folder from texts, completions of names."""

import os
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError

from stagerun.base import recipe
from stagerun.base.errors import DataError, PermissionDenied, Problem, RecipeError, Span, StagerunError, UsageError
from stagerun.language import labels, tree
from stagerun.language.code import MISSING, Text, Unreadable
from stagerun.language.nets import Files, First
from stagerun.language.parse import LARGEST
from stagerun.language.proto import caffe_pb2
from stagerun.language.resolve import SCHEDULE_FILE, Folder, stage_nodes
from stagerun.language.stages import names_of
from stagerun.language.tree import SCHEDULE, is_message
from stagerun.language.values import field_of
from stagerun.system.files import upward, write_whole, writing
from stagerun.system.image_folder import is_class_folder, small
from stagerun.system.image_sets import first_value
from stagerun.system.lmdb_file import check_file

LARGEST_MEAN = 64_000_000  # bytes of a mean image
NOT_SAVED: Mapping[str, bytes] = {}


def load(folder: str | Path, overrides: Sequence[str] = (), edited: Mapping[str, bytes] = NOT_SAVED) -> recipe.Schedule:
    """Read the schedule in a folder, with the changes of `--set`. RecipeError with every mistake of every file, sorted
    by position; its paths start with `folder` as written. A missing `images` is counted in the LMDB. `edited`: unsaved
    texts of an editor by their paths below the folder; they override the files on disk."""
    shown = os.path.normpath(folder)
    _require_folder(shown, edited)
    text = partial(_text, shown, edited)
    nets = Files(text, partial(_find, shown), first_record, _content)
    prefix = "" if shown == "." else shown
    read_labels = partial(text, most=labels.MOST)
    return Folder(text, os.path.abspath(shown), prefix, _records, nets, read_labels).schedule(overrides)


def files_in(folder: str, edited: Mapping[str, bytes] = NOT_SAVED) -> dict[str, Text]:
    """Return schedule.prototxt and the files of its stages: their bytes, or why they can't be read, except missing files that no stage
    needs. RecipeError if the folder is missing. `edited`: as in `load`."""
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
    message, hint = "no such folder", "give the folder that holds schedule.prototxt"
    if os.path.isfile(folder):
        message, hint = "this is a file, and a schedule is a folder", f"give {os.path.dirname(folder) or '.'}"
    raise RecipeError([Problem(message, Span(folder, 1, 1), hint=hint)])


def _text(folder: str, edited: Mapping[str, bytes], name: str, most: int = LARGEST) -> Text:
    """Return the bytes of a file, one more than `most` at most."""
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
    """Count the records of the LMDB in a folder, by its two meta pages; or the images in its class folders. DataError, UsageError,
    PermissionDenied."""
    if is_class_folder(path):
        try:
            return len(small(path).names)
        except DataError as error:  # the folder exists: a hint about LMDBs on another machine would mislead
            raise UsageError(error.message, error.hint) from None
    number = check_file(path)
    if not number:
        raise DataError(f"{path}: the LMDB is empty")
    return number


def _find(folder: str, path: str, net: str) -> str:
    """Return the absolute path that a path in a Caffe net means: from the net's folder, the schedule's, or one above either, where Caffe was
    started; '' if it doesn't exist."""
    if not path or "\0" in path:
        return ""
    starts = [os.path.dirname(os.path.abspath(net)), os.path.abspath(folder)]
    order = [*starts, *(up for start in starts for up in upward(start))]
    candidates = (os.path.normpath(os.path.join(start, path)) for start in order)
    return next(filter(os.path.exists, candidates), "")


def first_record(path: str) -> First | None:
    """Return the shape of the first record of the LMDB in a folder; None if unreadable, which is reported when it is opened."""
    with suppress(StagerunError, DecodeError):
        datum = caffe_pb2.Datum.FromString(first_value(path))
        raw = datum.channels in (1, 3) and not datum.encoded
        return First(datum.channels, (datum.height, datum.width)) if raw else First(None, None)
    return None


def _content(path: str) -> bytes | None:
    """Return the bytes of a file that a net names, such as a mean image."""
    data = _bytes(path, LARGEST_MEAN)
    return None if isinstance(data, Unreadable) else data


# -- a new folder


def refuse_existing(out: str) -> None:
    """Raise UsageError if `out` is empty, or exists and isn't an empty folder."""
    if not out:
        raise UsageError("`--out` is empty", "give a new folder: `--out solvers/NAME`")
    try:
        if os.path.lexists(out) and not (os.path.isdir(out) and not os.listdir(out)):
            raise UsageError(f"{out} already exists", "give a new folder: nothing is overwritten")
    except OSError as error:
        raise PermissionDenied(f"{out}: may not be read", "give another folder") from error


def write_folder(out: str, texts: Mapping[str, str]) -> None:
    """Write a folder whole or not at all: made next to `out`, then renamed. UsageError if `out` exists, StorageError, PermissionDenied."""
    refuse_existing(out)
    target = Path(os.path.abspath(out))
    with writing(out, "check the disk and the path, or give a folder that you may write to"):
        target.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as aside:
            for name, text in texts.items():
                path = Path(aside, target.name, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                write_whole(path, text.encode())
            # Replaces an empty folder; fails if something was added to it meanwhile.
            os.rename(Path(aside, target.name), target)


# -- completions of stages and fields in a shell or an editor: `--only STAGE`, `--set STAGE.FIELD=VALUE`


def words(folder: str, form: str, word: str) -> list[str]:
    """Return the completions of `word`. `form`: a stage of the schedule in a folder, or a stage's field. An incomplete name ends with `.`, a
    complete one with `=` if `form` has it."""
    if "." not in form and "NAME" not in form:
        return [name for name in stage_names(folder) if name.startswith(word)]
    *path, last = word.split(".")
    names = [] if path else [f"{name}." for name in stage_names(folder)]
    kind: Descriptor | None = SCHEDULE
    if path:
        full = path if path[0] in SCHEDULE.fields_by_name else ["solver", *path[1:]]
        holder = field_of(".".join(full))
        kind = holder.message_type if holder is not None else None
    end = "=" if "=" in form else ""
    for field in tree.fields(kind) if kind is not None else ():
        # Fields inside a list of messages can't be set one by one.
        names.append(field.name + (end if not is_message(field) or field.is_repeated else "."))
    before = word.removesuffix(last)
    return [before + name for name in names if name.startswith(last)]


def stage_names(folder: str) -> list[str]:
    """Return the stages of a schedule, as far as it can be read, and the names of groups."""
    try:
        text = files_in(folder)[SCHEDULE_FILE]
    except RecipeError:
        return []
    return names_of(stage_nodes(text))
