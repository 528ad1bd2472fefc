"""The launcher's signals: a thread of its own waits for them, so that they interrupt nothing, and passes them on."""

import math
import shutil
import signal
import threading
import time
from pathlib import Path
from types import FrameType

from stagerun import signals
from stagerun.errors import ExitCode
from stagerun.launch.folder import Asked, ask, reports, send

# Seconds that workers have, after a signal, to finish an iteration and write a snapshot, where no one says otherwise. An
# iteration of a large batch on a few processors takes minutes; who can't wait sends a second SIGINT.
GRACE_S = 600
_LOOK_S = 1.0


def least_before(grace: float) -> float:
    """Seconds after a signal at which what has not ended is ended by us: a little before the scheduler does it with all, so that
    there is time to say so."""
    return grace - min(2.0, grace / 10)


class Relay:
    """From `start` on, in the launcher. Torch's agent would raise an exception wherever a signal finds it, the second one in the
    midst of its waiting for the workers, which then die with it while they save.

    Its thread waits with all stop signals blocked in the main thread, and thus in the workers as they start: a worker answers what
    has come from its first instruction on.
    """

    def __init__(self, folder: Path, grace: float) -> None:
        self.asked: Asked | None = None
        self.late = False  # workers had not ended when their time was over, and were killed
        self._folder, self.grace = folder, grace
        self._signals: list[signal.Signals] = []
        self._interrupts = 0
        self._over = False
        self._lock = threading.Lock()

    def start(self) -> None:
        """Main thread, before it starts any other."""
        numbers = self._signals = signals.block()
        thread = threading.Thread(target=self._relay, name="signals", daemon=True)
        thread.start()

        def hand_over(number: int, frame: FrameType | None) -> None:
            if not self._over:  # then the thread may have ended
                signal.pthread_kill(thread.ident or 0, number)

        # Threads that numpy's library has made before don't block them, and may be the ones that a signal finds.
        for number in numbers:
            signal.signal(number, hand_over)

    def ask(self, number: signal.Signals) -> None:
        """As if that signal had come, from any thread: the launcher on another host has got it."""
        with self._lock:
            if self.asked is None:
                self.asked = ask(self._folder, number)

    def end(self) -> None:
        """All workers have ended: what comes now changes nothing."""
        self._over = True

    def _relay(self) -> None:
        while True:
            number = self._next()
            if self._over:
                return
            self._interrupts += number == signal.SIGINT
            if number is None:
                self.late = True
                send(self._folder, signal.SIGKILL)
            elif self.asked is None:
                self.ask(signal.Signals(number))
            elif number == signal.SIGINT and self._interrupts > 1:
                # Somebody at the keyboard means it. The workers die with this process.
                first = reports(self._folder, 1)
                shutil.rmtree(self._folder, ignore_errors=True)
                if first and first[0].code in (ExitCode.DONE, ExitCode.SAVED):  # all is on disk by then
                    signals.end_at_once(first[0].code, first[0].text)
                signals.end_at_once(ExitCode.INTERRUPTED, "ended without saving")

    def _next(self) -> int | None:
        """The next signal; None, once, when the time of the workers is over."""
        while True:
            left = math.inf
            if self.asked is not None and not self.late:
                left = self.asked.at + least_before(self.grace) - time.monotonic()
            # Not for ever: `ask` may be called meanwhile.
            info = signal.sigtimedwait(self._signals, min(max(0.0, left), _LOOK_S))
            # Stopped and continued for longer than that, Python tells of a signal 0.
            if info is not None and info.si_signo in self._signals:
                return info.si_signo
            if left <= 0 or self._over:
                return None
