"""The folder that our launcher and its workers share: that all are to stop, and how each worker ended.

Files of a few bytes that appear whole, by a rename: `stop` and `RANK.json`.
"""

import json
import os
import shutil
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from stagerun.base.errors import ExitCode
from stagerun.system.files import write_whole
from stagerun.system.process import living

REPORT_DIR = "STAGERUN_REPORT_DIR"
LAUNCHER_PID = "STAGERUN_LAUNCHER_PID"


@dataclass(frozen=True, slots=True)
class Report:
    """How a worker ended. `text` is what it would have said to the user."""

    rank: int
    code: int
    text: str


def folder() -> Path | None:
    """None when no launcher of ours has started this process."""
    name = os.environ.get(REPORT_DIR)
    return None if name is None else Path(name)


def remove_left_folder() -> None:
    """Removes the folder of a launcher that was killed, and can't any more."""
    shared, launcher = folder(), os.environ.get(LAUNCHER_PID)
    if shared is not None and launcher is not None and living(int(launcher)) is None:
        shutil.rmtree(shared, ignore_errors=True)


def report(rank: int, code: int, text: str) -> bool:
    """Leaves a worker's end for the launcher. False when no launcher of ours waits for it: the terminal gets it instead."""
    shared = folder()
    return shared is not None and leave(shared / f"{rank}.json", {"code": code, "text": text})


def reports(shared: Path, nproc: int, first: int = 0) -> list[Report]:
    """Those of ranks `first` .. `first` + `nproc` - 1."""
    found = []
    for rank in range(first, first + nproc):
        with suppress(OSError, ValueError, KeyError):  # killed before it wrote
            data = json.loads((shared / f"{rank}.json").read_text())
            found.append(Report(rank, data["code"], data["text"]))
    return found


def another_ended(rank: int) -> bool:
    """Whether a worker of this launch other than this one has left its report."""
    shared = folder()
    return shared is not None and any(file.stem != str(rank) for file in shared.glob("*.json"))


def asked() -> tuple[signal.Signals, float] | None:
    """The request to stop that the launcher got, if any, and its time by time.monotonic(), which all processes of a machine read alike."""
    with suppress(OSError):
        if (shared := folder()) is not None:
            number, at = json.loads((shared / "stop").read_text())
            return signal.Signals(number), at
    return None


def nothing_started(code: int) -> str:
    """What a process says that is asked to stop at its beginning, and ends with `code`."""
    if code == ExitCode.SAVED:
        return "stopped before anything was started; run the same command again"
    return "interrupted before anything was started"


def leave(path: Path, value: object) -> bool:
    """Writes the whole file, or nothing: False on a full disk, or where the launcher is gone, and its folder with it."""
    with suppress(OSError):
        write_whole(path, json.dumps(value).encode(), sync=False)
        return True
    return False
