"""The launcher of a rank that Open MPI, MPICH or Slurm has started: its nearest ancestor that is one."""

import os
import signal
import threading
import time
from contextlib import suppress

import psutil

from stagerun.system.process import lives

# Beginnings of their names: mpirun.openmpi, hydra_pmi_proxy.
_NAMES = ("mpirun", "mpiexec", "orterun", "orted", "prte", "hydra_pmi_proxy", "slurmstepd", "mpispawn")
_LOOK_EVERY_S = 0.5


def launcher() -> psutil.Process | None:
    """None where no ancestor that this process can see is one: in a container, say."""
    with suppress(psutil.Error):
        return next((found for found in psutil.Process().parents() if found.name().startswith(_NAMES)), None)
    return None


def die_with(found: psutil.Process) -> None:
    """Has a thread kill this process when that one is gone. The kernel's own way (PR_SET_PDEATHSIG) goes by the thread that
    started it, and by the parent alone, which may be a shell between the two.

    Open MPI's mpirun, killed by SIGKILL, leaves the ranks of its own host running.
    """

    def watch() -> None:
        while lives(found):
            time.sleep(_LOOK_EVERY_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="launcher", daemon=True).start()


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
