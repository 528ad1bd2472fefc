"""Processes: whether one lives, which one a number means, and how a process starts one that doesn't outlive it."""

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
# As `python -m`, but without the current folder in sys.path, which it would put first there.
_RUN = "import runpy, sys; del sys.path[:sys.path[:1] == ['']]; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"


def lives(process: "psutil.Process") -> bool:
    """Not a zombie either: all that it held is given up, once its last thread has ended. A killed process is one as soon as its first thread
    has ended, while another may still write to a disk."""
    import psutil  # as in `system.host`

    with suppress(psutil.Error):
        return process.is_running() and (process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1)
    return False


def living(pid: int) -> "psutil.Process | None":
    """Return the process of this number, if it lives."""
    import psutil

    with suppress(psutil.Error, ValueError):
        found = psutil.Process(pid)
        return found if lives(found) else None
    return None


def stat(pid: int) -> list[str]:
    """Return the fields of proc_pid_stat(5) from the state's letter on; [] if the process, or /proc, isn't there."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return []


def born(pid: int) -> int:
    """Return when a process began, in clock ticks since the boot, which distinguishes it from a later one of the same number; 0 if unknown."""
    fields = stat(pid)
    return int(fields[19]) if fields else 0


def boot_id() -> str:
    """Another one whenever a machine was started; the same in all its containers. '' where the kernel doesn't say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class Identity:
    """A process among those of all hosts and boots. `boot` is `boot_id`; `namespace` the kernel's name for that of its process number."""

    host: str
    boot: str
    namespace: str
    pid: int
    born: int

    def same_machine(self, other: "Identity") -> bool:
        """Whether it runs, or ran, under the very kernel that `other` does, with numbers that mean the same. A host's name alone
        says nothing: there may be two, and it outlives a reboot."""
        mine, its = ((p.host, p.boot, p.namespace) for p in (self, other))
        return bool(self.boot) and mine == its

    def alive(self) -> bool:
        """To be asked on the same machine."""
        return living(self.pid) is not None and born(self.pid) == self.born


def this_process() -> Identity:
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:  # no Linux, or a sandbox that hides it
        namespace = ""
    return Identity(host_name(), boot_id(), namespace, os.getpid(), born(os.getpid()))


def program(module: str, any_version: bool = False) -> list[str]:
    """What this interpreter is to be started with to run a module of this package as a program; with `any_version` another host's.

    The current folder is where the user's own files are, and one named `selectors.py` is not a module of ours. It is searched only where
    it is for this very process, started by `python -m` (or `-c`) in it: there the package itself may be found in no other place.
    """
    by_module = getattr(sys.modules["__main__"], "__spec__", None) is not None
    # A process that _RUN or -P has started is one by module, too, and its path begins elsewhere.
    if "" in sys.path or (by_module and sys.path[:1] == [os.getcwd()]):
        return ["-m", module]
    if sys.version_info >= (3, 11) and not any_version:
        return ["-P", "-m", module]
    return ["-c", _RUN.format(module=module)]


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Has the kernel send this process the signal when the thread that started it ends. OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_PDEATHSIG): {os.strerror(number)}")
