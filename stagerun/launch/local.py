"""`stagerun run --nproc N`: N workers on this machine, started, watched and ended by this process, which needs no torch.

Each worker is the same command again with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set. It writes how it ended into a report
folder, so that one clear message comes out, and not one from each worker.
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
from stagerun.launch.folder import LAUNCHER_PID, REPORT_DIR, Report, leave, nothing_started, reports
from stagerun.launch.stopping import GRACE_S, least_before
from stagerun.system import signals
from stagerun.system.files import why
from stagerun.system.process import program
from stagerun.system.pulse import Limits
from stagerun.system.world import STORE_FILE, default_threads

FOLDER_PREFIX = "stagerun-run-"
_POLL_S = 0.05
_END_S = 30.0  # that workers have to end when another has failed


@dataclass(frozen=True, slots=True)
class Orders:
    """What all workers do: `stagerun COMMAND...`, with `threads` each (None: the processors shared evenly). `saves`: there is something to
    save, within `grace` seconds from a signal, and rank 0 may save when another worker fails. `limits`: how long a worker may stay in a
    section; None: it has no monitor."""

    command: tuple[str, ...]
    threads: int | None = None
    grace: float = GRACE_S
    saves: bool = True
    limits: Limits | None = None

    @property
    def stopped(self) -> ExitCode:
        """The exit code of a signal before anything has started."""
        return ExitCode.SAVED if self.saves else ExitCode.INTERRUPTED


@dataclass(slots=True)
class Outcome:
    """How workers ended. `deaths`: exit codes of those that failed, by rank, negative for a signal; -SIGTERM for those that had to be killed.
    `asked`: the signal by which a stop was asked for. `late`: some had not ended when their time was over, and were killed.
    `interrupted`: by a second Ctrl-C, all were."""

    reports: list[Report]
    deaths: dict[int, int]
    asked: int | None = None
    late: bool = False
    interrupted: bool = False

    @property
    def failed(self) -> bool:
        return bool(self.deaths) or any(report.code for report in self.reports)


def run_workers(orders: Orders, nproc: int) -> tuple[int, str]:
    """Run `nproc` workers and wait. Main thread only: the workers die with the thread that started them (PR_SET_PDEATHSIG).

    Return the exit code for the user, and what to say on stderr. The signals of `stop_signals` are passed on. StorageError without a folder
    for temporary files.
    """
    with supervised(orders) as supervisor:
        # All workers are here, so they meet on the loopback device, whatever this host's name resolves to.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        return verdict(supervisor.run(Node(0, nproc, nproc)), orders)


@dataclass(frozen=True, slots=True)
class Node:
    """A host's workers: ranks `first` .. `first` + `nproc` - 1 of `size`, which all meet at `endpoint`."""

    first: int
    nproc: int
    size: int
    endpoint: str = "127.0.0.1:1"  # of a single host's workers, which meet in a file: torch wants some value


class Supervisor:
    """Starts this host's workers, passes stop signals on, and ends those that are left when one fails or when their time is over."""

    def __init__(self, folder: Path, orders: Orders) -> None:
        self.folder, self.orders = folder, orders
        self._asked: int | None = None  # the stop signal that counts
        self._asked_at = 0.0
        self._late = False
        self.requests: deque[int] = deque()  # stop signals; other threads may add to them
        self._interrupts = 0
        self._children: dict[int, subprocess.Popen[bytes]] = {}  # by rank
        self._killed: set[int] = set()

    def request(self, number: int, frame: FrameType | None = None) -> None:
        """Handle a stop signal: from the kernel, or from the launcher on another host, in any thread."""
        self.requests.append(number)

    def run(self, node: Node) -> Outcome:
        """Run this host's workers to their end. OSError where a report is missing and the folder takes no more files."""
        if node.size == node.nproc:
            (self.folder / STORE_FILE).touch()
        self._answer()
        if self._asked is None:
            self._start(node)
            self._wait()
        signals.settle()  # what comes now changes nothing
        found = reports(self.folder, node.nproc, node.first)
        if len(found) < node.nproc and not any(one.code == ExitCode.DONE for one in found):
            (self.folder / "room").touch()  # was there room for a report?
        codes = {rank: child.returncode for rank, child in self._children.items() if child.returncode}
        deaths = {rank: -signal.SIGTERM if rank in self._killed else code for rank, code in codes.items()}
        return Outcome(found, deaths, self._asked, self._late, self._interrupts > 1)

    def _start(self, node: Node) -> None:
        address, _, port = node.endpoint.rpartition(":")
        words = [sys.executable, "-u", *program("stagerun"), *self.orders.command]
        with signals.held():  # a worker answers what comes from its first instruction on
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
                try:  # a session of its own: Ctrl-C is for this process, which asks each worker once
                    self._children[rank] = subprocess.Popen(words, env={**os.environ, **world}, start_new_session=True)
                except OSError as error:
                    self.kill()
                    for child in self._children.values():
                        child.wait()
                    hint = "give fewer --nproc, or see how many processes you may have: `ulimit -u`"
                    raise PeerError(f"worker {rank} can't be started: {error.strerror}", hint) from error

    def _wait(self) -> None:
        """Rank 0 learns that a worker is gone from that one's sockets, and may be writing what is trained to a slow disk: it has as long as
        after a signal. It may have left its report before it is done with that."""
        failed_at, grace = 0.0, least_before(self.orders.grace)
        while left := [rank for rank, child in self._children.items() if child.poll() is None]:
            self._answer()
            if self._interrupts > 1:
                self.kill()
                return  # a worker that hangs in the kernel doesn't end
            now = time.monotonic()
            if not failed_at and any(child.returncode for child in self._children.values()):
                failed_at = now
                for rank in left:
                    self._children[rank].terminate()
            self._late = self._late or (self._asked is not None and now > self._asked_at + grace)
            patience = grace if self.orders.saves and 0 in left else _END_S
            if self._late or (failed_at and now > failed_at + patience):
                self.kill(left)
            time.sleep(_POLL_S)
        self._answer()  # a second Ctrl-C that came just now

    def _answer(self) -> None:
        """Pass the first request on. A second SIGINT ends all at once: someone at the keyboard means it."""
        while self.requests:
            number = self.requests.popleft()
            if number == signal.SIGINT:
                self._interrupts += 1
            if self._asked is None:
                self._asked, self._asked_at = number, time.monotonic()
                leave(self.folder / "stop", [number, self._asked_at])  # also for those that are to come
                for child in self._children.values():
                    child.terminate()

    def kill(self, ranks: Iterable[int] | None = None) -> None:
        """Kill all workers; also from another thread."""
        for rank in list(self._children) if ranks is None else ranks:
            self._killed.add(rank)
            self._children[rank].kill()


@contextmanager
def supervised(orders: Orders) -> Iterator[Supervisor]:
    """Give what starts and ends the workers, with a report folder, which they share. Main thread. StorageError without a folder for temporary
    files. Where this process is killed, the workers' monitors remove the folder."""
    folder = None
    try:
        with signals.held():  # one that came in between would leave the folder behind
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
            "make room there, or set TMPDIR to a folder on this machine that can be written",
        ) from error
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def verdict(outcome: Outcome, orders: Orders, hosts: Mapping[int, str] | None = None) -> tuple[int, str]:
    """The one exit code and message for all workers. `hosts`: by rank, where there are several.

    A worker that only lost its peers is not the cause; one that met an error of its own is, then one that was killed, then one
    that was asked to stop. A worker with nothing to say leaves it to the one that raised the error (`train.agreement`).
    """
    reports, deaths, asked, stopped = outcome.reports, outcome.deaths, outcome.asked is not None, orders.stopped
    code_of = {report.rank: report.code for report in reports}
    if outcome.interrupted:
        done = [one for one in reports if one.rank == 0 and one.code in (ExitCode.DONE, ExitCode.SAVED)]
        return (done[0].code, done[0].text) if done else (ExitCode.INTERRUPTED, "ended without saving")
    causes = [one for one in reports if one.code not in (ExitCode.DONE, ExitCode.SAVED, ExitCode.PEER)]
    if causes:
        telling = [one for one in causes if one.text] or causes
        alike = all(one.text == telling[0].text for one in telling)
        text = telling[0].text if alike else "\n".join(f"rank {one.rank}: {one.text}" for one in telling)
        return telling[0].code, text
    if 0 in code_of and set(code_of.values()) == {ExitCode.DONE}:
        return ExitCode.DONE, ""  # everything is on disk; what came then, a signal or a kill, was too late to matter

    def name(rank: int) -> str:
        return f"worker {rank}" + (f" on {hosts[rank]}" if hosts else "")

    late = ""
    if outcome.asked is not None and outcome.late:
        within, by = duration(least_before(orders.grace)), signal.Signals(outcome.asked).name
        late = f"workers had not ended {within} after {by}, and were killed\n  hint: {AGAIN}; a longer --grace gives them more time"
    killed = [rank for rank, code in deaths.items() if code < 0 and code_of.get(rank, ExitCode.DONE) == ExitCode.DONE]
    if killed:
        # Those that were left are ended with SIGTERM: another signal tells more.
        rank = min(killed, key=lambda rank: (deaths[rank] == -signal.SIGTERM, rank))
        text = f"{name(rank)} was killed by {signal.Signals(-deaths[rank]).name}\n  hint: {AGAIN}"
        return ExitCode.PEER, late or text
    silent = [rank for rank in deaths if deaths[rank] not in (stopped, ExitCode.PEER) and rank not in code_of]
    if asked or not silent:  # otherwise the stop of the others follows from it
        # Workers leave together once they have started, with all saved. One that leaves alone did so before it met the others: these
        # then miss a peer, and have started nothing either.
        failed = [one for one in reports if one.code != ExitCode.DONE]
        if first := min(failed, key=lambda one: one.code == ExitCode.PEER, default=None):
            return first.code, late if late and first.code == ExitCode.PEER else first.text
        if stopped in deaths.values() or (asked and (not deaths or ExitCode.INTERRUPTED in deaths.values())):
            return stopped, nothing_started(stopped)
    rank = min(silent or deaths, default=0)
    code = deaths.get(rank, ExitCode.BUG)
    return code if code > 0 else ExitCode.BUG, f"{name(rank)} ended with exit code {code} and said nothing"
