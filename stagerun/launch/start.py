"""The start of a job's workers, where they meet, and what a worker does around its job; for `run`, `rehearse` and others.

The meeting point (MASTER_ADDR, MASTER_PORT) is tried in this order: the environment; a job on one node, with a port computed from the job's
number; the list of nodes of a Slurm step; under MPI, `mpi4py`, by which rank 0 announces it.
"""

import importlib.util
import ipaddress
import os
import socket
import sys
import threading
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import psutil

from stagerun.base.errors import Diverged, ExitCode, PeerError, StagerunError, UsageError
from stagerun.base.text import duration, listed
from stagerun.command.ending import bug_report, of_surroundings, tell
from stagerun.launch.local import Orders, run_workers
from stagerun.launch.stopping import StopRequest, aside, die_with_launcher, mpi_launcher
from stagerun.launch.watched import Monitored, monitored
from stagerun.system.host import host_name
from stagerun.system.process import born
from stagerun.system.world import (
    PLAIN,
    Environment,
    World,
    default_threads,
    expand,
    from_environment,
    launched,
    rank_said,
    started_by,
)

# A worker's work; returns its exit code. The monitor is None where the orders have no limits.
Job = Callable[[World, StopRequest, Monitored | None], int]


def joined(nproc: int | None) -> bool:
    """Return whether a launcher started this process as one of several. UsageError with --nproc."""
    if launched() and nproc is not None:
        raise UsageError(
            f"--nproc, but a launcher has started this process as one of several ({started_by()})",
            "leave --nproc out: the launcher sets the number of workers",
        )
    return launched()


def start(job: Job, orders: Orders, nproc: int) -> int:
    """Run `nproc` workers on this machine, or `job` in this process for one; return the exit code."""
    if nproc == 1:
        os.environ["OMP_NUM_THREADS"] = str(orders.threads or default_threads(1))
        return work(job, orders)
    code, text = run_workers(orders, nproc)
    tell(text)
    return code


def work(job: Job, orders: Orders) -> int:
    """Run one worker. It reports its end to a launcher of stagerun, or else to the terminal."""
    # Nothing to save needs no grace.
    stop = StopRequest("to save", grace=orders.grace) if orders.saves else StopRequest("which leaves nothing")
    rank, world = rank_said(), World()

    def say(text: str) -> None:
        tell(f"rank {rank}: {text}" if rank and text else text)  # rank 0 speaks for all

    try:
        stop.install(orders.stopped)
        die_with_launcher()
        world = from_environment()
        rank = world.rank
        if world.size > 1:
            set_meeting(meet(world))
        with monitored(world, orders.limits, say) as watch:  # before the job imports torch, which may take long
            code, text = job(world, stop, watch), ""
    except Diverged as error:  # all ranks raise it, and one prints it
        code, text = int(error.exit_code), "" if rank else error.render()
    except StagerunError as error:
        code, text = int(error.exit_code), error.render()
    except Exception as error:
        limit = of_surroundings(error)
        code, text = (int(limit.exit_code), limit.render()) if limit else (int(ExitCode.BUG), bug_report(error))
    if not stop.settle(code, text):
        say(text)
    if world.size > 1:
        _leave(code)
    return code


def _leave(code: int) -> NoReturn:
    """End one worker of several without tearing the interpreter down, after a snapshot in progress.

    After an error the process group is still open: its threads may wait for peers that are gone or failed, and so would its destructor.
    gloo's threads even outlive a destroyed group, and abort the process (SIGABRT) when they need an interpreter in teardown.
    torch.compile's threads never end.
    """
    for thread in threading.enumerate():
        if thread.name == "snapshot":  # of `train.hooks.snapshots`
            thread.join()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # the reader has gone
            stream.flush()
    os._exit(code)


# Seconds to wait for all workers, as in a run: starting Python from a file system that all hosts read at once takes minutes.
PATIENCE_S = 600.0
_LOOPBACK = "127.0.0.1"
_LEAST_PORT, _PORTS = 20000, 10000  # below those that kernels hand out
_TEXT_BYTES = 100
_SRUN_HINT = "say where rank 0 is: `MASTER_ADDR=HOST srun ...`"
_HYDRA_HINT = "install mpi4py, or add `-genv MASTER_ADDR HOST -genv MASTER_PORT 29500` to mpiexec; HOST has rank 0"
_MPI_HINT = "install mpi4py, or add `-x MASTER_ADDR=HOST -x MASTER_PORT=29500` to mpirun; HOST has rank 0"


@dataclass(frozen=True, slots=True)
class Meeting:
    """`interface`: the one towards the other hosts; '' where gloo finds it."""

    address: str
    port: int
    interface: str = ""


def meet(world: World, environment: Environment = os.environ, patience: float = PATIENCE_S) -> Meeting:
    """Return where several workers meet. Collective under MPI. PeerError without a meeting point, or for a peer missing after `patience` s."""
    number = job_number(environment)
    if "MASTER_ADDR" in environment and ("MASTER_PORT" in environment or number):
        return _from_environment(world, environment, number)
    if PLAIN.rank in environment and PLAIN.size in environment:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environment]
        raise PeerError(
            f"RANK and WORLD_SIZE are set, but not {listed(missing)}",
            "a launcher such as torchrun sets all four; to start workers on this machine use `stagerun run DIR --nproc N`",
        )
    if world.local_size == world.size:
        if not number and (launcher := mpi_launcher()) is not None:
            number = f"{launcher.pid} {born(launcher.pid)}"  # the ranks of one host share it
        if number:
            return Meeting(_LOOPBACK, port_of(number), "lo")
    names = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    if names and world.launcher == "srun":
        return _of_nodes(names, number, environment)
    if importlib.util.find_spec("mpi4py") is not None:
        return _by_mpi(world, environment.get("GLOO_SOCKET_IFNAME", ""), patience)
    raise PeerError(
        f"{world.launcher} has started {world.size} workers, but sets no meeting point", _hint(world.launcher)
    )


def set_meeting(meeting: Meeting) -> None:
    """Set it for torch and the monitors. The user's choice of a network stays."""
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = meeting.address, str(meeting.port)
    if meeting.interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", meeting.interface)


def job_number(environment: Environment) -> str:
    """Return what identifies this launch on all its ranks; '' without such a variable."""
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
    """Return the interface that routes to an address. Debian's /etc/hosts maps rank 0's name to its loopback device: then the default route's."""
    here = interfaces()
    route = by_default(here) if is_loopback(address) else towards(address, here)
    return route.name if route is not None else ""


def _from_environment(world: World, environment: Environment, number: str) -> Meeting:
    address, port = environment["MASTER_ADDR"], environment.get("MASTER_PORT") or str(port_of(number))
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise PeerError(f"MASTER_PORT must be a port number, 1 to 65535, not `{port}`")
    return Meeting(address, int(port), _interface(address) if world.local_size < world.size else "")


def _of_nodes(names: str, number: str, environment: Environment) -> Meeting:
    """Meet at the first node of the step, which has rank 0."""
    first = environment.get("SLURM_NODEID", "0") == "0"
    try:
        nodes = expand(names)
        resolve(nodes[0])
        if is_loopback(nodes[0]) and not first:
            raise ValueError(f"`{nodes[0]}` resolves to this host")
    except (OSError, ValueError) as error:
        text = f"the node list of this step, `{names}`, doesn't lead `{host_name()}` to rank 0: {error}"
        raise PeerError(text, _SRUN_HINT) from error
    # The first node's name may mean 127.0.1.1 on itself, which works: rank 0 listens on all interfaces.
    return Meeting(nodes[0], port_of(number), _interface(nodes[1] if first and len(nodes) > 1 else nodes[0]))


def _by_mpi(world: World, wanted: str, patience: float) -> Meeting:
    """Broadcast an address of rank 0's host and a free port by mpi4py. `wanted`: GLOO_SOCKET_IFNAME."""
    text = "" if world.rank else f"{_address_for_others(wanted)} {free_port()}"
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
            "rank 0's host has several network interfaces, or none: which one reaches the others is unclear", hint
        )
    return Meeting(address, int(port), _interface(address))


def _address_for_others(wanted: str) -> str:
    """Return this host's address for others: of the wanted interface, of its name (127.0.1.1 by Debian's /etc/hosts), or of the default
    route; '' without any."""
    here = interfaces()
    named = towards(host_name(), here)
    chosen = next((one for one in here if one.name in wanted.split(",")), named or by_default(here))
    return chosen.host if chosen is not None else ""


def _broadcast(text: str, size: int) -> str:
    """Return rank 0's text, and close MPI: torch does the rest. RuntimeError."""
    import mpi4py

    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    from mpi4py import MPI

    MPI.Init()
    if MPI.COMM_WORLD.size != size:
        raise RuntimeError(
            f"it belongs to another MPI than the launcher: it sees {MPI.COMM_WORLD.size} of {size} ranks"
        )
    data = bytearray(text.encode().ljust(_TEXT_BYTES))
    MPI.COMM_WORLD.Bcast(data)  # bytes: no pickle crosses the network
    MPI.Finalize()
    return data.decode().rstrip()


# -- IPv4 addresses of this host, and the interface of the route to another. Linux.

# A port and a documentation address (RFC 5737); nothing is sent.
_DISCARD, _ELSEWHERE = 9, "203.0.113.1"


@dataclass(frozen=True, slots=True)
class Interface:
    name: str
    host: str  # its address


def interfaces() -> list[Interface]:
    """Return the interfaces that are up and have an address, without the loopback device and aliases."""
    up = {name for _, name in socket.if_nameindex() if _is_up(name)}
    first = [(name, addresses[0]) for name, addresses in psutil.net_if_addrs().items() if name in up]
    return [
        Interface(name, one.address)
        for name, one in first
        if one.family == socket.AF_INET and not is_loopback(one.address)
    ]


def _is_up(name: str) -> bool:
    """Return the flag IFF_UP. psutil's `net_if_stats` asks for more, which some devices refuse. If /sys shows another namespace: True."""
    with suppress(OSError, ValueError):
        return bool(int(Path("/sys/class/net", name, "flags").read_text(), 16) & 1)
    return True


def resolve(host: str) -> str:
    """Return a host's first address. OSError for a name that doesn't resolve."""
    return str(socket.getaddrinfo(host, None, family=socket.AF_INET, type=socket.SOCK_STREAM)[0][4][0])


def towards(host: str, here: list[Interface]) -> Interface | None:
    """Return the interface that holds `host`'s address or routes to it; None for the loopback device, or without a route."""
    try:
        source = resolve(host)
        if source not in {one.host for one in here}:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((source, _DISCARD))
                source = probe.getsockname()[0]
    except (OSError, UnicodeError):
        return None
    return next((one for one in here if one.host == source), None)


def by_default(here: list[Interface]) -> Interface | None:
    """Return the interface of the default route, or else the only one."""
    return towards(_ELSEWHERE, here) or (here[0] if len(here) == 1 else None)


def is_loopback(host: str) -> bool:
    """Return whether a name or address resolves to the loopback device."""
    try:
        return ipaddress.ip_address(resolve(host)).is_loopback
    except OSError:
        return False


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
