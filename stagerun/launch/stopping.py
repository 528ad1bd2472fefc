"""Stop signals: a worker stops in order, and dies with its launcher.

The launcher and its workers share a folder of small files, each written by a rename: `stop`, the request to all workers, and `RANK.json`, how
each worker ended.
"""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, NoReturn, TypeVar

import psutil

from stagerun.base.errors import ExitCode, PeerError
from stagerun.system import signals
from stagerun.system.files import write_whole
from stagerun.system.process import die_with_parent, lives, living, program
from stagerun.system.world import rank_said, started_by

T = TypeVar("T")
_ANSWER_S, _LOOK_EVERY_S = 0.05, 0.5
# Beginnings of their names: mpirun.openmpi, hydra_pmi_proxy.
_LAUNCHERS = ("mpirun", "mpiexec", "orterun", "orted", "prte", "hydra_pmi_proxy", "slurmstepd", "mpispawn")
# Default seconds, after a signal, to finish an iteration and write a snapshot. An iteration of a large batch on a few processors takes
# minutes; a second SIGINT ends the wait.
GRACE_S = 600


def least_before(grace: float) -> float:
    """Return the seconds after a signal when the remaining workers are killed: shortly before the scheduler does it, in time for a message."""
    return grace - min(2.0, grace / 10)


def mpi_launcher() -> psutil.Process | None:
    """Return the nearest ancestor that is a launcher of Open MPI, MPICH or Slurm; None where a container hides it."""
    with suppress(psutil.Error):
        return next((one for one in psutil.Process().parents() if one.name().startswith(_LAUNCHERS)), None)
    return None


def die_with_launcher() -> None:
    """Make the kernel kill this process when the launcher dies, even by SIGKILL. Call first, from the main thread.

    A launcher that died before the call has left this process to another parent: it ends here. stagerun's launcher and torchrun start
    workers from their main thread; MPI launchers and srun need not, and a script may come between: a thread polls for them. (Open MPI's
    mpirun, killed by SIGKILL, leaves its local ranks running.)
    """
    launcher = os.environ.get(LAUNCHER_PID)
    if launcher is None and "TORCHELASTIC_RUN_ID" not in os.environ:
        if started_by() and (ancestor := mpi_launcher()) is not None:
            with signals.held():
                threading.Thread(target=_die_with, args=(ancestor,), name="launcher", daemon=True).start()
        return
    try:
        die_with_parent()
    except OSError as error:
        raise PeerError(str(error.strerror)) from error
    if launcher is not None and os.getppid() != int(launcher):
        raise PeerError("the launcher is gone")


def start_command(
    words: Sequence[str], stdout: IO[bytes] | int, stderr: IO[bytes] | int, **environment: str
) -> "subprocess.Popen[bytes]":
    """Start `stagerun WORDS...`, which dies with this thread, in a new session: Ctrl-C is for this process alone."""
    return subprocess.Popen(
        [sys.executable, *program("stagerun"), *words],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
        env={**os.environ, LAUNCHER_PID: str(os.getpid()), **environment},
    )


def _die_with(process: psutil.Process) -> None:
    while lives(process):
        time.sleep(_LOOK_EVERY_S)
    os.kill(os.getpid(), signal.SIGKILL)


def aside(do: Callable[[], T], patience: float = math.inf) -> T:
    """Return `do()`, called in another thread: it waits outside of Python, where no handler runs, while this thread handles signals.
    TimeoutError after `patience` seconds."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(do())
        except BaseException as error:
            done.set_exception(error)

    with signals.held():
        threading.Thread(target=run, name="aside", daemon=True).start()
    end = time.monotonic() + patience
    while not done.done() and time.monotonic() < end:
        wait([done], _ANSWER_S)  # handle a signal that another thread got
    return done.result(0)


class StopRequest:
    """A request to stop, which one of `stop_signals` sets.

    A second SIGINT ends the process at once: someone at the keyboard means it. A second SIGTERM does not, because
    schedulers and launchers send several.
    """

    def __init__(self, doing: str = "to save", after: str = "this iteration", grace: float | None = None) -> None:
        """`doing`, `after`: words of the message: the work before the end, and what is finished first. `grace`: seconds from the signal to
        the end of the process; None: no limit."""
        self.signal: signal.Signals | None = None
        self.grace = grace
        self._doing, self._when = doing, lambda: f"after {after}"
        self._at = 0.0
        self._spoken = False
        self._interrupts = 0  # SIGINTs to this process
        self._nothing_started: int | None = None  # the exit code, until something is started
        self._settled: int | None = None  # the exit code, once all is done

    def __call__(self) -> bool:
        return self.signal is not None

    def left(self) -> float | None:
        """Return the seconds until the launcher would kill this process, shortly before the scheduler does; None without a request or a limit."""
        if self.signal is None or self.grace is None:
            return None
        return self._at + least_before(self.grace) - time.monotonic()

    def install(self, nothing_started: int | None = None) -> None:
        """Install the handlers, in the main thread. With an exit code `nothing_started` a signal ends the process until `begin` is called."""
        self._nothing_started = nothing_started
        for number in signals.stop_signals():
            signal.signal(number, self._handle)
        if (request := requested_stop()) is not None:
            self._stop(request[0])
        signals.release()

    def begin(self, when: Callable[[], str] | None = None) -> None:
        """Start the work: a signal now only sets the request, which the caller polls. `when` replaces `after`, evaluated at the signal."""
        self._when = when or self._when
        self._nothing_started = None

    def settle(self, code: int, text: str = "") -> bool:
        """Fix the exit code; ignore later signals, except a second SIGINT: a disk may hang. Return whether a launcher takes the `report`."""
        self._settled = code
        interruptible = signal.SIGINT in signals.stop_signals()
        signals.settle()
        if interruptible:
            signal.signal(signal.SIGINT, self._interrupt)
        return report(rank_said(), code, text)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self._interrupt(number, frame)
        self._stop(signal.Signals(number))

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._interrupts += 1
        if self._interrupts > 1:
            if self._settled in (ExitCode.DONE, ExitCode.SAVED):
                signals.end_at_once(self._settled, "")
            signals.end_at_once(ExitCode.INTERRUPTED, "ended without saving" if self._speaks() else "")

    def _stop(self, number: signal.Signals) -> None:
        if self._nothing_started is not None:
            self._leave(number, self._nothing_started)
        # The launcher forwards every signal as SIGTERM, and records it with its time, perhaps after a signal to all processes.
        if (request := requested_stop()) is not None:
            number, self._at = request
        elif self.signal is None:
            self._at = time.monotonic()
        self.signal = self.signal or number
        if not self._spoken and self._speaks():
            self._spoken, left = True, self.left()
            by = "" if left is None else time.strftime(" by %H:%M:%S", time.localtime(time.time() + left))
            signals.say(f"{self.signal.name}: stopping {self._when()}, {self._doing}{by}")

    @staticmethod
    def _leave(number: signal.Signals, code: int) -> NoReturn:
        rank, shared = rank_said(), folder()
        ended = [file.stem for file in shared.glob("*.json")] if shared is not None else []
        if requested_stop() is None and set(ended) - {str(rank)}:
            # The launcher ends this worker because another one ended, whose report says why.
            signals.end_at_once(ExitCode.PEER, "")
        reported = report(rank, code, nothing_started(code))
        signals.end_at_once(code, "" if reported or rank else f"{number.name}: {nothing_started(code)}")

    @staticmethod
    def _speaks() -> bool:
        """Return whether to print a message: rank 0 does, for all. A launcher's signal without a recorded request follows from a worker that
        ended, whose report is shown instead."""
        return rank_said() == 0 and (folder() is None or requested_stop() is not None)


REPORT_DIR = "STAGERUN_REPORT_DIR"
LAUNCHER_PID = "STAGERUN_LAUNCHER_PID"


@dataclass(frozen=True, slots=True)
class Report:
    """A worker's end. `text`: its message to the user."""

    rank: int
    code: int
    text: str


def folder() -> Path | None:
    """Return the folder; None without a launcher of stagerun."""
    name = os.environ.get(REPORT_DIR)
    return None if name is None else Path(name)


def remove_left_folder() -> None:
    """Remove the folder of a launcher that was killed."""
    shared, launcher = folder(), os.environ.get(LAUNCHER_PID)
    if shared is not None and launcher is not None and living(int(launcher)) is None:
        shutil.rmtree(shared, ignore_errors=True)


def report(rank: int, code: int, text: str) -> bool:
    """Write a worker's end for the launcher. Return False without a launcher: print it then."""
    shared = folder()
    return shared is not None and leave(shared / f"{rank}.json", {"code": code, "text": text})


def reports(shared: Path, nproc: int, first: int = 0) -> list[Report]:
    """Return the reports of ranks `first` .. `first` + `nproc` - 1."""
    ended = []
    for rank in range(first, first + nproc):
        with suppress(OSError, ValueError, KeyError):  # killed before it wrote
            data = json.loads((shared / f"{rank}.json").read_text())
            ended.append(Report(rank, data["code"], data["text"]))
    return ended


def requested_stop() -> tuple[signal.Signals, float] | None:
    """Return the launcher's request to stop, if any, with its time by time.monotonic(), which the processes of a machine share."""
    with suppress(OSError):
        if (shared := folder()) is not None:
            number, at = json.loads((shared / "stop").read_text())
            return signal.Signals(number), at
    return None


def nothing_started(code: int) -> str:
    """Return the message of a stop before the start, which ends with `code`."""
    if code == ExitCode.SAVED:
        return "stopped before anything was started; run the same command again"
    return "interrupted before anything was started"


def leave(path: Path, value: object) -> bool:
    """Write the whole file, or nothing: return False on a full disk, or without the folder of an ended launcher."""
    with suppress(OSError):
        write_whole(path, json.dumps(value).encode(), sync=False)
        return True
    return False
