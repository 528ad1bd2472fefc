"""What a monitor knows of its own worker's process, and does to it: /proc, signals, its stack, its end."""

import json
import os
import signal
import time
from contextlib import closing, suppress
from itertools import takewhile
from pathlib import Path

from stagerun.base.errors import ExitCode
from stagerun.system import signals
from stagerun.system.files import LineFile
from stagerun.system.process import stat

# Nothing else sends it. Before the worker has a handler for it, it would end the worker.
STACK_SIGNAL = signal.SIGRTMIN + 5
# How long a stack may take to be written, and for how long nothing must be added to count as whole.
_STACK_S, _QUIET_S = 0.4, 0.04
_MOST_LINES = 20
_STARTS = "stagerun/launch/start.py"  # the calls up to the worker's job


def state(pid: int) -> str:
    """/proc's letter; Z if it is gone."""
    return (stat(pid) or "Z")[0]


def stack(rank: int, pid: int, thread: int, memory: int) -> str:
    """The Python stack of the worker, shortened; '' if it doesn't answer. Waits some tenths of a second. `thread`: the identity of the one
    that trains; `memory`: the descriptor of what the worker writes its stack to.

    A worker that is stopped is sent on for this, and comes to its end a moment later. What it may still do in that moment
    is what it would have done had it not been stopped, and the others with it: a few updates, logged and saved as ever. Only
    rank 0 writes to the output folder, and it might have been stopped just after it had made sure that the
    folder is its own, long enough for another run to take it over. So rank 0 is never sent on.
    """
    stopped = state(pid) == "T"
    if stopped and rank == 0:
        return ""
    try:
        os.kill(pid, STACK_SIGNAL)
        if stopped:
            os.kill(pid, signal.SIGCONT)
    except OSError:
        return ""
    size, since = 0, time.monotonic()
    end = since + _STACK_S
    while time.monotonic() < end and not (size and time.monotonic() > since + _QUIET_S):
        time.sleep(0.01)
        now = os.fstat(memory).st_size
        if now != size:
            size, since = now, time.monotonic()
    return shortened(os.pread(memory, min(size, 1 << 20), 0).decode(errors="replace"), thread)


def kill(pid: int) -> None:
    if os.getppid() == pid:  # otherwise it has ended, and its number may be another's
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def say(text: str) -> None:
    with suppress(OSError):
        os.write(2, (signals.erase_line(2) + text).encode())


def log_failure(path: str, text: str) -> None:
    """Adds the run's end to its log."""
    record = {"time": round(time.time(), 3), "event": "Failed", "code": int(ExitCode.PEER), "text": text}
    # Whole, with one call, as all lines there; on a line of its own if the worker was stopped in the middle of one.
    with suppress(OSError), closing(LineFile(Path(path))) as file:
        file.append(json.dumps(record).encode() + b"\n")


def shortened(text: str, trains: int) -> str:
    """Of what faulthandler wrote, the newest calls of the thread that trains, without the first ones, which are always the same."""
    lines = iter(text.splitlines())
    begins = f"thread {trains:#018x}"
    if not any(begins in line.lower() for line in lines):
        return ""
    calls = takewhile(lambda line: line.strip() and _STARTS not in line, lines)
    own = [call.strip() for call in calls]
    more = [f"and {len(own) - _MOST_LINES} more"] if len(own) > _MOST_LINES else []
    return "\n".join([*own[:_MOST_LINES], *more])
