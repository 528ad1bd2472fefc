"""Processes, as /proc shows them: which one a number means, and whether it lives; and how a process starts one that doesn't outlive it."""

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stagerun.system.host import host_name

_PR_SET_PDEATHSIG = 1
# As `python -m`, but without the current folder in sys.path, which it would put first there.
_RUN = "import runpy, sys; del sys.path[:sys.path[:1] == ['']]; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"


@dataclass(frozen=True, slots=True)
class Process:
    """A line of /proc/PID/stat (proc_pid_stat(5)): `name` is the kernel's, of 15 characters at most, `state` its letter, `start` in clock
    ticks since the boot. `start` distinguishes a process from a later one of the same number."""

    pid: int
    name: str
    state: str
    parent: int
    start: int


def look(pid: int) -> Process | None:
    """None if the process, or /proc, isn't there. A process that has ended and was not waited for yet is found, in state Z."""
    try:
        line = Path(f"/proc/{pid}/stat").read_bytes().decode(errors="replace")
    except OSError:
        return None
    name, _, rest = line.partition("(")[2].rpartition(")")  # the name may hold spaces and brackets
    fields = rest.split()
    return Process(pid, name, fields[0], int(fields[1]), int(fields[19])) if len(fields) > 19 else None


def living(pid: int) -> Process | None:
    """As `look`; None for a zombie, too: all that it held is given up, once its last thread has ended."""
    found = look(pid)
    if found is None or found.state == "X" or (found.state == "Z" and _threads(pid) < 2):
        return None
    return found


def _threads(pid: int) -> int:
    """A killed process is a zombie as soon as its first thread has ended, while another may still write to a disk."""
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0


def all_living() -> Iterator[Process]:
    """All processes that this one can see."""
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (found := living(int(entry))) is not None:
            yield found


def words(pid: int, file: str = "cmdline") -> list[str]:
    """A process's command, or with `environ` the environment that it was started with; [] if it is gone or another user's."""
    try:
        return Path(f"/proc/{pid}/{file}").read_bytes().decode(errors="surrogateescape").split("\0")
    except OSError:
        return []


def boot_id() -> str:
    """Another one whenever a machine was started; the same in all its containers. '' where the kernel doesn't say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class Identity:
    """A process among those of all hosts and boots. `boot` is `boot_id`; `namespace` the kernel's name for that of its process number;
    `born` is Process.start."""

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
        found = living(self.pid)
        return found is not None and found.start == self.born


def this_process() -> Identity:
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:  # no Linux, or a sandbox that hides it
        namespace = ""
    found = look(os.getpid())
    return Identity(host_name(), boot_id(), namespace, os.getpid(), found.start if found else 0)


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
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_PDEATHSIG): {os.strerror(number)}")
