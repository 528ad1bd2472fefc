"""`stagerun run --nproc N`: N workers on this machine, through torchrun's own agent.

Each worker is the same command again with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set. It writes how it ended
into a report folder, so that one clear message comes out, and not one from each worker and one from the agent.
"""

import dataclasses
import fcntl
import logging
import math
import os
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from stagerun.base.errors import ExitCode
from stagerun.base.text import duration
from stagerun.launch.folder import (
    LAUNCHER_PID,
    REPORT_DIR,
    Report,
    lives,
    nothing_started,
    reports,
    send,
    unwritable,
)
from stagerun.launch.stopping import GRACE_S, Relay, least_before
from stagerun.system import signals
from stagerun.system.files import own_folder
from stagerun.system.process import program

FOLDER_PREFIX = "stagerun-launch-"
_HELD = "launcher"  # a lock of the process that has made the folder
_MADE_S = 60  # by then a folder that is being made has its lock
_LOOK_S = 0.05
_MEET_S = 300  # until the other hosts have come, whose interpreters may start from a slow disk


def run_workers(
    command: Sequence[str],
    nproc: int,
    threads: int,
    grace: float = GRACE_S,
    stopped: int = ExitCode.SAVED,
    saves: bool = True,
) -> tuple[int, str]:
    """Runs `stagerun COMMAND...` in `nproc` workers and waits. Main thread only: the workers die with the
    thread that started them (PR_SET_PDEATHSIG).

    The exit code for the user, and what to say on stderr. The signals of `stop_signals` are passed on; the workers then have
    `grace` seconds. `stopped`: the code of a stop before any worker has started. `saves`: rank 0 may have something to save
    when another fails, and is waited for as long. StorageError without a folder for temporary files.
    """
    with new_life(grace) as life:
        # All workers are here, so they meet on the loopback device, whatever this host's name resolves to.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        found, deaths = live(life, command, nproc, threads, saves)
        code, text = verdict(found, deaths, life.relay.asked is not None, stopped)
    if life.relay.late and code == ExitCode.PEER:
        text = too_late(life.relay.asked.signal, grace)  # type: ignore[union-attr]
    return code, text


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """This host among those of a job. `first`: rank of its first worker. `endpoint`: ADDRESS:PORT on host 0, where all meet, as each
    of them reaches it. `job`: the same word on all, and another one in each life."""

    index: int
    count: int
    first: int
    endpoint: str
    job: str


@dataclasses.dataclass(frozen=True, slots=True)
class Life:
    """What our launcher and its workers on this host share while they live."""

    folder: Path
    relay: Relay


@contextmanager
def new_life(grace: float) -> Iterator[Life]:
    """The report folder, and signals passed on to the workers. Main thread. StorageError without a folder for temporary files."""
    folder = None
    signals.block()  # one that came in between would leave the folder behind; the relay answers it
    try:
        sweep()
        folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
        held = _claim(folder)
    except OSError as error:
        where = Path(error.filename).parent if error.filename else Path(os.environ.get("TMPDIR", "/tmp"))
        failure = unwritable(error, where)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        signals.release()
        raise failure from error
    os.environ[REPORT_DIR] = str(folder)
    os.environ[LAUNCHER_PID] = str(os.getpid())
    relay = Relay(folder, grace)
    relay.start()
    try:
        yield Life(folder, relay)
    except OSError as error:  # torch's agent makes files there, too
        if not Path(str(error.filename)).is_relative_to(folder):
            raise
        raise unwritable(error, folder) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


def live(
    life: Life, command: Sequence[str], nproc: int, threads: int, saves: bool, node: Node | None = None
) -> tuple[list[Report], dict[int, int]]:
    """Runs `stagerun COMMAND...` in this host's workers, to their end: what they reported, and the exit codes of those that failed, by
    rank. Main thread. `node`: where other hosts have workers, too. OSError where a report is
    missing and the folder takes no more files."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    deaths = _elastic(command, nproc, life, saves, node)
    life.relay.end()
    found = reports(life.folder, nproc, node.first if node else 0)
    if len(found) < nproc and not any(one.code == ExitCode.DONE for one in found):  # was there room for a report?
        (life.folder / "room").touch()
    return found, deaths


def too_late(number: signal.Signals, grace: float) -> str:
    return (
        f"workers had not ended {duration(least_before(grace))} after {number.name}, and were killed\n"
        "  hint: run the same command again: it goes on from the newest snapshot; a longer --grace gives them more time"
    )


def _elastic(command: Sequence[str], nproc: int, life: Life, saves: bool, node: Node | None) -> dict[int, int]:
    """Runs the workers through torchrun's agent. Exit codes of those that it saw fail, by rank."""
    # Before the import, which sets up torch's loggers: the agent reports every worker's end in its own words.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from stagerun.comm.store import STORE_FILE, serve

    _silence("torch.distributed.elastic")
    if life.relay.asked is not None:
        return {}
    # What an older torch doesn't know is left out. The signals are the relay's, and a worker goes on ignoring what this process was
    # started to ignore.
    options: dict[str, Any] = {"signals_to_handle": ""}
    known = {field.name for field in dataclasses.fields(LaunchConfig)}
    # Workers of one host meet in a file, which no other user can reach; the port is only a value that torch wants.
    node = node or Node(0, 1, 0, "127.0.0.1:1", uuid.uuid4().hex)
    address, _, port = node.endpoint.rpartition(":")
    if node.count == 1:
        (life.folder / STORE_FILE).touch()
    served = serve(address, int(port)) if node.index == 0 and node.count > 1 else None
    # `static`, since `c10d` unpickles what it finds in its store. It has ranks in the order of the hosts: rank 0 is where the output
    # folder may be.
    options |= {
        "run_id": node.job,
        "rdzv_backend": "static",
        "rdzv_endpoint": f"{address}:{served.port if served is not None else port}",
        "rdzv_configs": {"rank": node.index, "timeout": _MEET_S},
        "local_addr": address,
    }
    config = LaunchConfig(
        min_nodes=node.count,
        max_nodes=node.count,
        nproc_per_node=nproc,
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=str(life.folder / "logs")),
        **{name: value for name, value in options.items() if name in known},
    )
    try:
        patient = _rank0_saves(life.folder, least_before(life.relay.grace)) if saves else nullcontext()
        with patient, _no_barrier(), nullcontext() if node.count > 1 else _no_server():
            elastic_launch(config, sys.executable)("-u", *program("stagerun"), *command)
    except ChildFailedError as error:
        return {rank: failure.exitcode for rank, failure in error.failures.items()}
    return {}


@contextmanager
def _rank0_saves(folder: Path, patience: float) -> Iterator[None]:
    """Has the agent wait for rank 0, `patience` seconds at most, before it ends those that are left when a worker has failed.

    It gives them 30 s, with nothing to set that by (`shutdown_timeout` is for signals), and rank 0 may be writing what is trained to a
    slow disk: it learns that a worker is gone from that one's sockets, so it begins when the agent does. It may have left its report
    before it is done with that. Not where rank 0 is gone, or has not even entered: then there is nothing to wait for.
    """
    from torch.distributed.elastic.multiprocessing.api import PContext

    close, last = PContext.close, math.inf

    def patient(self: PContext, *words: Any, **named: Any) -> None:
        nonlocal last
        last = min(last, time.monotonic() + patience)
        if lives(folder, 0):
            send(folder, signal.SIGTERM)  # as the agent does
        while lives(folder, 0) and time.monotonic() < last:
            time.sleep(_LOOK_S)
        close(self, *words, **named)

    with _replaced(PContext, "close", patient):
        yield


def _no_barrier() -> AbstractContextManager[None]:
    """An agent whose workers have ended well waits for the other hosts' up to five minutes, though one of them may have failed. Nothing
    of ours needs that: the store in which they would meet lives as long as this process."""
    from torch.distributed.elastic.agent.server.api import SimpleElasticAgent

    return _replaced(SimpleElasticAgent, "_exit_barrier", lambda self: None)


def _no_server() -> AbstractContextManager[None]:
    """Has an agent without others keep its store in its own memory: torch's would listen for every user of this machine."""
    from torch.distributed import HashStore
    from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

    def alone(self: StaticTCPRendezvous) -> RendezvousInfo:
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(self.master_addr, self.master_port))

    return _replaced(StaticTCPRendezvous, "next_rendezvous", alone)


@contextmanager
def _replaced(kind: type, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """Another method of a class of torch's, which leaves no other way in."""
    before = getattr(kind, name)
    setattr(kind, name, method)
    try:
        yield
    finally:
        setattr(kind, name, before)


def _silence(package: str) -> None:
    """Turns off the loggers of a package's modules. Each has a level of its own, so that of the package is not enough."""
    for name in [package, *logging.root.manager.loggerDict]:
        if name == package or name.startswith(f"{package}."):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)


def _claim(folder: Path) -> int:
    """The descriptor of a lock that lasts as long as this process. OSError.

    A lock, and not this process's number: containers that share /tmp don't share numbers. It has its name only once it is held, so
    that no one finds it free meanwhile.
    """
    made = folder / f".{_HELD}"
    lock = os.open(made, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        made.rename(folder / _HELD)
    except OSError:
        os.close(lock)
        raise
    return lock


def sweep() -> None:
    """Removes the report folders of launchers of this user that were killed. One without a lock is just being made, or its launcher was
    killed while it removed it. Others can make such a folder, too, and a link in it: neither is followed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        try:
            if not own_folder(folder.lstat()):
                continue
            lock = os.open(folder / _HELD, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            with suppress(OSError):
                if time.time() > folder.lstat().st_mtime + _MADE_S:
                    shutil.rmtree(folder, ignore_errors=True)
            continue
        except OSError:
            continue  # another launcher was faster
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue  # its launcher lives
        finally:
            os.close(lock)


def verdict(
    reports: Sequence[Report],
    deaths: dict[int, int],
    asked: bool = False,
    stopped: int = ExitCode.SAVED,
    hosts: Mapping[int, str] | None = None,
) -> tuple[int, str]:
    """The one exit code and message for all workers.

    A worker that only lost its peers is not the cause; one that met an error of its own is, then one that was killed, then one
    that was asked to stop. A worker with nothing to say leaves it to the one that raised the error (`train.agreement`).
    `deaths`: exit codes by rank as the agent saw them, negative for a signal. `asked`: the launcher was asked to stop; `stopped` is
    the code where that leaves nothing else to say. `hosts`: by rank, where there are several.
    """
    causes = [r for r in reports if r.code not in (ExitCode.DONE, ExitCode.SAVED, ExitCode.PEER)]
    if causes:
        telling = [r for r in causes if r.text] or causes
        worst = telling[0]
        same = all(r.text == worst.text for r in telling)
        return worst.code, worst.text if same else "\n".join(f"rank {r.rank}: {r.text}" for r in telling)
    if any(r.rank == 0 for r in reports) and all(r.code == ExitCode.DONE for r in reports):
        return ExitCode.DONE, ""  # everything is on disk; what came then, a signal or a kill, was too late to matter
    reported = {r.rank for r in reports if r.code != ExitCode.DONE}
    killed = {rank: code for rank, code in deaths.items() if code < 0 and rank not in reported}
    if killed:
        # The agent ends those that are left with SIGTERM: another signal tells more.
        rank, code = min(killed.items(), key=lambda death: (death[1] == -signal.SIGTERM, death[0]))
        return ExitCode.PEER, (
            f"worker {rank}{_on(rank, hosts)} was killed by {signal.Signals(-code).name}\n"
            "  hint: run the same command again: it goes on from the newest snapshot"
        )
    ended = {r.rank for r in reports}
    silent = {rank: code for rank, code in deaths.items() if code not in (stopped, ExitCode.PEER) and rank not in ended}
    if silent and not asked:  # the stop of the others follows from it
        return _said_nothing(silent, hosts)
    # Workers leave together once they have started, with all saved. One that leaves alone did so before it met the others: these
    # then miss a peer, and have started nothing either.
    saved = [r for r in reports if r.code == ExitCode.SAVED]
    if saved:
        return ExitCode.SAVED, saved[0].text
    peers = [r for r in reports if r.code == ExitCode.PEER]
    if peers:
        return ExitCode.PEER, peers[0].text
    if stopped in deaths.values() or (asked and not deaths):
        return stopped, nothing_started(stopped)
    return _said_nothing(deaths, hosts)


def _on(rank: int, hosts: Mapping[int, str] | None) -> str:
    return f" on {hosts[rank]}" if hosts and rank in hosts else ""


def _said_nothing(deaths: dict[int, int], hosts: Mapping[int, str] | None) -> tuple[int, str]:
    rank, code = min(deaths.items(), default=(0, ExitCode.BUG))
    return (
        code if code > 0 else ExitCode.BUG
    ), f"worker {rank}{_on(rank, hosts)} ended with exit code {code} and said nothing"
