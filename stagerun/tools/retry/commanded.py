"""A command that this process starts and waits for: signals go on to it, or to what its script has started, in the way that these
take them."""

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType

from stagerun.base.errors import ExitCode, UsageError
from stagerun.launch.ancestors import to_be_told
from stagerun.system import signals
from stagerun.system.process import Process, living

# From a second Ctrl-C to SIGKILL.
_HURRY_S = 5.0
_LOOK_S = 0.1


class Commanded:
    """What of the command is under way, and the signals that this process gets. Handlers, and no blocked signals: what is started
    would inherit these."""

    def __init__(self) -> None:
        self.asked: signal.Signals | None = None
        self._interrupts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._told: set[Process] = set()
        self._guard = _guard()
        for number in signals.stop_signals():
            signal.signal(number, self._handle)

    def run(self, command: Sequence[str]) -> int:
        """Its exit code. In a session of its own: a Ctrl-C at the terminal would reach the launcher, too, which may kill for
        it."""
        try:
            with signals.held():  # one that comes now finds the process
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=signals.release
                )
                self._guarded(self._process.pid)
        except OSError as error:
            raise UsageError(f"`{command[0]}` can't be started: {error.strerror}") from error
        if self.asked is not None:
            self._pass_on()
        while (code := self._process.poll()) is None:
            time.sleep(_LOOK_S)
            if self._told and all(living(kin.pid) is None for kin in self._told):
                _tell(self._process.pid, self._told)  # the script may go on to its next command
        self._process = None
        self._guarded(0)
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
            signals.say(f"{(self.asked or signal.SIGTERM).name}: the command is told to stop")
            if not _tell(self._process.pid, self._told):
                with suppress(OSError):
                    os.killpg(self._process.pid, signal.SIGTERM)

    def _hurry(self) -> None:
        if self._process is not None:
            pid = self._process.pid
            with suppress(OSError):
                os.killpg(pid, signal.SIGTERM)
            end = time.monotonic() + _HURRY_S
            while time.monotonic() < end and living(pid) is not None:
                time.sleep(_LOOK_S)
            with suppress(OSError):
                os.killpg(pid, signal.SIGKILL)
        signals.end_at_once(ExitCode.INTERRUPTED, "ended without saving")

    def _guarded(self, pid: int) -> None:
        with suppress(OSError):  # it is gone
            os.write(self._guard, f"{pid}\n".encode())


def _tell(pid: int, told: set[Process]) -> bool:
    """Has what the process has come to save and end, each launcher or run once. Whether there is one."""
    found = to_be_told(pid)
    if found is not None and found[0] not in told:
        told.add(found[0])
        with suppress(OSError):
            os.kill(found[0].pid, found[1])
    return found is not None


def _guard() -> int:
    """Starts a process that tells the command to stop when this one is killed: the kernel's own way reaches the command alone, and
    not what it has started. Returns where it reads the command's number, 0 for none."""
    reads, writes = os.pipe()
    if os.fork():
        os.close(reads)
        return writes
    try:
        os.close(writes)
        os.setsid()
        signals.settle()
        pid = 0
        while said := os.read(reads, 4096):
            pid = int(said.split()[-1])
        if pid and not _tell(pid, set()):
            os.killpg(pid, signal.SIGTERM)
    finally:
        os._exit(0)
