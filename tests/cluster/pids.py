"""Processes, by number and start time, so that nobody else's is ever meant; and those of a PID namespace."""

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

DYING = ("setpriv", "--pdeathsig", "KILL")  # before a command that is to die with this process
_STARTED: list[subprocess.Popen[bytes]] = []


def keep(process: subprocess.Popen[bytes]) -> None:
    """It goes on; `end` sees to its remains."""
    _STARTED.append(process)


def started(pid: int) -> int:
    """When it was started, in ticks since the machine was; 0 if it is gone."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if state in "ZX" else int(rest[18])


def end(pid: int, ticks: int, wait_s: float = 10.0) -> None:
    """SIGKILL, if it is still the one that was started then; returns when it is gone."""
    until = time.monotonic() + wait_s
    with suppress(ProcessLookupError):
        if ticks and started(pid) == ticks:
            os.kill(pid, signal.SIGKILL)
    while ticks and started(pid) == ticks:
        assert time.monotonic() < until, f"process {pid} outlives SIGKILL"
        time.sleep(0.01)
    for process in _STARTED:
        process.poll()


def children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def namespace(pid: int, kind: str = "pid") -> str:
    """What tells its namespace from others; '' if it is gone."""
    try:
        return os.readlink(f"/proc/{pid}/ns/{kind}")
    except OSError:
        return ""


def within(pid: int) -> list[int]:
    """All living processes of the PID namespace whose first process is `pid`, that one included."""
    own = namespace(pid)
    numbers = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return sorted(number for number in numbers if own and namespace(number) == own and started(number))


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
