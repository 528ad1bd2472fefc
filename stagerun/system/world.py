"""The rank of this process in its job, from a launcher's environment variables; and Slurm's short forms of lists."""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from stagerun.base.errors import PeerError
from stagerun.system.host import cpu_quota

Environment = Mapping[str, str]

# In the launcher's private folder: workers of one machine meet in this file.
STORE_FILE = "store"


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """`rank` 0 .. size-1 in the job, `local_rank` 0 .. local_size-1 on this node. `launcher`: its common name; '' for a single process."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launcher: str = ""


@dataclass(frozen=True, slots=True)
class _Launcher:
    """Names of a launcher's variables; the first set one of several counts. The launcher started this process only if all of `present` and none
    of `absent` are set."""

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


PLAIN = _Launcher("the environment", "RANK", "WORLD_SIZE", ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",))
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


def launched(environment: Environment = os.environ) -> bool:
    """Return whether a launcher started this process as one worker of several. RANK and WORLD_SIZE count even for one worker, as of torchrun;
    a step or mpirun of one process doesn't: the process may start workers."""
    return bool(started_by(environment))


def started_by(environment: Environment = os.environ) -> str:
    """Return the launcher's name; '' without one."""
    if launcher := _launcher(environment):
        return "torchrun" if launcher is PLAIN and "TORCHELASTIC_RUN_ID" in environment else launcher.name
    return ""


def rank_said(environment: Environment = os.environ) -> int:
    """Return the rank before the environment is checked; 0 if unreadable."""
    launcher = _contradicting(environment) or _launcher(environment)
    rank = environment.get(launcher.rank, "0") if launcher else "0"
    return int(rank) if rank.isdecimal() else 0


def default_threads(workers: int) -> int:
    """Return the threads of each of `workers` on this node: OMP_NUM_THREADS if it is a number, else the usable processors, limited by the quota
    of control groups, shared evenly; at least 1."""
    threads = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()  # OpenMP takes several, by level
    if threads.isascii() and threads.isdigit() and int(threads) > 0:
        return int(threads)
    processors, quota = len(os.sched_getaffinity(0)), cpu_quota()
    return max(1, (processors if quota is None else min(processors, int(quota))) // workers)


def relayed(environment: Environment = os.environ) -> bool:
    """Return whether an MPI launcher or srun relays the output of this process: some give it a terminal, and write that into a file."""
    return _native(environment) is not None


def from_environment(environment: Environment = os.environ) -> World:
    """Read the launcher's variables: RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, as torchrun sets them, or an MPI launcher's or srun's.

    LOCAL_RANK and LOCAL_WORLD_SIZE default to a job on one node. PeerError for contradicting variables.
    """
    launcher = _launcher(environment)
    if launcher is None:
        return World()
    rank, size = _number(environment, launcher.rank), _number(environment, launcher.size)
    local_rank, local_size = _local(environment, launcher, rank, size)
    if not (0 <= rank < size and 0 <= local_rank < local_size <= size):
        raise PeerError(
            f"the variables of {launcher.name} contradict each other: {launcher.rank}={rank}, {launcher.size}={size}, "
            f"local rank {local_rank}, {local_size} on this node"
        )
    if other := _contradicting(environment):
        rank_of = f"rank {environment[other.rank]} of {environment[other.size]}"
        raise PeerError(
            f"RANK={rank} and WORLD_SIZE={size} are set, but {other.name} has started this process as {rank_of}",
            "leave RANK and WORLD_SIZE out: stagerun reads the launcher's variables",
        )
    return World(rank=rank, size=size, local_rank=local_rank, local_size=local_size, launcher=started_by(environment))


def _launcher(environment: Environment) -> _Launcher | None:
    if PLAIN.rank in environment and PLAIN.size in environment:
        return PLAIN
    native = _native(environment)
    # Size 1 is a single process; an unreadable size is reported later.
    return None if native is None or environment[native.size] == "1" else native


def _native(environment: Environment) -> _Launcher | None:
    """Return the launcher of this process, regardless of RANK and WORLD_SIZE."""
    step = environment.get("SLURM_STEP_ID", "")
    shell = step.isdecimal() and int(step) >= _LEAST_SHELL
    for launcher in _LAUNCHERS:
        present = environment.keys() >= {launcher.rank, launcher.size, *launcher.present}
        if present and environment.keys().isdisjoint(launcher.absent) and not (shell and launcher.present):
            return launcher
    return None


def _local(environment: Environment, launcher: _Launcher, rank: int, size: int) -> tuple[int, int]:
    """Return the rank on this node, and the number of ranks on it."""
    rank_name, size_name = (
        next((name for name in names if name in environment), "")
        for names in (launcher.local_rank, launcher.local_size)
    )
    if launcher is PLAIN:
        return (
            _number(environment, rank_name) if rank_name else rank,
            _number(environment, size_name) if size_name else size,
        )
    if launcher.name == "srun" and rank_name:
        return _number(environment, rank_name), _of_this_node(environment)
    if not (rank_name and size_name):
        raise PeerError(
            f"{launcher.name} has started this process as rank {rank} of {size}, without a local rank",
            "set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each process",
        )
    return _number(environment, rank_name), _number(environment, size_name)


def _of_this_node(environment: Environment) -> int:
    """Return the tasks of the step on this node."""
    name = next((n for n in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE") if n in environment), "")
    try:
        return per_node(environment[name])[_number(environment, "SLURM_NODEID")]
    except (KeyError, ValueError, IndexError) as error:
        raise PeerError(
            f"srun does not say how many tasks this node has: {name or 'SLURM_STEP_TASKS_PER_NODE'}="
            f"{environment.get(name, '')}, SLURM_NODEID={environment.get('SLURM_NODEID', '')}"
        ) from error


def _contradicting(environment: Environment) -> _Launcher | None:
    """Return the launcher that contradicts RANK and WORLD_SIZE, if these are the same for all processes: each would be the same worker. A size
    above the launcher's is allowed: a script may start several workers in each process."""
    native = _native(environment)
    if native is None or _launcher(environment) is not PLAIN or any(name in environment for name in _NESTED):
        return None
    of, size = environment[native.size], environment[PLAIN.size]
    if not (of.isdecimal() and size.isdecimal()) or int(size) > int(of):
        return None
    return None if size == of and environment[PLAIN.rank] == environment[native.rank] else native


def _number(environment: Environment, name: str) -> int:
    value = environment.get(name, "")
    try:
        return int(value)
    except ValueError as error:
        raise PeerError(f"{name} must be a whole number, not `{value}`") from error


# Largest expansion, above any cluster's size.
_MOST = 1 << 17
_PART = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
_RANGE = re.compile(r"\s*([0-9]+)(?:-([0-9]+))?\s*")
_COUNTED = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def expand(text: str) -> list[str]:
    """Expand `node[1-3,7]` to names in order: of several brackets the last one varies fastest. ValueError with the reason."""
    parts = _PART.findall(text)
    if ",".join(parts) != text or not all(part.strip() for part in parts or [""]):
        raise ValueError(f"`{text[:40]}` has an empty name, or brackets that don't match")
    return [name for part in parts for name in _expand_one(part.strip())]


def _expand_one(part: str) -> Iterator[str]:
    head, bracket, rest = part.partition("[")
    if not bracket:
        yield part
        return
    inside, _, tail = rest.partition("]")
    for piece in inside.split(","):
        match = _RANGE.fullmatch(piece)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if match is None or not first <= last < first + _MOST:
            raise ValueError(f"`{piece}` in `{part[:40]}` is not a number or a range of numbers")
        for number in range(first, last + 1):  # `08-11` is 08, 09, 10, 11: as wide as the first one is written
            yield from (f"{head}{number:0{len(match[1])}d}{more}" for more in _expand_one(tail))


def per_node(text: str) -> list[int]:
    """Expand `2(x3),1` to [2, 2, 2, 1]. ValueError."""
    numbers: list[int] = []
    for part in text.split(","):
        match = _COUNTED.fullmatch(part.strip())
        times = int(match[2] or 1) if match is not None else 0
        if match is None or times > _MOST:
            raise ValueError(f"`{part}` in `{text[:40]}` is not a number of tasks, like `2` or `2(x3)`")
        numbers += [int(match[1])] * times
    return numbers
