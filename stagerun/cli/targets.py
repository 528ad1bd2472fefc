"""Which kind of folder a `stagerun data` command was given: a schedule's, or an LMDB's."""

import os
from pathlib import Path

from stagerun.errors import DataError, UsageError
from stagerun.spec.resolve import SCHEDULE_FILE

_HINT = "give the folder of a schedule, or that of an LMDB"


def is_schedule(folder: str) -> bool:
    """Whether it is a schedule's; else it is an LMDB's. DataError if it isn't there, UsageError if it is neither."""
    path = Path(folder)
    if os.path.exists(path / SCHEDULE_FILE):
        return True
    if os.path.exists(path / "data.mdb"):
        return False
    if os.path.isdir(path):
        raise UsageError(
            f"{folder} is neither a schedule's folder (there is no {SCHEDULE_FILE} in it) nor an LMDB's (no data.mdb)",
            _HINT,
        )
    if os.path.lexists(path):
        raise UsageError(f"{folder}: is no folder", _HINT)
    raise DataError(f"{folder}: no such folder", _HINT)
