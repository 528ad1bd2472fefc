"""The folder of a new schedule, written whole or not at all."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from stagerun.base.errors import PermissionDenied, StorageError, UsageError


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
    made = target.parent / f".{target.name}.partial-{os.getpid()}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(made, ignore_errors=True)  # of a killed one that had this process's number
        made.mkdir()
        for name, text in texts.items():
            (made / name).parent.mkdir(parents=True, exist_ok=True)
            with open(made / name, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        os.rename(made, target)  # takes the place of an empty folder; fails if something came into it meanwhile
    except PermissionError as error:
        raise PermissionDenied(f"may not write {out}", "give a folder that you may write to") from error
    except OSError as error:
        raise StorageError(f"can't write {out}: {error.strerror}", "check the disk, and the path") from error
    finally:
        shutil.rmtree(made, ignore_errors=True)
