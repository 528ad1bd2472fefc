"""Who this process is in the job. A value; only the functions here look at the environment."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from stagerun.errors import PeerError


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """`rank` 0 .. size-1 in the job, `local_rank` 0 .. local_size-1 on this node."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


def launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher has started this process as one worker of several (RANK and WORLD_SIZE are set)."""
    return "RANK" in environment and "WORLD_SIZE" in environment


def default_threads(workers: int) -> int:
    """Threads of each of `workers` on this node: OMP_NUM_THREADS if it says a number, else the processors this process
    may use, shared evenly; at least 1.
    """
    said = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if said.isascii() and said.isdigit() and int(said) > 0:
        return int(said)
    return max(1, len(os.sched_getaffinity(0)) // workers)


def from_environment(environment: Mapping[str, str] = os.environ) -> World:
    """The World that RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE describe, as torchrun sets them.

    LOCAL_RANK and LOCAL_WORLD_SIZE default to those of a job on one node. PeerError when they contradict each other or
    the meeting point (MASTER_ADDR, MASTER_PORT) is missing.
    """
    if not launched(environment):
        return World()
    try:
        rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        local_rank = int(environment.get("LOCAL_RANK", rank))
        local_size = int(environment.get("LOCAL_WORLD_SIZE", size))
    except ValueError as error:
        raise PeerError(f"RANK, WORLD_SIZE and their like must be whole numbers: {error}") from error
    if not (0 <= rank < size and 0 <= local_rank < local_size <= size):
        raise PeerError(
            f"RANK={rank}, WORLD_SIZE={size}, LOCAL_RANK={local_rank} and LOCAL_WORLD_SIZE={local_size} contradict"
        )
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if size > 1 and missing:
        raise PeerError(
            f"RANK and WORLD_SIZE are set, but not {' and '.join(missing)}",
            "a launcher such as torchrun sets all four; to start workers on this machine use `stagerun run DIR --nproc N`",
        )
    port = environment.get("MASTER_PORT", "1")
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise PeerError(f"MASTER_PORT must be a port number, 1 to 65535, not `{port}`")
    return World(rank=rank, size=size, local_rank=local_rank, local_size=local_size)
