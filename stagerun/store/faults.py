"""Faults on demand, to see for oneself what becomes of a run: the variable STAGERUN_FAULT.

    STAGERUN_FAULT=kill@17 stagerun run DIR      rank 0 kills itself (SIGKILL) at the 17th call of its disk
    STAGERUN_FAULT=ENOSPC@17 ...                 the 17th call fails: no space left on the device
    STAGERUN_FAULT=ENOSPC@17+ ...                from then on every call does that needs space
    STAGERUN_FAULT=EIO@17-90 ...                 calls 17 to 90 do, as when a server is away for a while

Rank 0 alone reads and writes the output folder, through `Disk`; each method of it and of its `File` is a call, counted from 1
in the life of the process. A write that a fault meets puts half of its bytes down. What fails from a call on: `ENOSPC` and
`EDQUOT` whatever needs space, `EROFS` whatever changes anything, `EIO` and `ESTALE` everything.

The lock, the beats of the lease, log.jsonl and reading results are not part of it, and without the variable none of this is in the way.
"""

import errno
import os
import re
import signal
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from stagerun.base.errors import UsageError, nearest
from stagerun.store.disk import Disk, File, LocalDisk

VARIABLE = "STAGERUN_FAULT"

KILL = "kill"

_SPACE = frozenset({"mkdir", "create", "write", "sync", "link"})
_CHANGES = _SPACE | {"sync_folder", "rename", "unlink", "rmdir"}

# What fails from a call on, by the name of the error; None: everything.
ERRORS: Mapping[str, frozenset[str] | None] = {
    "ENOSPC": _SPACE,
    "EDQUOT": _SPACE,
    "EROFS": _CHANGES,
    "EIO": None,
    "ESTALE": None,
}

_FAULT = re.compile(
    r"(?P<what>[A-Za-z]+)@(?P<call>[1-9][0-9]{0,17})(?:(?P<on>\+)|-(?P<last>[1-9][0-9]{0,17}))?", re.ASCII
)


@dataclass(frozen=True, slots=True)
class Fault:
    """`what` (kill, or one of ERRORS) at call number `call`, and, with `on`, at those after it, with `last` up to that."""

    what: str
    call: int
    on: bool = False
    last: int | None = None

    def __str__(self) -> str:
        return f"{self.what}@{self.call}" + (f"-{self.last}" if self.last is not None else "+" * self.on)

    def meets(self, number: int, name: str) -> bool:
        if not self.on and self.last is None:
            return number == self.call
        kinds = ERRORS[self.what]
        within = number >= self.call and (self.last is None or number <= self.last)
        return within and (kinds is None or name in kinds)


def planned_fault(environment: Mapping[str, str] = os.environ) -> Fault | None:
    """What STAGERUN_FAULT says; None where it isn't set. UsageError for a mistake in it."""
    said = environment.get(VARIABLE, "")
    if not said:
        return None
    match = _FAULT.fullmatch(said)
    known = (KILL, *ERRORS)
    usual = (
        f"{VARIABLE}=kill@17, or ENOSPC@17, or ENOSPC@17+ for every call from then on, or ENOSPC@17-90; known are "
        f"{', '.join(known)}"
    )
    if match is None:
        raise UsageError(f"{VARIABLE}={said} is not a fault", usual)
    last = int(match["last"]) if match["last"] else None
    fault = Fault(match["what"], int(match["call"]), bool(match["on"]), last)
    if fault.what not in known:
        raise UsageError(f"{VARIABLE}={said}: no fault is called `{fault.what}`", nearest(fault.what, known) or usual)
    if last is not None and last < fault.call:
        raise UsageError(f"{VARIABLE}={said} ends before it begins", usual)
    if (fault.on or last is not None) and fault.what == KILL:
        raise UsageError(f"{VARIABLE}={said}: a process is killed once", f"write {fault.what}@{fault.call}")
    return fault


class FaultyDisk:
    """A disk with a fault to come. Any thread may call it."""

    def __init__(self, disk: Disk, fault: Fault) -> None:
        self.disk, self.fault = disk, fault
        self.calls = 0
        self._met = False
        self._one = threading.Lock()

    def announced(self) -> str:
        doing = "this process kills itself" if self.fault.what == KILL else "the disk fails"
        return f"{VARIABLE}={self.fault}: {doing} at call {self.fault.call} of the disk, on purpose"

    def missed(self) -> str:
        """What to say at the end of a run; '' if the fault came."""
        if self._met:
            return ""
        return f"{VARIABLE}={self.fault}: it did not come, the disk was called {self.calls} times"

    def due(self, name: str) -> bool:
        """Counts a call. Whether the fault is for it; said on stderr the first time."""
        with self._one:
            self.calls += 1
            number = self.calls
            due, first = self.fault.meets(number, name), not self._met
            self._met = self._met or due
        if due and first:
            # In one call, and past every buffer: it may be the last that this process does.
            with suppress(OSError):
                os.write(2, f"{VARIABLE}: {self.fault.what} at call {number} of the disk, {name}\n".encode())
        return due

    def fail(self, path: Path | None = None) -> None:
        """The fault itself. OSError, or the end of this process."""
        if self.fault.what == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        code: int = getattr(errno, self.fault.what)
        raise OSError(code, os.strerror(code), *([str(path)] if path else []))

    def _point(self, name: str, path: Path) -> None:
        if self.due(name):
            self.fail(path)

    def mkdir(self, path: Path) -> None:
        self._point("mkdir", path)
        self.disk.mkdir(path)

    def create(self, path: Path) -> File:
        self._point("create", path)
        return FaultyFile(self, self.disk.create(path))

    def sync_folder(self, path: Path) -> None:
        self._point("sync_folder", path)
        self.disk.sync_folder(path)

    def rename(self, source: Path, target: Path) -> None:
        self._point("rename", source)
        self.disk.rename(source, target)

    def link(self, source: Path, target: Path) -> None:
        self._point("link", source)
        self.disk.link(source, target)

    def names(self, path: Path) -> list[str]:
        self._point("names", path)
        return self.disk.names(path)

    def size(self, path: Path) -> int:
        self._point("size", path)
        return self.disk.size(path)

    def read(self, path: Path, limit: int) -> bytes:
        self._point("read", path)
        return self.disk.read(path, limit)

    def digest(self, path: Path, limit: int) -> tuple[int, str]:
        self._point("digest", path)
        return self.disk.digest(path, limit)

    def unlink(self, path: Path) -> None:
        self._point("unlink", path)
        self.disk.unlink(path)

    def rmdir(self, path: Path) -> None:
        self._point("rmdir", path)
        self.disk.rmdir(path)

    def free(self, path: Path) -> int:
        self._point("free", path)
        return self.disk.free(path)


class FaultyFile:
    def __init__(self, disk: FaultyDisk, file: File) -> None:
        self._disk, self._file = disk, file

    def write(self, data: memoryview) -> None:
        if self._disk.due("write"):
            self._file.write(data[: len(data) // 2])
            self._disk.fail()
        self._file.write(data)

    def sync(self) -> None:
        if self._disk.due("sync"):
            self._disk.fail()
        self._file.sync()

    def close(self) -> None:
        due = self._disk.due("close")
        if not due or self._disk.fault.what != KILL:
            self._file.close()  # a close that fails has closed the file all the same
        if due:
            self._disk.fail()


def disk_of_run() -> Disk:
    """This machine's file system, for a run: with a fault in it where STAGERUN_FAULT asks for one. UsageError."""
    fault = planned_fault()
    return LocalDisk() if fault is None else FaultyDisk(LocalDisk(), fault)
