"""`stagerun run --nproc N`: N workers on this machine, started, watched and ended by this process, which needs no torch.

Each worker is the same command with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set. It writes how it ended into a report
folder, so that the user gets one message.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from stagerun.base.errors import AGAIN, ExitCode, PeerError, StorageError
from stagerun.base.text import duration
from stagerun.launch.stopping import (
    GRACE_S,
    LAUNCHER_PID,
    REPORT_DIR,
    Report,
    least_before,
    leave,
    nothing_started,
    reports,
)
from stagerun.system import signals
from stagerun.system.files import why
from stagerun.system.process import program
from stagerun.system.pulse import Limits
from stagerun.system.world import STORE_FILE, default_threads

FOLDER_PREFIX = "stagerun-run-"
_POLL_S = 0.05
_END_S = 30.0  # for workers to end after another's failure


@dataclass(frozen=True, slots=True)
class Orders:
    """The workers' command, `stagerun COMMAND...`, with `threads` each (None: the processors shared evenly). `saves`: a signal, or another
    worker's failure, leaves `grace` seconds to save. `limits`: how long a worker may stay in a section; None: without a monitor."""

    command: tuple[str, ...]
    threads: int | None = None
    grace: float = GRACE_S
    saves: bool = True
    limits: Limits | None = None

    @property
    def stopped(self) -> ExitCode:
        """Return the exit code of a signal before anything has started."""
        return ExitCode.SAVED if self.saves else ExitCode.INTERRUPTED


@dataclass(slots=True)
class Outcome:
    """Ends of workers. `deaths`: exit codes of failed workers by rank, negative for a signal, -SIGTERM for workers that were killed.
    `stop`: the signal that requested a stop. `late`: some exceeded the grace period and were killed. `interrupted`: a second Ctrl-C
    killed all."""

    reports: list[Report]
    deaths: dict[int, int]
    stop: int | None = None
    late: bool = False
    interrupted: bool = False

    @property
    def failed(self) -> bool:
        return bool(self.deaths) or any(report.code for report in self.reports)


def run_workers(orders: Orders, nproc: int) -> tuple[int, str]:
    """Run `nproc` workers and wait. Main thread only: the workers die with the thread that started them (PR_SET_PDEATHSIG).

    Return the exit code and the message for stderr. Stop signals are forwarded. StorageError without a folder for temporary files.
    """
    with supervised(orders) as supervisor:
        # Local workers meet on the loopback device, whatever this host's name resolves to.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        return verdict(supervisor.run(Node(0, nproc, nproc)), orders)


@dataclass(frozen=True, slots=True)
class Node:
    """A host's workers: ranks `first` .. `first` + `nproc` - 1 of `size`, and where all meet."""

    first: int
    nproc: int
    size: int
    endpoint: str = "127.0.0.1:1"  # workers of a single host meet in a file; torch needs a value


class Supervisor:
    """Starts this host's workers, forwards stop signals, and ends the remaining workers after a failure or the grace period."""

    def __init__(self, folder: Path, orders: Orders) -> None:
        self.folder, self.orders = folder, orders
        self._stop: int | None = None  # the stop signal that counts
        self._stop_at = 0.0
        self._late = False
        self.requests: deque[int] = deque()  # stop signals; other threads may add to them
        self._interrupts = 0
        self._children: dict[int, subprocess.Popen[bytes]] = {}  # by rank
        self._killed: set[int] = set()

    def request(self, number: int, frame: FrameType | None = None) -> None:
        """Handle a stop signal of the kernel, or of the launcher on another host, in any thread."""
        self.requests.append(number)

    def run(self, node: Node) -> Outcome:
        """Run this host's workers to their end. OSError for a missing report in a folder without room."""
        if node.size == node.nproc:
            (self.folder / STORE_FILE).touch()
        self._answer()
        if self._stop is None:
            self._start(node)
            self._wait()
        signals.settle()  # later signals change nothing
        ended = reports(self.folder, node.nproc, node.first)
        if len(ended) < node.nproc and not any(one.code == ExitCode.DONE for one in ended):
            (self.folder / "room").touch()  # fails without room for a report
        codes = {rank: child.returncode for rank, child in self._children.items() if child.returncode}
        deaths = {rank: -signal.SIGTERM if rank in self._killed else code for rank, code in codes.items()}
        return Outcome(ended, deaths, self._stop, self._late, self._interrupts > 1)

    def _start(self, node: Node) -> None:
        address, _, port = node.endpoint.rpartition(":")
        words = [sys.executable, "-u", *program("stagerun"), *self.orders.command]
        with signals.held():  # a worker handles signals from its first instruction
            for local in range(node.nproc):
                rank = node.first + local
                world = {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(node.size),
                    "LOCAL_RANK": str(local),
                    "LOCAL_WORLD_SIZE": str(node.nproc),
                    "MASTER_ADDR": address,
                    "MASTER_PORT": port,
                    "OMP_NUM_THREADS": str(self.orders.threads or default_threads(node.nproc)),
                }
                try:  # a new session: Ctrl-C is for this process, which stops each worker once
                    self._children[rank] = subprocess.Popen(words, env={**os.environ, **world}, start_new_session=True)
                except OSError as error:
                    self.kill()
                    for child in self._children.values():
                        child.wait()
                    hint = "reduce --nproc, or raise the limit on processes: `ulimit -u`"
                    raise PeerError(f"worker {rank} can't be started: {error.strerror}", hint) from error

    def _wait(self) -> None:
        """Wait for the workers. After another's failure rank 0 may still write a snapshot to a slow disk, so it has the grace period of a
        signal, even if it has reported its end already."""
        failed_at, grace = 0.0, least_before(self.orders.grace)
        while left := [rank for rank, child in self._children.items() if child.poll() is None]:
            self._answer()
            if self._interrupts > 1:
                self.kill()
                return  # a worker that hangs in the kernel never ends
            now = time.monotonic()
            if not failed_at and any(child.returncode for child in self._children.values()):
                failed_at = now
                for rank in left:
                    self._children[rank].terminate()
            self._late = self._late or (self._stop is not None and now > self._stop_at + grace)
            patience = grace if self.orders.saves and 0 in left else _END_S
            if self._late or (failed_at and now > failed_at + patience):
                self.kill(left)
            time.sleep(_POLL_S)
        self._answer()  # a late second Ctrl-C

    def _answer(self) -> None:
        """Forward the first request. A second SIGINT ends all at once: someone at the keyboard means it."""
        while self.requests:
            number = self.requests.popleft()
            if number == signal.SIGINT:
                self._interrupts += 1
            if self._stop is None:
                self._stop, self._stop_at = number, time.monotonic()
                leave(self.folder / "stop", [number, self._stop_at])  # also for workers that start later
                for child in self._children.values():
                    child.terminate()

    def kill(self, ranks: Iterable[int] | None = None) -> None:
        """Kill all workers; also from another thread."""
        for rank in list(self._children) if ranks is None else ranks:
            self._killed.add(rank)
            self._children[rank].kill()


@contextmanager
def supervised(orders: Orders) -> Iterator[Supervisor]:
    """Yield a supervisor with a report folder, in the main thread. If this process is killed, the workers' monitors remove the folder.
    StorageError without a folder for temporary files."""
    folder = None
    try:
        with signals.held():  # a signal here would leave the folder behind
            folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
            supervisor = Supervisor(folder, orders)
            for number in signals.stop_signals():
                signal.signal(number, supervisor.request)
        os.environ[REPORT_DIR] = str(folder)
        os.environ[LAUNCHER_PID] = str(os.getpid())
        yield supervisor
    except OSError as error:
        if folder is not None and not Path(str(error.filename)).is_relative_to(folder):
            raise
        where = Path(os.environ.get("TMPDIR", "/tmp"))
        raise StorageError(
            f"no folder for temporary files in {where}: {why(error, where)}",
            "make room, or set TMPDIR to a writable folder on this machine",
        ) from error
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def verdict(outcome: Outcome, orders: Orders, hosts: Mapping[int, str] | None = None) -> tuple[int, str]:
    """Return the exit code and message of all workers. `hosts`: by rank, if several.

    The cause is a worker with an error, else a killed one, else a stopped one; never a worker that only lost its peers. An error that
    all ranks raise has its text in one report (`train.agreement`).
    """
    reports, deaths, stop, stopped = outcome.reports, outcome.deaths, outcome.stop is not None, orders.stopped
    code_of = {report.rank: report.code for report in reports}
    if outcome.interrupted:
        done = [one for one in reports if one.rank == 0 and one.code in (ExitCode.DONE, ExitCode.SAVED)]
        return (done[0].code, done[0].text) if done else (ExitCode.INTERRUPTED, "ended without saving")
    causes = [one for one in reports if one.code not in (ExitCode.DONE, ExitCode.SAVED, ExitCode.PEER)]
    if causes:
        explained = [one for one in causes if one.text] or causes
        alike = all(one.text == explained[0].text for one in explained)
        text = explained[0].text if alike else "\n".join(f"rank {one.rank}: {one.text}" for one in explained)
        return explained[0].code, text
    if 0 in code_of and set(code_of.values()) == {ExitCode.DONE}:
        return ExitCode.DONE, ""  # everything is on disk; a later signal or kill doesn't matter

    def name(rank: int) -> str:
        return f"worker {rank}" + (f" on {hosts[rank]}" if hosts else "")

    late = ""
    if outcome.stop is not None and outcome.late:
        within, by = duration(least_before(orders.grace)), signal.Signals(outcome.stop).name
        late = f"workers did not end within {within} of {by} and were killed\n  hint: {AGAIN}; a longer --grace gives them more time"
    killed = [rank for rank, code in deaths.items() if code < 0 and code_of.get(rank, ExitCode.DONE) == ExitCode.DONE]
    if killed:
        # The supervisor's SIGTERM says less than another signal.
        rank = min(killed, key=lambda rank: (deaths[rank] == -signal.SIGTERM, rank))
        text = f"{name(rank)} was killed by {signal.Signals(-deaths[rank]).name}\n  hint: {AGAIN}"
        return ExitCode.PEER, late or text
    silent = [rank for rank in deaths if deaths[rank] not in (stopped, ExitCode.PEER) and rank not in code_of]
    if stop or not silent:  # otherwise a silent one caused the others' stop
        # Started workers stop together, with all saved. A worker that stopped alone had not met the others, which then miss a peer and
        # have started nothing either.
        failed = [one for one in reports if one.code != ExitCode.DONE]
        if first := min(failed, key=lambda one: one.code == ExitCode.PEER, default=None):
            return first.code, late if late and first.code == ExitCode.PEER else first.text
        if stopped in deaths.values() or (stop and (not deaths or ExitCode.INTERRUPTED in deaths.values())):
            return stopped, nothing_started(stopped)
    rank = min(silent or deaths, default=0)
    code = deaths.get(rank, ExitCode.BUG)
    return code if code > 0 else ExitCode.BUG, f"{name(rank)} ended with exit code {code} without a message"
