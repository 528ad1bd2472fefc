"""Where the workers of a job meet (MASTER_ADDR, MASTER_PORT), found where no one says, and the network that they use among
each other.

Tried in this order: what is given; the launcher's own way of handing values from rank to rank (PMI-1, PMIx), by which rank 0
tells a port that is free; a job on one node; the list of nodes of a Slurm step, with a port that all compute from the job's
number.
"""

import ctypes
import glob
import ipaddress
import json
import os
import socket
import stat
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from ctypes import POINTER, byref, c_bool, c_char, c_char_p, c_size_t, c_uint8, c_uint16, c_uint32, c_uint64
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol, cast

from stagerun.base.errors import PeerError
from stagerun.base.text import duration
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
_MOST_BYTES = 900  # of a value; PMI-1 allows 1024
_LONGEST = 1 << 16  # an answer of PMI-1
_HINT = (
    "say where rank 0 is: `mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500`, `mpiexec.hydra -genv MASTER_ADDR HOST "
    "-genv MASTER_PORT 29500`, `MASTER_ADDR=HOST srun`"
)


@dataclass(frozen=True, slots=True)
class Meeting:
    """`way`: how it was found. `interface`: by which this host reaches the others; '' where gloo finds it itself."""

    address: str
    port: int
    way: str
    interface: str = ""


class Space(Protocol):
    """Values that ranks leave for each other: whoever has come past a fence sees all that was put before it."""

    def put(self, key: str, value: str) -> None: ...
    def fence(self) -> None: ...
    def get(self, rank: int, key: str) -> str: ...
    def close(self) -> None: ...


def meet(world: World, environment: Mapping[str, str] = os.environ, patience: float = PATIENCE_S) -> Meeting:
    """Collective where the launcher's way is used. PeerError where it can't be found, or the others don't come within
    `patience` seconds."""
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
    if "PMI_FD" in environment:
        return _handed_out(world, "PMI-1", lambda: Pmi1(environment, patience), environment, patience)
    why = ""
    if "PMIX_NAMESPACE" in environment:
        try:
            return _handed_out(world, "PMIx", lambda: Pmix(environment), environment, patience)
        except _NoWay as error:
            why = f" (PMIx: {error})"
    if world.local_size == world.size and number:
        return Meeting(_LOOPBACK, port_of(number), "one node", "lo")
    names = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    if names and world.launcher == "srun":
        return _of_nodes(names, number, environment)
    raise PeerError(f"{world.launcher} has started {world.size} workers, but doesn't say where they meet{why}", _HINT)


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
        raise PeerError(f"the node list of this step can't be read: {error}", _HINT) from error
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
            _HINT,
        ) from error
    found = towards(nodes[1] if first and len(nodes) > 1 else nodes[0], interfaces())
    # On the first node its own name may lead to 127.0.1.1: it meets itself there, since rank 0 listens on all interfaces.
    return Meeting(nodes[0], port_of(number), "Slurm's node list", found.name if found else "")


# -- the launcher's way


class _NoWay(Exception):
    """It is not there; another one may be."""


def _handed_out(
    world: World, way: str, opened: Callable[[], Space], environment: Mapping[str, str], patience: float
) -> Meeting:
    """In a thread of its own: it waits in C, or for a pipe, and this one answers signals meanwhile."""
    ended: list[tuple[str, int] | Exception] = []

    def ask() -> None:
        try:
            space = opened()
        except Exception as error:
            ended.append(_NoWay(str(error)))
            return
        try:
            place = agree(space, world, environment.get("GLOO_SOCKET_IFNAME", ""))
            space.close()
            ended.append(place)
        except Exception as error:
            ended.append(error)

    thread = threading.Thread(target=ask, name="meeting", daemon=True)
    with signals.held():
        thread.start()
    thread.join(patience)
    if not ended:
        raise PeerError(
            f"not all of the {world.size} workers came to where {world.launcher} has them meet ({way}) within "
            f"{duration(patience)}",
            "a host may be gone, or a worker may have ended before it came; run the same command again",
        )
    match ended[0]:
        case (str() as address, int() as port):
            return Meeting(address, port, way, "lo" if address == _LOOPBACK else _interface(address))
        case _NoWay() as error if way == "PMIx":
            raise error
        case PeerError() as error:
            raise error
        case error:
            raise PeerError(f"the workers can't meet by {world.launcher} ({way}): {error}", _HINT)


def _interface(address: str) -> str:
    found = towards(address, interfaces())
    return found.name if found else ""


def agree(space: Space, world: World, wanted: str) -> tuple[str, int]:
    """Rank 0's address, as seen from another host, and a port that is free there. Collective. `wanted`: the interface that
    the user says.

    All ranks put what they know, wait for each other once, and come to the same answer from what the same two of them have
    put. (A second value, put when the first ones have been read, was not found by some ranks under `srun --mpi=pmix`.)
    """
    here = interfaces()
    mine = Card(host_name(), world.local_size, free_port() if world.rank == 0 else 0, _preferred(wanted, here))
    space.put(f"stagerun-{world.rank}", mine.text())
    space.fence()

    def card(rank: int) -> Card:
        return mine if rank == world.rank else Card.read(space.get(rank, f"stagerun-{rank}"))

    first = card(0)
    if world.local_size == world.size:
        return _LOOPBACK, first.port
    # Ranks fill one host after the other, or go round them: either way the first look is at another host.
    others = dict.fromkeys((first.local_size, 1, world.size - 1, *range(1, world.size)))
    other = next((c for rank in others if rank < world.size and (c := card(rank)).host != first.host), None)
    address = choose(first.addresses, other.addresses if other else ())
    if not address:
        raise PeerError(
            f"`{first.host}`, where rank 0 is, has no network interface with an IPv4 address by which others could reach it",
            _HINT,
        )
    return address, first.port


@dataclass(frozen=True, slots=True)
class Card:
    """What a rank publishes about itself. `addresses` of its host, with the widths of their networks; the one to be preferred
    first."""

    host: str
    local_size: int
    port: int
    addresses: tuple[str, ...]

    def text(self) -> str:
        """Without a space, and short enough for PMI-1."""
        host, addresses = self.host.replace(" ", "_"), list(self.addresses)
        while True:
            text = json.dumps([host, self.local_size, self.port, *addresses], separators=(",", ":"))
            if len(text) <= _MOST_BYTES or not addresses:
                return text
            addresses.pop()

    @staticmethod
    def read(text: str) -> "Card":
        host, local_size, port, *addresses = json.loads(text)
        return Card(host, local_size, port, tuple(addresses))


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


# -- PMI-1 and PMIx: the protocols of MPI launchers, spoken without an MPI


class Pmi1:
    """The text protocol of hydra, Intel MPI and `srun --mpi=pmi2`: lines of `name=value` words on the descriptor in PMI_FD.

    Opened at most once in the life of a process. OSError where the launcher is gone or answers with an error;
    TimeoutError after `timeout` seconds without an answer, which a fence waits for until all processes have come there."""

    def __init__(self, environment: Mapping[str, str], timeout: float) -> None:
        descriptor = os.dup(_descriptor(environment))
        if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            self._socket: socket.socket | None = socket.socket(fileno=descriptor)
            self._socket.settimeout(timeout)
            self._stream: Any = None
        else:
            self._socket, self._stream = None, cast(BinaryIO, os.fdopen(descriptor, "r+b", buffering=0))
        self._came = b""
        self._ask("init", "response_to_init", pmi_version="1", pmi_subversion="1")
        self._space = self._ask("get_my_kvsname", "my_kvsname")["kvsname"]

    def put(self, key: str, value: str) -> None:
        """Neither holds a space."""
        self._ask("put", "put_result", kvsname=self._space, key=key, value=value)

    def fence(self) -> None:
        self._ask("barrier_in", "barrier_out")

    def get(self, rank: int, key: str) -> str:
        """The space of names is one for all ranks, so keys tell who has put them."""
        return self._ask("get", "get_result", kvsname=self._space, key=key)["value"]

    def close(self) -> None:
        self._ask("finalize", "finalize_ack")

    def _ask(self, command: str, expected: str, **words: str) -> dict[str, str]:
        line = " ".join([f"cmd={command}", *(f"{name}={value}" for name, value in words.items())])
        self._send(line.encode() + b"\n")
        answer = dict(word.partition("=")[::2] for word in self._line().split() if "=" in word)
        if answer.get("cmd") != expected or answer.get("rc", "0") != "0":
            raise OSError(f"the launcher's answer to {command} was {answer}")
        return answer

    def _send(self, data: bytes) -> None:
        if self._socket is not None:
            self._socket.sendall(data)
        else:
            self._stream.write(data)

    def _line(self) -> str:
        while b"\n" not in self._came:
            data = self._socket.recv(4096) if self._socket is not None else self._stream.read(4096)
            if not data or len(self._came) > _LONGEST:
                raise OSError("the launcher is gone")
            self._came += data
        line, _, self._came = self._came.partition(b"\n")
        return line.decode(errors="replace")


def _descriptor(environment: Mapping[str, str]) -> int:
    try:
        return int(environment["PMI_FD"])
    except ValueError as error:
        raise OSError(f"PMI_FD={environment['PMI_FD']} is not a file descriptor") from error


_GLOBAL, _BOOL, _STRING = 3, 1, 3  # PMIX_GLOBAL, PMIX_BOOL, PMIX_STRING


class _Process(ctypes.Structure):
    _fields_ = (("space", c_char * 256), ("rank", c_uint32))


class _Value(ctypes.Structure):
    """pmix_value_t: a tag and a union, of which the largest member is smaller than what stands here."""

    _fields_ = (("type", c_uint16), ("string", c_char_p), ("rest", c_uint64 * 6))


class _Truth(ctypes.Structure):
    """A pmix_value_t that holds one."""

    _fields_ = (("type", c_uint16), ("_gap", c_uint8 * 6), ("value", c_bool), ("rest", c_uint64 * 6))


class _Info(ctypes.Structure):
    """pmix_info_t."""

    _fields_ = (("key", c_char * 512), ("flags", c_uint32), ("held", _Truth))


class Pmix:
    """OSError where libpmix is missing, or the launcher answers with an error."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._library = _load(environment)
        self._me = _Process()
        self._call("PMIx_Init", byref(self._me), None, c_size_t(0))

    def put(self, key: str, value: str) -> None:
        held = _Value(type=_STRING, string=value.encode())
        self._call("PMIx_Put", c_uint8(_GLOBAL), key.encode(), byref(held))
        self._call("PMIx_Commit")

    def fence(self) -> None:
        """Returns when all processes have come here, and what they had put can be read."""
        # All values are handed out here: asked for one by one afterwards, a rank that has gone on may not be there to answer.
        collect = _Info(key=b"pmix.collect", held=_Truth(type=_BOOL, value=True))
        self._call("PMIx_Fence", None, c_size_t(0), byref(collect), c_size_t(1))

    def get(self, rank: int, key: str) -> str:
        process, answer = _Process(space=self._me.space, rank=rank), POINTER(_Value)()
        self._call("PMIx_Get", byref(process), key.encode(), None, c_size_t(0), byref(answer))
        if not answer or answer.contents.type != _STRING:
            raise OSError(f"PMIx_Get of `{key}` gave no text")
        return (answer.contents.string or b"").decode(errors="replace")

    def close(self) -> None:
        self._call("PMIx_Finalize", None, c_size_t(0))

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code != 0:
            raise OSError(f"{name} ended with status {code}")


def _load(environment: Mapping[str, str]) -> ctypes.CDLL:
    """The library of the launcher itself, where it says where it is: its version fits. Else the system's."""
    for place in _places(environment):
        try:
            return ctypes.CDLL(place)
        except OSError:
            continue
    raise OSError("libpmix.so.2 is not installed here")


def _places(environment: Mapping[str, str]) -> Iterator[str]:
    for name in ("PMIX_PREFIX", "OPAL_PREFIX", "PRTE_PREFIX"):
        if root := environment.get(name):
            yield from sorted(glob.glob(os.path.join(glob.escape(root), "lib*", "**", "libpmix.so.2"), recursive=True))
    yield "libpmix.so.2"
    yield from sorted(glob.glob("/usr/lib/*/pmix*/lib/libpmix.so.2"))
