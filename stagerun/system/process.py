"""Processes: their life, their identity beyond a number, and children that die with their parent."""

import ctypes
import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stagerun.system.host import host_name

if TYPE_CHECKING:
    import psutil

_PR_SET_PDEATHSIG = 1
# Like `python -m`, without the current folder at the front of sys.path.
_RUN = "import runpy, sys; del sys.path[:sys.path[:1] == ['']]; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"


def lives(process: "psutil.Process") -> bool:
    """Return whether a process lives. A killed process is a zombie as soon as its first thread has ended, but holds its files until its last
    thread, perhaps writing to a disk, has ended."""
    import psutil  # as in `system.host`

    with suppress(psutil.Error):
        return process.is_running() and (process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1)
    return False


def living(pid: int) -> "psutil.Process | None":
    """Return the process of this number, if it lives."""
    import psutil

    with suppress(psutil.Error, ValueError):
        process = psutil.Process(pid)
        return process if lives(process) else None
    return None


def stat(pid: int) -> list[str]:
    """Return the fields of proc_pid_stat(5) from the state's letter on; [] without the process or /proc."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return []


def born(pid: int) -> int:
    """Return when a process began, in clock ticks since the boot, which distinguishes it from a later one of the same number; 0 if unknown."""
    fields = stat(pid)
    return int(fields[19]) if fields else 0


def boot_id() -> str:
    """Return the kernel's id of this boot, shared by all containers; '' if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class Identity:
    """A process among all hosts and boots. `boot`: `boot_id`; `namespace`: of process numbers, by the kernel."""

    host: str
    boot: str
    namespace: str
    pid: int
    born: int

    def same_machine(self, other: "Identity") -> bool:
        """Return whether both run, or ran, under one boot of one kernel, in one namespace of process numbers. A host's name may be ambiguous,
        and outlives a reboot."""
        machine, others = ((p.host, p.boot, p.namespace) for p in (self, other))
        return bool(self.boot) and machine == others

    def alive(self) -> bool:
        """Return whether the process lives, on the same machine."""
        return living(self.pid) is not None and born(self.pid) == self.born


def this_process() -> Identity:
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:  # no Linux, or a sandbox that hides it
        namespace = ""
    return Identity(host_name(), boot_id(), namespace, os.getpid(), born(os.getpid()))


def program(module: str, any_version: bool = False) -> list[str]:
    """Return the interpreter's arguments that run a module of this package; with `any_version` for another host's interpreter.

    The current folder has the user's files, and their `selectors.py` must not be imported. It is searched only if this process, started by
    `python -m` (or `-c`) in it, searches it: the package itself may be there.
    """
    by_module = getattr(sys.modules["__main__"], "__spec__", None) is not None
    # A process of _RUN or -P is by module, too, but its path begins differently.
    if "" in sys.path or (by_module and sys.path[:1] == [os.getcwd()]):
        return ["-m", module]
    if sys.version_info >= (3, 11) and not any_version:
        return ["-P", "-m", module]
    return ["-c", _RUN.format(module=module)]


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Make the kernel send this process the signal when the thread that started it ends. OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_PDEATHSIG): {os.strerror(number)}")
