"""`stagerun run --nproc N`: N workers on this machine, started, watched and ended by this process, which needs no torch.

Each worker is the same command again with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set. It writes how it ended into a report
folder, so that one clear message comes out, and not one from each worker.
"""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from stagerun.base.errors import AGAIN, ExitCode, PeerError
from stagerun.base.text import duration
from stagerun.launch.folder import (
    LAUNCHER_PID,
    REPORT_DIR,
    Asked,
    Report,
    ask,
    nothing_started,
    reports,
    unwritable,
)
from stagerun.launch.stopping import GRACE_S, least_before
from stagerun.system import signals
from stagerun.system.files import own_folder
from stagerun.system.process import program
from stagerun.system.world import STORE_FILE

FOLDER_PREFIX = "stagerun-run-"  # not that of versions which locked a file in it
_FOLDER = os.O_RDONLY | os.O_DIRECTORY
_POLL_S = 0.05
_END_S = 30.0  # that workers have to end when another has failed


def run_workers(
    command: Sequence[str],
    nproc: int,
    threads: int,
    grace: float = GRACE_S,
    stopped: int = ExitCode.SAVED,
    saves: bool = True,
) -> tuple[int, str]:
    """Run `stagerun COMMAND...` in `nproc` workers and wait. Main thread only: the workers die with the thread that started
    them (PR_SET_PDEATHSIG).

    Return the exit code for the user, and what to say on stderr. The signals of `stop_signals` are passed on; the workers then have
    `grace` seconds. `stopped`: the code of a stop before any worker has started. `saves`: rank 0 may have something to save
    when another fails, and is waited for as long. StorageError without a folder for temporary files.
    """
    with supervised(grace) as supervisor:
        # All workers are here, so they meet on the loopback device, whatever this host's name resolves to.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        found, deaths = supervisor.run(command, nproc, threads, saves)
        code, text = verdict(found, deaths, supervisor.asked is not None, stopped)
    if supervisor.late and supervisor.asked is not None and code == ExitCode.PEER:
        text = too_late(supervisor.asked.signal, grace)
    return code, text


@dataclass(frozen=True, slots=True)
class Node:
    """This host among those of a job of `size` workers. `first`: rank of its first worker. `endpoint`: ADDRESS:PORT on the first host, where
    all meet, as each of them reaches it."""

    first: int
    size: int
    endpoint: str


class Supervisor:
    """Starts this host's workers, passes stop signals on, and ends those that are left when one fails or when their time is over."""

    def __init__(self, folder: Path, grace: float) -> None:
        self.folder, self.grace = folder, grace
        self.asked: Asked | None = None
        self.late = False  # workers had not ended when their time was over, and were killed
        self.requests: deque[int] = deque()  # stop signals; other threads may add to them
        self._interrupts = 0
        self._children: dict[int, subprocess.Popen[bytes]] = {}  # by rank
        self._killed: set[int] = set()

    def request(self, number: int, frame: FrameType | None = None) -> None:
        """Handle a stop signal: from the kernel, or from the launcher on another host, in any thread."""
        self.requests.append(number)

    def run(
        self, command: Sequence[str], nproc: int, threads: int, saves: bool, node: Node | None = None
    ) -> tuple[list[Report], dict[int, int]]:
        """Run `stagerun COMMAND...` in this host's workers, to their end; return what they reported, and the exit codes of those that
        failed, by rank: -SIGTERM for those that had to be killed. `node`: where other hosts have workers, too. OSError where a report is
        missing and the folder takes no more files."""
        node = node or Node(0, nproc, "127.0.0.1:1")
        if node.size == nproc:  # they meet in a file: the port is only a value that torch wants
            (self.folder / STORE_FILE).touch()
        self._answer()
        if self.asked is None:
            self._start(command, nproc, threads, node)
            self._wait(saves)
        signals.settle()  # what comes now changes nothing
        found = reports(self.folder, nproc, node.first)
        if len(found) < nproc and not any(one.code == ExitCode.DONE for one in found):  # was there room for a report?
            (self.folder / "room").touch()
        codes = {rank: child.returncode for rank, child in self._children.items() if child.returncode}
        return found, {rank: -signal.SIGTERM if rank in self._killed else code for rank, code in codes.items()}

    def _start(self, command: Sequence[str], nproc: int, threads: int, node: Node) -> None:
        address, _, port = node.endpoint.rpartition(":")
        same = {
            "WORLD_SIZE": str(node.size),
            "LOCAL_WORLD_SIZE": str(nproc),
            "MASTER_ADDR": address,
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": str(threads),
        }
        words = [sys.executable, "-u", *program("stagerun"), *command]
        with signals.held():  # a worker answers what comes from its first instruction on
            for local in range(nproc):
                rank = node.first + local
                mine = {"RANK": str(rank), "LOCAL_RANK": str(local)}
                try:  # a session of its own: Ctrl-C is for this process, which asks each worker once
                    self._children[rank] = subprocess.Popen(
                        words, env={**os.environ, **same, **mine}, start_new_session=True
                    )
                except OSError as error:
                    self.kill()
                    for child in self._children.values():
                        child.wait()
                    hint = "give fewer --nproc, or see how many processes you may have: `ulimit -u`"
                    raise PeerError(f"worker {rank} can't be started: {error.strerror}", hint) from error

    def _wait(self, saves: bool) -> None:
        """Rank 0 learns that a worker is gone from that one's sockets, and may be writing what is trained to a slow disk: it has as long as
        after a signal. It may have left its report before it is done with that."""
        failed_at = 0.0
        while left := [rank for rank, child in self._children.items() if child.poll() is None]:
            self._answer()
            now = time.monotonic()
            if not failed_at and any(child.returncode for child in self._children.values()):
                failed_at = now
                for rank in left:
                    self._children[rank].terminate()
            if self.asked is not None and now > self.asked.at + least_before(self.grace):
                self.late = True
                self._kill(left)
            patient = saves and 0 in left and (self.folder / "0.pid").exists()
            if failed_at and now > failed_at + (least_before(self.grace) if patient else _END_S):
                self._kill(left)
            time.sleep(_POLL_S)
        if self.asked is not None:  # a second Ctrl-C that came just now
            self._answer()

    def _answer(self) -> None:
        """Pass the first request on; a second SIGINT ends all at once: someone at the keyboard means it."""
        while self.requests:
            number = signal.Signals(self.requests.popleft())
            self._interrupts += number == signal.SIGINT
            if self.asked is None:
                self.asked = ask(self.folder, number)
            elif number == signal.SIGINT and self._interrupts > 1:
                self.kill()
                first = reports(self.folder, 1)
                shutil.rmtree(self.folder, ignore_errors=True)
                if first and first[0].code in (ExitCode.DONE, ExitCode.SAVED):  # all is on disk by then
                    signals.end_at_once(first[0].code, first[0].text)
                signals.end_at_once(ExitCode.INTERRUPTED, "ended without saving")

    def kill(self) -> None:
        """Kill all workers; also from another thread."""
        self._kill(list(self._children))

    def _kill(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self._killed.add(rank)
            self._children[rank].kill()


@contextmanager
def supervised(grace: float) -> Iterator[Supervisor]:
    """Give what starts and ends the workers, with a report folder, which they share. Main thread. StorageError without a folder for temporary
    files."""
    folder = None
    try:
        with signals.held():  # one that came in between would leave the folder behind
            sweep()
            made = Path(tempfile.mkdtemp(prefix=f".{FOLDER_PREFIX}"))
            held = os.open(made, _FOLDER)
            with suppress(OSError):  # a file system without locks, where nothing is swept either
                fcntl.flock(held, fcntl.LOCK_SH)
            # It has its name only once it is held, so that no other launcher finds it free meanwhile.
            folder = made.rename(made.with_name(made.name.removeprefix(".")))
            supervisor = Supervisor(folder, grace)
            for number in signals.stop_signals():
                signal.signal(number, supervisor.request)
    except OSError as error:
        where = Path(error.filename).parent if error.filename else Path(os.environ.get("TMPDIR", "/tmp"))
        failure = unwritable(error, where)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        raise failure from error
    os.environ[REPORT_DIR] = str(folder)
    os.environ[LAUNCHER_PID] = str(os.getpid())
    try:
        yield supervisor
    except OSError as error:
        if not Path(str(error.filename)).is_relative_to(folder):
            raise
        raise unwritable(error, folder) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


def too_late(number: signal.Signals, grace: float) -> str:
    return (
        f"workers had not ended {duration(least_before(grace))} after {number.name}, and were killed\n"
        f"  hint: {AGAIN}; a longer --grace gives them more time"
    )


def sweep() -> None:
    """Remove the report folders of this user's killed launchers: nobody holds their lock. A lock, and not a process's number: containers
    that share /tmp don't share numbers. Others can make such a folder, too, or a link: neither is followed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        with suppress(OSError):
            held = os.open(folder, _FOLDER | os.O_NOFOLLOW)
            try:
                if own_folder(os.fstat(held)):
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(held)


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
    `deaths`: exit codes by rank, negative for a signal. `asked`: the launcher was asked to stop; `stopped` is
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
        # Those that were left are ended with SIGTERM: another signal tells more.
        rank, code = min(killed.items(), key=lambda death: (death[1] == -signal.SIGTERM, death[0]))
        return ExitCode.PEER, (
            f"worker {rank}{_on(rank, hosts)} was killed by {signal.Signals(-code).name}\n  hint: {AGAIN}"
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
