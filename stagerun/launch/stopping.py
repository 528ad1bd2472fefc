"""Stop signals: a worker stops in order; it dies with its launcher."""

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from types import FrameType
from typing import NoReturn, TypeVar

import psutil

from stagerun.base.errors import ExitCode, PeerError
from stagerun.launch.folder import LAUNCHER_PID, another_ended, asked, folder, nothing_started, report
from stagerun.system import signals
from stagerun.system.process import die_with_parent, lives
from stagerun.system.world import rank_said, started_by

T = TypeVar("T")
_ANSWER_S, _LOOK_EVERY_S = 0.05, 0.5
# Beginnings of their names: mpirun.openmpi, hydra_pmi_proxy.
_LAUNCHERS = ("mpirun", "mpiexec", "orterun", "orted", "prte", "hydra_pmi_proxy", "slurmstepd", "mpispawn")
# Seconds that workers have, after a signal, to finish an iteration and write a snapshot, where no one says otherwise. An
# iteration of a large batch on a few processors takes minutes; who can't wait sends a second SIGINT.
GRACE_S = 600


def least_before(grace: float) -> float:
    """Seconds after a signal at which what has not ended is ended by us: a little before the scheduler does it with all, so that
    there is time to say so."""
    return grace - min(2.0, grace / 10)


def mpi_launcher() -> psutil.Process | None:
    """The launcher of a rank that Open MPI, MPICH or Slurm has started: its nearest ancestor that is one. None where no ancestor that this
    process can see is one: in a container, say."""
    with suppress(psutil.Error):
        return next((found for found in psutil.Process().parents() if found.name().startswith(_LAUNCHERS)), None)
    return None


def die_with_launcher() -> None:
    """Has the kernel kill this process when the launcher dies, even by SIGKILL. Call first, from the main thread.

    The launcher may have died before the call took effect; then this process has another parent already, and ends here.
    Done under our own launcher and under torchrun, which start workers from their main thread. Of an MPI's launcher and of srun
    no one promises that, and a script may stand between: there a thread watches. Open MPI's mpirun, killed by SIGKILL, leaves the ranks of
    its own host running.
    """
    launcher = os.environ.get(LAUNCHER_PID)
    if launcher is None and "TORCHELASTIC_RUN_ID" not in os.environ:
        if started_by() and (found := mpi_launcher()) is not None:
            with signals.held():
                threading.Thread(target=_die_with, args=(found,), name="launcher", daemon=True).start()
        return
    try:
        die_with_parent()
    except OSError as error:
        raise PeerError(str(error.strerror)) from error
    if launcher is not None and os.getppid() != int(launcher):
        raise PeerError("the launcher is gone")


def _die_with(process: psutil.Process) -> None:
    while lives(process):
        time.sleep(_LOOK_EVERY_S)
    os.kill(os.getpid(), signal.SIGKILL)


def aside(do: Callable[[], T], patience: float = math.inf) -> T:
    """`do()` in a thread of its own: it waits outside of Python, where no handler runs, and this thread answers signals meanwhile, whichever
    thread they find. TimeoutError after `patience` seconds."""
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
        wait([done], _ANSWER_S)  # a signal that another thread got is answered when this one wakes up
    return done.result(0)


class StopRequest:
    """Whether this process was asked to stop: one of `stop_signals` sets it, and says so.

    A second SIGINT ends the process at once: someone at the keyboard means it. A second SIGTERM does not, because
    schedulers and launchers send several.
    """

    def __init__(self, doing: str = "to save", after: str = "this iteration", grace: float | None = None) -> None:
        """`doing`: what is said to be done before the end, `after`: what is finished first. `grace`: seconds from the signal to
        when the process must have ended; None: it may take as long as it takes."""
        self.signal: signal.Signals | None = None
        self.grace = grace
        self._doing, self._when = doing, lambda: f"after {after}"
        self._at = 0.0
        self._spoken = False
        self._interrupts = 0  # SIGINTs that came to this very process
        self._nothing_started: int | None = None  # the exit code, until something is started
        self._settled: int | None = None  # the exit code, once all is done

    def __call__(self) -> bool:
        return self.signal is not None

    def left(self) -> float | None:
        """Seconds until this process must have ended, which is when our launcher would kill it, a little before the scheduler does; None:
        no one has asked, or it has all the time it needs."""
        if self.signal is None or self.grace is None:
            return None
        return self._at + least_before(self.grace) - time.monotonic()

    def install(self, nothing_started: int | None = None) -> None:
        """Main thread. With an exit code for `nothing_started` a signal ends the process with it, until `begin` is called."""
        self._nothing_started = nothing_started
        for number in signals.stop_signals():
            signal.signal(number, self._handle)
        if (request := asked()) is not None:
            self._stop(request[0])
        signals.release()

    def begin(self, when: Callable[[], str] | None = None) -> None:
        """From now on there is something to finish first. Whoever has started asks whether to stop. `when` says in the place of `after`
        when that will be, at the time of a signal."""
        self._when = when or self._when
        self._nothing_started = None

    def settle(self, code: int, text: str = "") -> bool:
        """What comes now is too late to change how this process ends: with `code`. But someone at the keyboard may still mean it (a
        second SIGINT), where a disk hangs that is waited for. False when no launcher of ours waits for the `report`."""
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
        # The launcher passes every signal on as SIGTERM, and knows since when. Its word may come after a signal that was sent to all
        # processes alike.
        if (request := asked()) is not None:
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
        rank = rank_said()
        if asked() is None and another_ended(rank):
            # Sent since that one has ended: no one asked for a stop, and that worker's report tells why.
            signals.end_at_once(ExitCode.PEER, "")
        reported = report(rank, code, nothing_started(code))
        signals.end_at_once(code, "" if reported or rank else f"{number.name}: {nothing_started(code)}")

    @staticmethod
    def _speaks() -> bool:
        """Rank 0 does, for all. Our launcher's signals come with a word of what it was asked. A signal without one is as a rule the
        launcher's since a worker has ended: no one asked for a stop, and why that worker ended is what to show. Whoever sends one to
        a worker by its number gets to know at the end only."""
        return rank_said() == 0 and (folder() is None or asked() is not None)
