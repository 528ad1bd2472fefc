"""OUT/log.jsonl, back to events. Reads only, takes no lock: a run may be appending meanwhile."""

import os
from dataclasses import dataclass
from pathlib import Path

from stagerun.errors import PermissionDenied, StorageError, UsageError
from stagerun.events import Event
from stagerun.logged import event_of

LOG = "log.jsonl"


@dataclass(frozen=True, slots=True)
class Log:
    """(time, event) in the order of writing; how many lines can't be read, and how many are of an event that this version
    doesn't know."""

    events: tuple[tuple[float, Event], ...]
    damaged: int = 0
    unknown: int = 0


def read_log(out: Path) -> Log:
    """The events of an output folder. A line that is not what a run writes is counted: the last one of a killed run may
    be cut short. UsageError if there is no log, PermissionDenied or StorageError if it can't be read.
    """
    path = out / LOG
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UsageError(*_no_log(out)) from error
    except PermissionError as error:
        raise PermissionDenied(f"{path} may not be read", "ask its owner for permission") from error
    except OSError as error:
        raise StorageError(f"can't read {path}: {error.strerror}", "check the disk") from error
    found: list[tuple[float, Event]] = []
    damaged = unknown = 0
    for line in data.split(b"\n"):
        if not line.strip():
            continue
        try:
            event = event_of(line)
        except ValueError:
            damaged += 1
            continue
        if event is None:
            unknown += 1
        else:
            found.append(event)
    if not found:
        raise UsageError(f"{path} holds no event of a run", "wait until the run has begun, or name another folder")
    return Log(tuple(found), damaged, unknown)


def is_schedule(folder: Path) -> bool:
    return os.path.isfile(folder / "schedule.prototxt")


def _no_log(out: Path) -> tuple[str, str]:
    """Message and hint."""
    if os.path.isfile(out):
        return (
            f"{out} is a file",
            f"name the output folder: {out.parent}" if out.name == LOG else "name an output folder",
        )
    if not os.path.exists(out):
        return f"there is no folder {out}", "name the output folder of a run: ./out/NAME, or what --out named"
    if is_schedule(out):
        return (
            f"{out} is the folder of a schedule",
            "name the output folder of its run: ./out/NAME, or what --out named",
        )
    return f"{out} has no {LOG}", "name the output folder of a run that has begun: ./out/NAME, or what --out named"
