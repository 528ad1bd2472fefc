"""Processes above and below this one: for ranks that Open MPI, MPICH or Slurm has started the launcher, the nearest ancestor that
is one; for who starts a command, those that can stop it in order."""

import os
import signal
import threading
import time
from collections.abc import Sequence

from stagerun.system.process import Process, all_living, living, words

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
# Of these, those that hand SIGUSR1 on to all ranks and wait; SIGTERM ends some of them within a second.
_TAKES_USR1 = ("mpirun", "mpiexec", "orterun", "prterun", "srun")
# Programs that a signal ends, and not what they have started.
_SHELLS = {"bash", "sh", "dash", "zsh", "ksh", "mksh", "fish", "tcsh", "csh", "busybox", "time"}
_LOOK_EVERY_S = 0.5
_MOST_ANCESTORS = 64


def launcher() -> Process | None:
    """None where no ancestor that this process can see is one: in a container, say."""
    pid = os.getppid()
    for _ in range(_MOST_ANCESTORS):
        found = living(pid)
        if found is None or pid <= 1:
            return None
        if found.name.startswith(_NAMES):
            return found
        pid = found.parent
    return None


def die_with(found: Process) -> None:
    """Has a thread kill this process when that one is gone. The kernel's own way (PR_SET_PDEATHSIG) goes by the thread that
    started it, and by the parent alone, which may be a shell between the two.

    Open MPI's mpirun, killed by SIGKILL, leaves the ranks of its own host running.
    """

    def watch() -> None:
        while (now := living(found.pid)) is not None and now.start == found.start:
            time.sleep(_LOOK_EVERY_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="launcher", daemon=True).start()


def to_be_told(pid: int) -> tuple[Process, signal.Signals] | None:
    """What to send a signal to, `pid` or the nearest one below it, so that all ranks save, and by which signal: an MPI's launcher or srun, or
    else whatever has `stagerun run` among its words, as torchrun has. None if there is neither: a script that comes to it later.
    """
    found = [kin for kin in _family(pid) if not _is_shell(kin.pid)]
    if launchers := [kin for kin in found if kin.name.startswith(_TAKES_USR1)]:
        return launchers[0], signal.SIGUSR1
    return next(((kin, signal.SIGTERM) for kin in found if words_of_run(words(kin.pid)) is not None), None)


def words_of_run(command: Sequence[str]) -> list[str] | None:
    """The words after `stagerun run` or `python -m stagerun run`; None without these."""
    for at in range(len(command) - 1):
        if os.path.basename(command[at]) == "stagerun" and command[at + 1] == "run":
            return list(command[at + 2 :])
    return None


def _family(pid: int) -> list[Process]:
    """The process and those below it, the nearest first, the oldest of several first."""
    below: dict[int, list[Process]] = {}
    for process in all_living():
        below.setdefault(process.parent, []).append(process)
    first = living(pid)
    found = [first] if first is not None else []
    for process in found:  # which grows meanwhile
        found += sorted(below.get(process.pid, ()), key=lambda child: child.start)
    return found


def _is_shell(pid: int) -> bool:
    """By what runs: a script has its own name, and may have that of a launcher."""
    try:
        program = os.path.basename(os.readlink(f"/proc/{pid}/exe"))
    except OSError:
        return False
    return program.rstrip("-.0123456789") in _SHELLS


def bound_note(local_size: int, launcher_name: str) -> str:
    """What to say to the user where the launcher has bound this worker to fewer processors than its share of those that the
    launcher itself may use; '' where it has not. Open MPI binds each rank to one core where there are one or two, and says
    nothing."""
    found = launcher()
    if found is None:
        return ""
    try:
        mine, theirs = len(os.sched_getaffinity(0)), len(os.sched_getaffinity(found.pid))
    except OSError:
        return ""
    # srun's daemon may use the whole node, the job only what it has of it.
    if launcher_name == "srun" and (said := os.environ.get("SLURM_CPUS_ON_NODE", "")).isdecimal():
        theirs = min(theirs, int(said))
    share = max(1, theirs // local_size)
    if mine >= share:
        return ""
    return (
        f"note: {launcher_name} has bound each worker to {mine} of the {share} processors that are its share; "
        f"{'`srun --cpu-bind=none`' if launcher_name == 'srun' else '`mpirun --bind-to none`'} gives it all of them"
    )
