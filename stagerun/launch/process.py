"""What a worker process owes to its launcher: to die with it, and to stop when it is told."""

import contextlib
import ctypes
import os
import signal
import sys
from types import FrameType

from stagerun.errors import ExitCode, PeerError
from stagerun.launch.local import LAUNCHER_PID, anybody_ended
from stagerun.launch.signals import stop_signals

_PR_SET_PDEATHSIG = 1


def die_with_launcher() -> None:
    """Has the kernel kill this process when the launcher dies, even by SIGKILL. Call first, from the main thread.

    The launcher may have died before the call took effect; then this process has another parent already, and ends here.
    Done under our own launcher and under torchrun, which start workers from their main thread. Other launchers may not,
    and the kernel follows the parent's *thread*: under mpirun and srun nothing is done, they clean up themselves.
    """
    launcher = os.environ.get(LAUNCHER_PID)
    if (launcher is None and "TORCHELASTIC_RUN_ID" not in os.environ) or not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise PeerError(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
    if launcher is not None and os.getppid() != int(launcher):
        raise PeerError("the launcher is gone")


class StopRequest:
    """Whether this process was told to stop: one of `stop_signals` sets it, nothing else happens in a handler.

    A second SIGINT ends the process at once: somebody at the keyboard means it. A second SIGTERM does not, because
    schedulers and torchrun's agent send several.
    """

    def __init__(self, doing: str = "to save", after: str = "this iteration") -> None:
        """`doing`: what is said to be done before the end, `after`: what is finished first."""
        self.signal: signal.Signals | None = None
        self._doing, self._after = doing, after

    def __call__(self) -> bool:
        return self.signal is not None

    def install(self) -> None:
        for number in stop_signals():
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # os.write, because a handler may interrupt a print half way; rank 0 speaks for all. When a worker has ended in an
        # error, the agent sends SIGTERM to the others: nobody asked for a stop, and that worker's message is the one to
        # show. It leaves its report before it ends, so before the agent can see that it did.
        speaks = os.environ.get("RANK", "0") == "0" and not anybody_ended()
        if self.signal is not None and number == signal.SIGINT and self.signal == signal.SIGINT:
            if speaks:
                with contextlib.suppress(OSError):  # nobody reads any more
                    os.write(2, b"\nended without saving\n")
            os._exit(ExitCode.INTERRUPTED)
        if self.signal is None and speaks:
            with contextlib.suppress(OSError):  # nobody reads any more
                os.write(2, f"\n{signal.Signals(number).name}: stopping after {self._after}, {self._doing}\n".encode())
        self.signal = signal.Signals(number)
