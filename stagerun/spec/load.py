"""A folder -> recipe.Schedule: the one place of spec that reads files."""

import os
import stat
from collections.abc import Sequence
from pathlib import Path

from stagerun import recipe
from stagerun.errors import DataError, Problem, RecipeError, Span
from stagerun.lmdb_file import check_file, class_names
from stagerun.spec.model import classes_problem
from stagerun.spec.parse import LARGEST
from stagerun.spec.resolve import SCHEDULE_FILE, Text, Unreadable, read, stage_files


def load(folder: str | Path, overrides: Sequence[str] = ()) -> recipe.Schedule:
    """The schedule in a folder, with the changes of `--set`. RecipeError with every mistake of every file, sorted by
    place; paths in it start with `folder` as it was given. Where `images` is not written, the LMDB's own count is read.
    """
    shown = os.path.normpath(folder)
    if not os.path.isdir(shown):
        raise RecipeError([_no_folder(shown)])
    texts: dict[str, Text] = {SCHEDULE_FILE: _text(shown, SCHEDULE_FILE)}
    first = texts[SCHEDULE_FILE]
    if not isinstance(first, Unreadable):
        texts |= {name: _text(shown, name) for name in stage_files(first) if name != SCHEDULE_FILE}
    return read(texts, os.path.abspath(shown), overrides, "" if shown == "." else shown, _records)


def _records(path: str) -> int:
    """The records of the LMDB in a folder, by its two meta pages. DataError, PermissionDenied."""
    found = check_file(path)
    if not found:
        raise DataError(f"{path}: the LMDB is empty")
    return found


def look_at_classes(schedule: recipe.Schedule) -> Problem | None:
    """As `classes_problem`, for the LMDBs that are on this machine."""
    paths = [source.path for source in (schedule.data.train, schedule.data.val) if source is not None]
    named = [(path, class_names(path)) for path in paths]
    return classes_problem(schedule, *max(named, key=lambda pair: len(pair[1])))


def _no_folder(shown: str) -> Problem:
    if os.path.isfile(shown):
        return Problem(
            "this is a file, and a schedule is a folder",
            Span(shown, 1, 1),
            hint=f"give {os.path.dirname(shown) or '.'}",
        )
    hint = "give the folder that holds schedule.prototxt"
    return Problem("there is no such folder", Span(shown, 1, 1), hint=hint)


def _text(folder: str, name: str) -> Text:
    """The bytes of a file, one more than LARGEST at most."""
    path = os.path.join(folder, name)
    try:
        # Opening a FIFO would wait for a writer, and reading a device may never end.
        if not stat.S_ISREG(os.stat(path).st_mode):
            return Unreadable("this is no regular file")
        with open(path, "rb") as file:
            return file.read(LARGEST + 1)
    except FileNotFoundError:
        return Unreadable("there is no such file")
    except PermissionError:
        return Unreadable("no permission to read it")
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        return Unreadable(f"can't be read ({error.strerror if isinstance(error, OSError) else error})")
