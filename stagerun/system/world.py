"""Who this process is in the job. A value; only the functions here look at the environment."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from stagerun.base.errors import PeerError
from stagerun.system.host import cpu_quota
from stagerun.system.nodelist import per_node

# In our launcher's folder, which is the user's alone, where all workers are of one machine: they meet in it.
STORE_FILE = "store"


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """`rank` 0 .. size-1 in the job, `local_rank` 0 .. local_size-1 on this node. `launcher`: whose word that is, as a user
    knows it; '' for a process that is alone."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launcher: str = ""


@dataclass(frozen=True, slots=True)
class _Launcher:
    """Names of variables; of several for one thing, the first that is set counts. Where `present` are not all set, or one of
    `absent` is, this launcher did not start the process."""

    name: str
    rank: str
    size: str
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]
    present: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()


def _comm_world(name: str, prefix: str) -> _Launcher:
    rank, size, local_rank, local_size = (f"{prefix}_{word}" for word in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    return _Launcher(name, rank, size, (local_rank,), (local_size,))


GIVEN = _Launcher("the environment", "RANK", "WORLD_SIZE", ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",))
_STEP, _SLURM_LOCAL = ("SLURM_STEP_ID",), ("SLURM_LOCALID",)
# In this order: within an allocation the processes of an mpirun have Slurm's variables as well, which describe the step that
# started its daemons. `srun --mpi=pmi2` sets PMI_RANK as hydra does, but says nothing of the node there.
_LAUNCHERS = (
    _comm_world("Open MPI's mpirun", "OMPI_COMM_WORLD"),
    _comm_world("MVAPICH's mpirun", "MV2_COMM_WORLD"),
    _comm_world("MVAPICH's mpirun", "MVP_COMM_WORLD"),
    _Launcher("srun", "PMI_RANK", "PMI_SIZE", _SLURM_LOCAL, (), present=_STEP, absent=("MPI_LOCALRANKID",)),
    _Launcher(
        "mpiexec.hydra",
        "PMI_RANK",
        "PMI_SIZE",
        ("MPI_LOCALRANKID", "PALS_LOCAL_RANKID"),
        ("MPI_LOCALNRANKS", "PALS_LOCAL_SIZE"),
    ),
    _Launcher("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", _SLURM_LOCAL, (), present=_STEP),
)
# Steps of Slurm with such numbers are the shells of sbatch and salloc.
_LEAST_SHELL = 0xFFFFFFF0
# Set by launchers that start several workers in one task of another launcher.
_NESTED = ("TORCHELASTIC_RUN_ID", "STAGERUN_REPORT_DIR")


def launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher has started this process as one worker of several. RANK and WORLD_SIZE count for any number, since
    torchrun is to be joined with one worker, too; a step or mpirun of one process doesn't: that one may start workers
    itself."""
    return bool(started_by(environment))


def started_by(environment: Mapping[str, str] = os.environ) -> str:
    """The launcher's name for the user; '' for none."""
    if found := _found(environment):
        return "torchrun" if found is GIVEN and "TORCHELASTIC_RUN_ID" in environment else found.name
    return ""


def rank_said(environment: Mapping[str, str] = os.environ) -> int:
    """The rank, for those who can't wait until nonsense in the environment is reported; where none can be read, 0."""
    found = _contradicting(environment) or _found(environment)
    said = environment.get(found.rank, "0") if found else "0"
    return int(said) if said.isdecimal() else 0


def default_threads(workers: int) -> int:
    """Threads of each of `workers` on this node: OMP_NUM_THREADS if it says a number, else the processors this process
    may use, no more than its control groups give it the time of, shared evenly; at least 1.
    """
    said = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()  # OpenMP takes several, by level
    if said.isascii() and said.isdigit() and int(said) > 0:
        return int(said)
    processors, quota = len(os.sched_getaffinity(0)), cpu_quota()
    return max(1, (processors if quota is None else min(processors, int(quota))) // workers)


def relayed(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether an MPI's launcher or srun takes what this process prints. Some give it a terminal of their own for that, and write
    into a file what comes out of it."""
    return _native(environment) is not None


def from_environment(environment: Mapping[str, str] = os.environ) -> World:
    """The World that the launcher's variables describe: RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, as torchrun sets
    them, or those of an MPI's launcher or of srun.

    LOCAL_RANK and LOCAL_WORLD_SIZE default to those of a job on one node. PeerError when variables contradict each other.
    """
    found = _found(environment)
    if found is None:
        return World()
    rank, size = _number(environment, found.rank), _number(environment, found.size)
    local_rank, local_size = _local(environment, found, rank, size)
    if not (0 <= rank < size and 0 <= local_rank < local_size <= size):
        raise PeerError(
            f"what {found.name} says contradicts itself: {found.rank}={rank}, {found.size}={size}, "
            f"local rank {local_rank}, {local_size} on this node"
        )
    if theirs := _contradicting(environment):
        place = f"rank {environment[theirs.rank]} of {environment[theirs.size]}"
        raise PeerError(
            f"RANK={rank} and WORLD_SIZE={size} are set, but {theirs.name} has started this process as {place}",
            "leave RANK and WORLD_SIZE out: they are found without",
        )
    return World(rank=rank, size=size, local_rank=local_rank, local_size=local_size, launcher=started_by(environment))


def _found(environment: Mapping[str, str]) -> _Launcher | None:
    if GIVEN.rank in environment and GIVEN.size in environment:
        return GIVEN
    found = _native(environment)
    # A process that is alone. One whose size can't be read is not, so that this is reported.
    return None if found is None or environment[found.size] == "1" else found


def _native(environment: Mapping[str, str]) -> _Launcher | None:
    """The launcher that started this process, whatever RANK and WORLD_SIZE say."""
    step = environment.get("SLURM_STEP_ID", "")
    shell = step.isdecimal() and int(step) >= _LEAST_SHELL
    for launcher in _LAUNCHERS:
        present = environment.keys() >= {launcher.rank, launcher.size, *launcher.present}
        if present and environment.keys().isdisjoint(launcher.absent) and not (shell and launcher.present):
            return launcher
    return None


def _local(environment: Mapping[str, str], launcher: _Launcher, rank: int, size: int) -> tuple[int, int]:
    """The rank among those of this node, and how many they are."""
    rank_name, size_name = (
        next((name for name in names if name in environment), "")
        for names in (launcher.local_rank, launcher.local_size)
    )
    if launcher is GIVEN:
        return (
            _number(environment, rank_name) if rank_name else rank,
            _number(environment, size_name) if size_name else size,
        )
    if launcher.name == "srun" and rank_name:
        return _number(environment, rank_name), _of_this_node(environment)
    if not (rank_name and size_name):
        raise PeerError(
            f"{launcher.name} has started this process as rank {rank} of {size}, but says nothing of its place on this node",
            "set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each process",
        )
    return _number(environment, rank_name), _number(environment, size_name)


def _of_this_node(environment: Mapping[str, str]) -> int:
    """Tasks of the step on this node."""
    name = next((n for n in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE") if n in environment), "")
    try:
        return per_node(environment[name])[_number(environment, "SLURM_NODEID")]
    except (KeyError, ValueError, IndexError) as error:
        raise PeerError(
            f"srun does not say how many tasks this node has: {name or 'SLURM_STEP_TASKS_PER_NODE'}="
            f"{environment.get(name, '')}, SLURM_NODEID={environment.get('SLURM_NODEID', '')}"
        ) from error


def _contradicting(environment: Mapping[str, str]) -> _Launcher | None:
    """The launcher whose word is another than RANK's and WORLD_SIZE's, where someone has set these for all processes alike: each would be the
    same worker. A size above the launcher's is no contradiction: a script starts several in each of its processes."""
    theirs = _native(environment)
    if theirs is None or _found(environment) is not GIVEN or any(name in environment for name in _NESTED):
        return None
    of, size = environment[theirs.size], environment[GIVEN.size]
    if not (of.isdecimal() and size.isdecimal()) or int(size) > int(of):
        return None
    return None if size == of and environment[GIVEN.rank] == environment[theirs.rank] else theirs


def _number(environment: Mapping[str, str], name: str) -> int:
    said = environment.get(name, "")
    try:
        return int(said)
    except ValueError as error:
        raise PeerError(f"{name} must be a whole number, not `{said}`") from error
