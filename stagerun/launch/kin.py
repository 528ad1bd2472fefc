"""The launcher as a process: the nearest ancestor that is one. For ranks that Open MPI, MPICH or Slurm has started."""

import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

# Beginnings of their names as the kernel has them, of 15 characters at most: mpirun.openmpi, hydra_pmi_proxy.
_NAMES = (
    "mpirun",
    "mpiexec",
    "orterun",
    "orted",
    "prterun",
    "prted",
    "prte",
    "hydra_pmi_proxy",
    "slurmstepd",
    "mpispawn",
)
_LOOK_EVERY_S = 0.5
_MOST_ANCESTORS = 64


@dataclass(frozen=True, slots=True)
class Ancestor:
    """`began`: in the kernel's ticks since its start; with it a number that was given to another process is told apart."""

    pid: int
    name: str
    parent: int
    began: str


def launcher() -> Ancestor | None:
    """None where no ancestor that this process can see is one: in a container, say."""
    pid = os.getppid()
    for _ in range(_MOST_ANCESTORS):
        found = _look(pid)
        if found is None or pid <= 1:
            return None
        if found.name.startswith(_NAMES):
            return found
        pid = found.parent
    return None


def die_with(found: Ancestor) -> None:
    """Has a thread kill this process when that one is gone. The kernel's own way (PR_SET_PDEATHSIG) goes by the thread that
    started it, and by the parent alone, which may be a shell between the two.

    Open MPI's mpirun, killed by SIGKILL, leaves the ranks of its own host running.
    """

    def watch() -> None:
        while (now := _look(found.pid)) is not None and now.began == found.began:
            time.sleep(_LOOK_EVERY_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="launcher", daemon=True).start()


def _look(pid: int) -> Ancestor | None:
    """None for one that is gone, or has ended and is waited for."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    name, _, rest = text.partition("(")[2].rpartition(")")
    words = rest.split()
    return None if words[0] in "ZX" else Ancestor(pid, name, int(words[1]), words[19])


def bound_note(local_size: int, launcher_name: str) -> str:
    """What to tell the user where the launcher has bound this worker to fewer processors than its share of those that the
    launcher itself may use; '' where it has not. Open MPI binds each rank to one core where there are one or two, and says
    nothing.
    """
    found = launcher()
    if found is None:
        return ""
    try:
        mine, theirs = len(os.sched_getaffinity(0)), len(os.sched_getaffinity(found.pid))
    except OSError:
        return ""
    share = max(1, theirs // local_size)
    if mine >= share:
        return ""
    advice = {
        "Open MPI's mpirun": "`mpirun --bind-to none`",
        "srun": f"`srun --cpus-per-task={share}` or `--cpu-bind=none`",
    }.get(launcher_name, "its option against binding")
    return (
        f"note: {launcher_name} has bound each worker to {mine} of the {share} processors that are its share, "
        f"so that it computes with {mine} thread{'s' * (mine > 1)}; {advice} gives it all of them"
    )
