"""The folder that our launcher and its workers share: who lives, that all are to stop, and how each ended.

Files of a few bytes that appear whole, by a rename: `RANK.pid`, `stop`, `gone` and `RANK.json`.
"""

import contextlib
import json
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stagerun.base.errors import ExitCode, StorageError
from stagerun.system.files import why, write_whole
from stagerun.system.process import living

REPORT_DIR = "STAGERUN_REPORT_DIR"
LAUNCHER_PID = "STAGERUN_LAUNCHER_PID"


@dataclass(frozen=True, slots=True)
class Report:
    """How a worker ended. `text` is what it would have said to the user."""

    rank: int
    code: int
    text: str


@dataclass(frozen=True, slots=True)
class Asked:
    """A request to stop. `at` is of time.monotonic(), which all processes of a machine read alike."""

    signal: signal.Signals
    at: float


def nothing_started(code: int) -> str:
    """What a process says that is asked to stop at its beginning, and ends with `code`."""
    if code == ExitCode.SAVED:
        return "stopped before anything was started; run the same command again"
    return "interrupted before anything was started"


def folder(environment: Mapping[str, str] = os.environ) -> Path | None:
    """None when no launcher of ours has started this process."""
    name = environment.get(REPORT_DIR)
    return None if name is None else Path(name)


def report(rank: int, code: int, text: str) -> bool:
    """Leaves a worker's end for the launcher. False when no launcher of ours waits for it."""
    shared = folder()
    if shared is None:
        return False
    try:
        _put(shared / f"{rank}.json", json.dumps({"code": code, "text": text}))
    except OSError:
        return False  # the launcher is gone, and its folder with it: the terminal gets it instead
    return True


def reports(shared: Path, nproc: int, first: int = 0) -> list[Report]:
    """Those of ranks `first` .. `first` + `nproc` - 1."""
    found = []
    for rank in range(first, first + nproc):
        try:
            data = json.loads((shared / f"{rank}.json").read_text())
            found.append(Report(rank, data["code"], data["text"]))
        except (OSError, ValueError, KeyError):
            continue  # killed before it wrote
    return found


def another_ended(rank: int) -> bool:
    """Whether a worker of this launch other than this one has left its report."""
    shared = folder()
    return shared is not None and any(file.stem != str(rank) for file in shared.glob("*.json"))


def enter(rank: int) -> None:
    """Has the launcher's signals passed on to this process from now on; whoever enters looks at `asked` next.

    The launcher writes `stop` before it looks who is there, and a worker writes its number before it looks for `stop`: so one
    of them sees the other, however their steps fall. StorageError if it can't be written: no signal would reach this process.
    """
    shared = folder()
    if shared is None:
        return
    try:
        _put(shared / f"{rank}.pid", str(os.getpid()))
    except OSError as error:
        if os.environ.get(LAUNCHER_PID) == str(os.getppid()):
            raise unwritable(error, shared) from error
        # Otherwise the launcher is gone, and the kernel is about to end this process, too.


def unwritable(error: OSError, where: Path) -> StorageError:
    """The folder can't be made or written."""
    return StorageError(
        f"no folder for temporary files in {where}: {why(error, where)}",
        "make room there, or set TMPDIR to a folder on this machine that can be written",
    )


def asked() -> Asked | None:
    """The request to stop that the launcher got, if any."""
    shared = folder()
    if shared is None:
        return None
    try:
        number, at = (shared / "stop").read_text().split()
    except OSError:
        return None
    return Asked(signal.Signals(int(number)), float(at))


def ask(shared: Path, number: int) -> Asked:
    """Asks all workers, those that are there and those that are to come, to stop. The launcher's side."""
    request = Asked(signal.Signals(number), time.monotonic())
    with contextlib.suppress(OSError):  # a full disk: those that are there get the signal all the same
        _put(shared / "stop", f"{number} {request.at!r}")
    for file in shared.glob("*.pid"):
        with contextlib.suppress(OSError, ValueError):  # it has ended meanwhile
            found = living(int(file.read_text()))
            # A worker that has ended is reaped, and its number may be another process's by now.
            if found is not None and found.parent == os.getpid():
                os.kill(found.pid, signal.SIGTERM)
    return request


def tell_gone(shared: Path, text: str) -> None:
    """Informs the workers' monitors that a host of the job is gone, in words for the user. The launcher's side."""
    with contextlib.suppress(OSError):
        _put(shared / "gone", text)


def gone_file() -> str:
    """Where that is written; '' when no launcher of ours has started this process."""
    shared = folder()
    return "" if shared is None else str(shared / "gone")


def _put(path: Path, text: str) -> None:
    """Writes the whole file, or nothing."""
    write_whole(path, text.encode(), sync=False)
