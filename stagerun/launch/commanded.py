"""A command that this process starts and waits for: signals go on to it in the way that it takes them."""

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from stagerun import signals
from stagerun.child import die_with_parent
from stagerun.errors import ExitCode, UsageError

# Launchers that hand SIGUSR1 on to all ranks and wait; SIGTERM ends some of them within a second. By the beginnings of their
# names.
_TAKES_USR1 = ("mpirun", "mpiexec", "orterun", "prterun", "srun")
# From a second Ctrl-C to SIGKILL.
_HURRY_S = 5.0
_LOOK_S = 0.1


class Commanded:
    """What of the command is under way, and the signals that this process gets. Handlers, and no blocked signals: what is started would inherit these."""

    def __init__(self) -> None:
        self.asked: signal.Signals | None = None
        self._interrupts = 0
        self._process: subprocess.Popen[bytes] | None = None
        for number in signals.stop_signals():
            signal.signal(number, self._handle)

    def run(self, command: Sequence[str]) -> int:
        """Its exit code. In a session of its own: a Ctrl-C at the terminal would reach the launcher, too, which may kill for
        it."""
        try:
            with signals.held():  # one that comes now finds the process
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_as_a_child
                )
        except OSError as error:
            raise UsageError(f"`{command[0]}` can't be started: {error.strerror}") from error
        if self.asked is not None:
            self._pass_on()
        code = self._process.wait()
        self._process = None
        return code

    def wait(self, seconds: float) -> bool:
        """Whether there was a signal meanwhile."""
        end = time.monotonic() + seconds
        while self.asked is None and time.monotonic() < end:
            time.sleep(_LOOK_S)
        return self.asked is not None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._interrupts += number == signal.SIGINT
        if self.asked is None:
            self.asked = signal.Signals(number)
            self._pass_on()
        elif number == signal.SIGINT and self._interrupts > 1:
            self._hurry()

    def _pass_on(self) -> None:
        if self._process is not None:
            takes = _name(self._process.pid).startswith(_TAKES_USR1)
            signals.say(f"{(self.asked or signal.SIGTERM).name}: the command is told to stop")
            with suppress(OSError):
                self._process.send_signal(signal.SIGUSR1 if takes else signal.SIGTERM)

    def _hurry(self) -> None:
        if self._process is not None:
            pid = self._process.pid
            with suppress(OSError):
                os.killpg(pid, signal.SIGTERM)
            end = time.monotonic() + _HURRY_S
            while time.monotonic() < end and _name(pid):
                time.sleep(_LOOK_S)
            with suppress(OSError):
                os.killpg(pid, signal.SIGKILL)
        signals.end_at_once(ExitCode.INTERRUPTED, "ended without saving")


def _as_a_child() -> None:
    signals.release()
    die_with_parent(signal.SIGTERM)


def _name(pid: int) -> str:
    """As the kernel has it now: `env` and shells become what they start. '' for one that has ended."""
    try:
        name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
    except OSError:
        return ""
    return "" if rest.split()[0] in "ZX" else name
