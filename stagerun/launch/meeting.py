"""Where the workers of a job meet (MASTER_ADDR, MASTER_PORT), found where no one says, and the network that they use among
each other.

Tried in this order: what is given; a job on one node, with a port computed from the job's number; the list of nodes of a Slurm step;
under MPI, `mpi4py`, by which all ranks see each other's hosts.
"""

import importlib.util
import ipaddress
import json
import os
import threading
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stagerun.base.errors import PeerError
from stagerun.base.text import duration
from stagerun.launch import ancestors
from stagerun.launch.addresses import (
    Interface,
    by_default,
    free_port,
    interfaces,
    is_loopback,
    own_name_misleads,
    resolve,
    towards,
)
from stagerun.system import signals
from stagerun.system.host import host_name
from stagerun.system.nodelist import expand
from stagerun.system.world import GIVEN, World

# Seconds to wait for all to come to the launcher's meeting point: starting Python from a file system that all hosts read at
# once takes minutes. As long as a run waits for its workers' start.
PATIENCE_S = 600.0
_LOOPBACK = "127.0.0.1"
_LEAST_PORT, _PORTS = 20000, 10000  # below those that kernels hand out
_CARD_BYTES = 1000
_HINTS = {
    "srun": "say where rank 0 is: `MASTER_ADDR=HOST srun ...`",
    "mpiexec.hydra": "install mpi4py, or add `-genv MASTER_ADDR HOST -genv MASTER_PORT 29500` to mpiexec; HOST has rank 0",
}
_HINT = "install mpi4py, or add `-x MASTER_ADDR=HOST -x MASTER_PORT=29500` to mpirun; HOST has rank 0"


@dataclass(frozen=True, slots=True)
class Meeting:
    """`way`: how it was found. `interface`: by which this host reaches the others; '' where gloo finds it itself."""

    address: str
    port: int
    way: str
    interface: str = ""


def meet(world: World, environment: Mapping[str, str] = os.environ, patience: float = PATIENCE_S) -> Meeting:
    """Collective under MPI. PeerError where no place is found, or the others don't come within `patience` seconds."""
    if world.size == 1:
        return Meeting(_LOOPBACK, 0, "alone")
    number = job_number(environment)
    if "MASTER_ADDR" in environment and ("MASTER_PORT" in environment or number):
        return _given(world, environment, number)
    if GIVEN.rank in environment and GIVEN.size in environment:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environment]
        raise PeerError(
            f"RANK and WORLD_SIZE are set, but not {' and '.join(missing)}",
            "a launcher such as torchrun sets all four; to start workers on this machine use `stagerun run DIR --nproc N`",
        )
    if world.local_size == world.size and (number := number or _launcher_number()):
        return Meeting(_LOOPBACK, port_of(number), "one node", "lo")
    names = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    if names and world.launcher == "srun":
        return _of_nodes(names, number, environment)
    if _mpi4py_is_there():
        address, port = agree(_exchanged(world, environment, patience))
        return Meeting(address, port, "mpi4py", "lo" if address == _LOOPBACK else _interface(address))
    raise PeerError(
        f"{world.launcher} has started {world.size} workers, but doesn't say where they meet",
        _HINTS.get(world.launcher, _HINT),
    )


def go_there(meeting: Meeting) -> None:
    """Has torch and the monitors use it. A network that the user has chosen stays."""
    if meeting.port == 0:
        return
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = meeting.address, str(meeting.port)
    if meeting.interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", meeting.interface)


def place_note(world: World, environment: Mapping[str, str] = os.environ) -> str:
    """What to tell the user where no one says which worker of its host this is, and rank 0 is on another one; '' elsewhere."""
    address = environment.get("MASTER_ADDR", "")
    if GIVEN.rank not in environment or "LOCAL_RANK" in environment or world.rank == 0 or not address:
        return ""
    try:
        found = resolve(address)
    except OSError:
        return ""
    if is_loopback(found) or found in {interface.host for interface in interfaces()}:
        return ""
    return (
        f"warning: RANK is set and LOCAL_RANK is not, so this worker takes itself for number {world.local_rank} of "
        f"{world.local_size} on one host, and its processors and GPU by that, but {address}, where rank 0 is, is another host; set "
        "LOCAL_RANK and LOCAL_WORLD_SIZE, to 0 and 1 where each host or container has one worker"
    )


def job_number(environment: Mapping[str, str]) -> str:
    """What tells this launch from all others, the same for all its ranks; '' where nothing does."""
    if "PMIX_NAMESPACE" in environment:
        return environment["PMIX_NAMESPACE"]
    if "SLURM_JOB_ID" in environment and "SLURM_STEP_ID" in environment:
        return ".".join(environment.get(n, "0") for n in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"))
    return environment.get("PMI_JOBID", "")


def _launcher_number() -> str:
    """What the ranks of one host have in common: the process that has started them."""
    found = ancestors.launcher()
    return f"{found.pid} {found.start}" if found is not None else ""


def port_of(number: str) -> int:
    return _LEAST_PORT + zlib.crc32(number.encode()) % _PORTS


def _given(world: World, environment: Mapping[str, str], number: str) -> Meeting:
    address, said = environment["MASTER_ADDR"], environment.get("MASTER_PORT") or str(port_of(number))
    if not (said.isascii() and said.isdigit() and 0 < int(said) < 65536):
        raise PeerError(f"MASTER_PORT must be a port number, 1 to 65535, not `{said}`")
    meeting = Meeting(address, int(said), "given")
    if world.local_size == world.size or not own_name_misleads():
        return meeting
    here = interfaces()
    found = towards(address, here)
    if found is None and _is_here(address):
        found = by_default(here)
    return meeting if found is None else Meeting(address, int(said), "given", found.name)


def _is_here(address: str) -> bool:
    """Whether the name leads to this host's loopback device: this is rank 0's host, and /etc/hosts has its name beside
    127.0.1.1."""
    try:
        return is_loopback(resolve(address))
    except OSError:
        return False


# -- the node list of a step


def _of_nodes(names: str, number: str, environment: Mapping[str, str]) -> Meeting:
    """At the first node of the step, which has rank 0."""
    try:
        nodes = expand(names)
    except ValueError as error:
        raise PeerError(f"the node list of this step can't be read: {error}", _HINTS["srun"]) from error
    first = environment.get("SLURM_NODEID", "0") == "0"
    try:
        if is_loopback(resolve(nodes[0])) and not first:
            raise PeerError(
                f"`{nodes[0]}`, where rank 0 is, has an address of this very host here: {resolve(nodes[0])}", _HINT
            )
    except OSError as error:
        raise PeerError(
            f"`{nodes[0]}`, where rank 0 is by Slurm's node list, has no address on `{host_name()}`: "
            f"{error.strerror or error}",
            _HINTS["srun"],
        ) from error
    found = towards(nodes[1] if first and len(nodes) > 1 else nodes[0], interfaces())
    # On the first node its own name may lead to 127.0.1.1: it meets itself there, since rank 0 listens on all interfaces.
    return Meeting(nodes[0], port_of(number), "Slurm's node list", found.name if found else "")


@dataclass(frozen=True, slots=True)
class Card:
    """What a rank publishes about itself. `addresses` of its host, with the widths of their networks; the one to be preferred
    first."""

    host: str
    port: int
    addresses: tuple[str, ...]

    @classmethod
    def of_this_host(cls, world: World, wanted: str) -> "Card":
        """`wanted`: the interface that the user names, as of `_preferred`."""
        return cls(host_name(), free_port() if world.rank == 0 else 0, _preferred(wanted, interfaces()))

    def text(self) -> str:
        """At most _CARD_BYTES: addresses beyond are left out."""
        addresses = list(self.addresses)
        while len(text := json.dumps([self.host, self.port, *addresses])) > _CARD_BYTES:
            addresses.pop()
        return text

    @staticmethod
    def read(text: str) -> "Card":
        host, port, *addresses = json.loads(text)
        return Card(host, port, tuple(addresses))


# -- mpi4py


def _mpi4py_is_there() -> bool:
    return importlib.util.find_spec("mpi4py") is not None


def _exchanged(world: World, environment: Mapping[str, str], patience: float) -> list[Card]:
    """The cards of all ranks. In a thread of its own: MPI waits in C, and this one answers signals meanwhile."""
    mine = Card.of_this_host(world, environment.get("GLOO_SOCKET_IFNAME", ""))
    ended: list[list[Card] | Exception] = []

    def exchange() -> None:
        try:
            ended.append([Card.read(text) for text in _allgather(mine.text(), world.size)])
        except Exception as error:
            ended.append(error)

    thread = threading.Thread(target=exchange, name="meeting", daemon=True)
    with signals.held():
        thread.start()
    thread.join(patience)
    if not ended:
        raise PeerError(
            f"not all of the {world.size} workers came to where {world.launcher} has them meet within {duration(patience)}",
            "a host may be gone, or a worker may have ended before it came; run the same command again",
        )
    if isinstance(ended[0], Exception):
        raise PeerError(f"the workers can't meet by mpi4py: {ended[0]}", _HINTS.get(world.launcher, _HINT)) from ended[
            0
        ]
    return ended[0]


def _allgather(text: str, size: int) -> list[str]:
    """One text of each rank, in order. RuntimeError. MPI is closed again: torch does the rest, and ranks may end by themselves."""
    import mpi4py

    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    from mpi4py import MPI

    MPI.Init()
    if MPI.COMM_WORLD.size != size:
        raise RuntimeError(f"it is of another MPI than the launcher: it sees {MPI.COMM_WORLD.size} of {size} ranks")
    every = bytearray(size * _CARD_BYTES)
    MPI.COMM_WORLD.Allgather(bytearray(text.encode().ljust(_CARD_BYTES)), every)  # bytes: no pickle crosses the network
    MPI.Finalize()
    return [every[at : at + _CARD_BYTES].decode().rstrip() for at in range(0, len(every), _CARD_BYTES)]


def _interface(address: str) -> str:
    found = towards(address, interfaces())
    return found.name if found else ""


def agree(cards: Sequence[Card]) -> tuple[str, int]:
    """Rank 0's address, as seen from another host, and a port that is free there. PeerError. `cards`: of all ranks, in order."""
    first = cards[0]
    other = next((card for card in cards if card.host != first.host), None)
    if other is None:
        return _LOOPBACK, first.port
    address = choose(first.addresses, other.addresses)
    if not address:
        raise PeerError(
            f"`{first.host}`, where rank 0 is, has no network interface with an IPv4 address by which others could reach it",
            _HINT,
        )
    return address, first.port


def _preferred(wanted: str, here: Sequence[Interface]) -> tuple[str, ...]:
    """The addresses of `here`; first that of the interface that GLOO_SOCKET_IFNAME names, the first of several, or else of
    this host's name."""
    names = wanted.split(",")
    try:
        own = resolve(host_name())
    except OSError:
        own = ""
    if wanted:
        here = [i for i in here if i.name in names] or here
    return tuple(i.address for i in sorted(here, key=lambda i: i.host != own))


def choose(ours: Sequence[str], theirs: Sequence[str]) -> str:
    """The one of our addresses (`10.0.0.1/24`) at which a host with the addresses `theirs` finds us; '' if there is none.
    Pure.

    One that they have as well does not lead to us: bridges of containers have the same address on every host.
    """
    taken = {address.partition("/")[0] for address in theirs}
    networks = {ipaddress.ip_interface(address).network for address in theirs}
    left = [address for address in ours if address.partition("/")[0] not in taken]
    shared = [address for address in left if ipaddress.ip_interface(address).network in networks]
    return next(iter(shared or left), "").partition("/")[0]
