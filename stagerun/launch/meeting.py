"""Where the workers of a job meet (MASTER_ADDR, MASTER_PORT), found where no one says, and the network that they use among
each other.

Tried in this order: what is given; a job on one node, with a port computed from the job's number; the list of nodes of a Slurm step;
under MPI, `mpi4py`, by which rank 0 says where it is.
"""

import importlib.util
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from stagerun.base.errors import PeerError
from stagerun.base.text import duration, listed
from stagerun.launch.addresses import by_default, free_port, interfaces, is_loopback, resolve, towards
from stagerun.launch.stopping import aside, mpi_launcher
from stagerun.system.host import host_name
from stagerun.system.nodelist import expand
from stagerun.system.process import born
from stagerun.system.world import GIVEN, World

# Seconds to wait for all to come to the launcher's meeting point: starting Python from a file system that all hosts read at
# once takes minutes. As long as a run waits for its workers' start.
PATIENCE_S = 600.0
_LOOPBACK = "127.0.0.1"
_LEAST_PORT, _PORTS = 20000, 10000  # below those that kernels hand out
_TEXT_BYTES = 100
_SRUN_HINT = "say where rank 0 is: `MASTER_ADDR=HOST srun ...`"
_HYDRA_HINT = "install mpi4py, or add `-genv MASTER_ADDR HOST -genv MASTER_PORT 29500` to mpiexec; HOST has rank 0"
_MPI_HINT = "install mpi4py, or add `-x MASTER_ADDR=HOST -x MASTER_PORT=29500` to mpirun; HOST has rank 0"


@dataclass(frozen=True, slots=True)
class Meeting:
    """`interface`: by which this host reaches the others; '' where gloo finds it itself."""

    address: str
    port: int
    interface: str = ""


def meet(world: World, environment: Mapping[str, str] = os.environ, patience: float = PATIENCE_S) -> Meeting:
    """Of several workers. Collective under MPI. PeerError where no place is found, or the others don't come within `patience` seconds."""
    number = job_number(environment)
    if "MASTER_ADDR" in environment and ("MASTER_PORT" in environment or number):
        return _given(world, environment, number)
    if GIVEN.rank in environment and GIVEN.size in environment:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environment]
        raise PeerError(
            f"RANK and WORLD_SIZE are set, but not {listed(missing)}",
            "a launcher such as torchrun sets all four; to start workers on this machine use `stagerun run DIR --nproc N`",
        )
    if world.local_size == world.size:
        if not number and (found := mpi_launcher()) is not None:
            number = f"{found.pid} {born(found.pid)}"  # what the ranks of one host have in common
        if number:
            return Meeting(_LOOPBACK, port_of(number), "lo")
    names = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    if names and world.launcher == "srun":
        return _of_nodes(names, number, environment)
    if importlib.util.find_spec("mpi4py") is not None:
        return _by_mpi(world, environment.get("GLOO_SOCKET_IFNAME", ""), patience)
    raise PeerError(
        f"{world.launcher} has started {world.size} workers, but doesn't say where they meet", _hint(world.launcher)
    )


def go_there(meeting: Meeting) -> None:
    """Has torch and the monitors use it. A network that the user has chosen stays."""
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = meeting.address, str(meeting.port)
    if meeting.interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", meeting.interface)


def job_number(environment: Mapping[str, str]) -> str:
    """What tells this launch from all others, the same for all its ranks; '' where nothing does."""
    if "PMIX_NAMESPACE" in environment:
        return environment["PMIX_NAMESPACE"]
    if "SLURM_JOB_ID" in environment and "SLURM_STEP_ID" in environment:
        return ".".join(environment.get(n, "0") for n in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"))
    return environment.get("PMI_JOBID", "")


def port_of(number: str) -> int:
    return _LEAST_PORT + zlib.crc32(number.encode()) % _PORTS


def _hint(launcher: str) -> str:
    return {"srun": _SRUN_HINT, "mpiexec.hydra": _HYDRA_HINT}.get(launcher, _MPI_HINT)


def _interface(address: str) -> str:
    """By which packets go there. Rank 0's own name may lead to its loopback device, by Debian's /etc/hosts: then that of the default route."""
    here = interfaces()
    found = by_default(here) if is_loopback(address) else towards(address, here)
    return found.name if found is not None else ""


def _given(world: World, environment: Mapping[str, str], number: str) -> Meeting:
    address, said = environment["MASTER_ADDR"], environment.get("MASTER_PORT") or str(port_of(number))
    if not (said.isascii() and said.isdigit() and 0 < int(said) < 65536):
        raise PeerError(f"MASTER_PORT must be a port number, 1 to 65535, not `{said}`")
    return Meeting(address, int(said), _interface(address) if world.local_size < world.size else "")


def _of_nodes(names: str, number: str, environment: Mapping[str, str]) -> Meeting:
    """At the first node of the step, which has rank 0."""
    first = environment.get("SLURM_NODEID", "0") == "0"
    try:
        nodes = expand(names)
        resolve(nodes[0])
        if is_loopback(nodes[0]) and not first:
            raise ValueError(f"`{nodes[0]}` has an address of this very host here")
    except (OSError, ValueError) as error:
        text = f"the node list of this step, `{names}`, doesn't lead `{host_name()}` to rank 0: {error}"
        raise PeerError(text, _SRUN_HINT) from error
    # On the first node its own name may lead to 127.0.1.1: it meets itself there, since rank 0 listens on all interfaces.
    return Meeting(nodes[0], port_of(number), _interface(nodes[1] if first and len(nodes) > 1 else nodes[0]))


def _by_mpi(world: World, wanted: str, patience: float) -> Meeting:
    """An address of rank 0's host and a port that is free there, handed to all by mpi4py. `wanted`: GLOO_SOCKET_IFNAME."""
    text = "" if world.rank else f"{_own_address(wanted)} {free_port()}"
    hint = _hint(world.launcher)
    try:
        address, _, port = aside(lambda: _broadcast(text, world.size), patience).rpartition(" ")
    except Exception as error:
        why = (
            str(error) or f"not all {world.size} came within {duration(patience)}: a host may be gone"
        )  # a TimeoutError is silent
        raise PeerError(f"the workers can't meet by mpi4py: {why}", hint) from error
    if not address:
        raise PeerError(
            "rank 0's host has several network interfaces, or none: by which one others reach it is not known", hint
        )
    return Meeting(address, int(port), _interface(address))


def _own_address(wanted: str) -> str:
    """This host's address for others: that of the interface wanted, of its name, or of the default route; '' if none is found. By Debian's
    /etc/hosts a host's own name means 127.0.1.1."""
    here = interfaces()
    named = towards(host_name(), here)
    found = next((one for one in here if one.name in wanted.split(",")), named or by_default(here))
    return found.host if found is not None else ""


def _broadcast(text: str, size: int) -> str:
    """Rank 0's text. RuntimeError. MPI is closed again: torch does the rest, and ranks may end by themselves."""
    import mpi4py

    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    from mpi4py import MPI

    MPI.Init()
    if MPI.COMM_WORLD.size != size:
        raise RuntimeError(f"it is of another MPI than the launcher: it sees {MPI.COMM_WORLD.size} of {size} ranks")
    data = bytearray(text.encode().ljust(_TEXT_BYTES))
    MPI.COMM_WORLD.Bcast(data)  # bytes: no pickle crosses the network
    MPI.Finalize()
    return data.decode().rstrip()
