"""What a monitor knows of its own worker's process, and does to it: /proc, signals, its stack, its end."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile

from stagerun.system import signals
from stagerun.system.process import look
from stagerun.system.pulse import SIZE, Beat, read

# Nothing else sends it. Before the worker has a handler for it, it would end the worker.
STACK_SIGNAL = signal.SIGRTMIN + 5
_LISTENS = "stagerun/launch/watch/worker.py"
# How long a stack may take to be written, and for how long nothing must be added to count as whole.
_STACK_S, _QUIET_S = 0.4, 0.04
# Lines of it that are reported: of the thread that trains, of each of the others, in all.
_OWN_LINES, _OTHERS_LINES, _STACK_LINES = 20, 3, 32
# The first calls, which are always the same: those up to the worker's job, and a thread's.
_STARTS = "stagerun/launch/start.py"
_BOOTSTRAP = ("in _bootstrap", "in _bootstrap_inner")


@dataclass(frozen=True, slots=True)
class Setup:
    """What a worker says to its monitor at the start. `pulse`, `stack` and `link` are file descriptors."""

    rank: int
    size: int
    pid: int
    thread: int  # the one that trains
    host: str
    address: str  # where rank 0's monitor listens
    one_host: bool  # all ranks are on this one
    limits: dict[str, float]
    pulse: int
    stack: int
    link: int
    gone: str = ""  # a file in which our launcher, if one started the worker, reports a host that is gone


class Worker:
    """The process that is watched: the parent of this one."""

    def __init__(self, rank: int, pid: int, thread: int, pulse: int, stack: int) -> None:
        """`thread`: the identity of the one that trains. `pulse`, `stack`: file descriptors of the memory that it writes its signs of
        life and its stack to."""
        self.rank, self.pid, self._thread = rank, pid, thread
        self._pulse, self._stack = pulse, stack
        self._beat = Beat(moved=time.monotonic())
        self._fd: int | None = None  # of the process: its number is another's once it has ended
        with suppress(OSError, AttributeError):  # an old kernel, or a container that forbids it
            self._fd = os.pidfd_open(pid)

    def beat(self) -> Beat:
        """The newest; the one before where a new one is just being written."""
        self._beat = read(os.pread(self._pulse, SIZE, 0)) or self._beat
        return self._beat

    def state(self) -> str:
        """/proc's letter; Z if it is gone."""
        found = look(self.pid)
        return found.state if found is not None else "Z"

    def stack(self) -> str:
        """Its Python stack, shortened; '' if it doesn't answer. Waits some tenths of a second.

        A worker that is stopped is sent on for this, and comes to its end a moment later. What it may still do in that moment
        is what it would have done had it not been stopped, and the others with it: a few updates, logged and saved as ever. Only
        rank 0 writes to the output folder, and it might have been stopped just after it had made sure that the
        folder is its own, long enough for another run to take it over. So rank 0 is never sent on.
        """
        stopped = self.state() == "T"
        if stopped and self.rank == 0:
            return ""
        try:
            self._send(STACK_SIGNAL)
            if stopped:
                self._send(signal.SIGCONT)
        except OSError:
            return ""
        end = time.monotonic() + _STACK_S
        size, since = 0, time.monotonic()
        while time.monotonic() < end and not (size and time.monotonic() > since + _QUIET_S):
            time.sleep(0.01)
            now = os.fstat(self._stack).st_size
            if now != size:
                size, since = now, time.monotonic()
        return shortened(os.pread(self._stack, min(size, 1 << 20), 0).decode(errors="replace"), self._thread)

    def speak_for(self, text: str) -> list[threading.Thread]:
        """Ends a worker that doesn't answer, and says in its place why. Threads that do so."""
        from stagerun.base.errors import ExitCode
        from stagerun.launch.folder import report

        reported = report(self.rank, ExitCode.PEER, text)
        self.kill()
        # After the kill, and in a thread: it may be that no one reads what is said.
        return [] if reported else [_in_thread(_say, f"rank {self.rank}: {text}\n")]

    def kill(self) -> None:
        with suppress(OSError):
            self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        """OSError."""
        if self._fd is None:
            os.kill(self.pid, number)
        else:
            signal.pidfd_send_signal(self._fd, number)


def log_failure(path: str, text: str) -> threading.Thread:
    """Adds the run's end to its log, in a thread: the disk may be what hangs."""
    return _in_thread(_append, path, text)


def gone(path: str) -> str:
    """What our launcher says of a host that is gone; ''."""
    if not path:
        return ""
    try:
        with open(path) as file:
            return file.read()
    except (OSError, ValueError):
        return ""


def prepare() -> None:
    """Imports what the end needs: by then the disk may hang."""
    import stagerun.base.errors
    import stagerun.base.events
    import stagerun.launch.folder  # noqa: F401


def _in_thread(do: Callable[..., None], *words: str) -> threading.Thread:
    thread = threading.Thread(target=do, args=words, daemon=True)
    thread.start()
    return thread


def _say(text: str) -> None:
    with suppress(OSError):
        os.write(2, (signals.erase_line(2) + text).encode())


def _append(path: str, text: str) -> None:
    from stagerun.base.errors import ExitCode
    from stagerun.base.events import Failed

    event = Failed(code=int(ExitCode.PEER), text=text)
    record = {"time": round(time.time(), 3), "event": "Failed", "code": event.code, "text": event.text}
    # Whole, with one call, as all lines there; on a line of its own if the worker was stopped in the middle of one.
    with suppress(OSError), open(path, "a+b", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        torn = size > 0 and file.read(1) != b"\n"
        file.write(b"\n" * torn + json.dumps(record).encode() + b"\n")


def shortened(text: str, trains: int) -> str:
    """What faulthandler wrote: the thread that trains first, of the others the newest calls, in all some tens of lines."""
    threads: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith(("Thread 0x", "Current thread 0x")):
            threads.append([line])
        elif line.strip() and threads:
            threads[-1].append(line)
    threads.sort(key=lambda thread: f"Thread {trains:#018x}".lower() not in thread[0].replace("Current t", "T").lower())
    lines: list[str] = []
    for number, (_, *frames) in enumerate(threads):
        own = [frame.strip() for frame in takewhile(lambda frame: _STARTS not in frame, frames)]
        own = [frame for frame in own if not frame.endswith(_BOOTSTRAP)]
        most = _OTHERS_LINES if number else _OWN_LINES
        more = [f"and {len(own) - most} more"] if len(own) > most else []
        part = [*["another thread:"][: bool(number)], *own[:most], *more]
        # The thread that listens to the monitor does nothing else.
        if len(lines) + len(part) <= _STACK_LINES and not (own and _LISTENS in own[0]):
            lines += part
    return "\n".join(lines)
