"""A `stagerun` command in processes of its own, and the signals that interrupt it."""

import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from stagerun.base.errors import ExitCode
from stagerun.launch.folder import LAUNCHER_PID
from stagerun.launch.local import sweep
from stagerun.system.process import Process, all_living, living, program, words

MARK = "STAGERUN_LIFE"  # in the environment of all its processes
POLL_S = 0.005
GONE_S = 30.0  # the kernel ends what a killed launcher leaves; freeing a network's memory takes a moment


class Child:
    """`stagerun ARGUMENTS...`, which prints into the file `said`. Start it in the main thread: it dies with that.

    As a context manager it leaves no process, and no folder of its launcher.
    """

    def __init__(self, arguments: Sequence[str], said: Path) -> None:
        self.mark = uuid.uuid4().hex
        with open(said, "wb") as file:
            # In a session of its own: Ctrl-C is for the parent, which then ends it.
            self.process = subprocess.Popen(
                [sys.executable, *program("stagerun"), *arguments],
                env={**os.environ, MARK: self.mark, LAUNCHER_PID: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        deadline = time.monotonic() + GONE_S  # a process that hangs in the kernel can't be ended
        seen = {self.process.pid}
        # A dying process loses its environment, and with it the mark, before it lets go of its files: wait for its id, too.
        while ((left := self.processes()) or any(map(living, seen))) and time.monotonic() < deadline:
            for process in left:
                seen.add(process.pid)
                _send(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=0.05)
            time.sleep(POLL_S)
        sweep()

    def ended(self) -> int | None:
        """Return its exit code, negative for a signal; None while it lives."""
        return self.process.poll()

    def processes(self) -> list[Process]:
        """Return its living processes."""
        return [process for process in all_living() if f"{MARK}={self.mark}" in words(process.pid, "environ")]

    def workers(self) -> dict[int, int]:
        """Return process ids by rank: of the launcher's children, or of the process itself where it is the only worker."""
        found = {}
        for process in self.processes():
            ranks = [word.removeprefix("RANK=") for word in words(process.pid, "environ") if word.startswith("RANK=")]
            if process.parent == self.process.pid and ranks and ranks[0].isdecimal():
                found[int(ranks[0])] = process.pid
        return found or {0: self.process.pid}

    def outlived(self) -> int:
        """Count the processes that are left GONE_S after its end."""
        deadline = time.monotonic() + GONE_S
        while (left := len(self.processes())) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return left


def _send(pid: int, number: signal.Signals) -> bool:
    """Return False if the process has ended."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Stroke:
    """A signal, and the exit codes with which the command may end after it. 0 is not among them: it means that the stroke came too late."""

    target: str
    number: signal.Signals
    codes: frozenset[int]


_DEAD = frozenset({-int(signal.SIGKILL)})
_LOST = _DEAD | {int(ExitCode.PEER)}  # a single worker is the command itself
KILLS = (
    Stroke("rank 0", signal.SIGKILL, _LOST),
    Stroke("one worker", signal.SIGKILL, _LOST),
    Stroke("all processes", signal.SIGKILL, _DEAD),
    Stroke("the launcher", signal.SIGKILL, _DEAD),
)
STOP = Stroke("the launcher", signal.SIGTERM, frozenset({int(ExitCode.SAVED)}))


def strokes(number: int, rng: random.Random) -> list[Stroke]:
    """Return them in random order. One in five is a stop, and at least one of two or more."""
    stops = max(1, number // 5) if number > 1 else 0
    found = [KILLS[i % len(KILLS)] for i in range(number - stops)] + [STOP] * stops
    rng.shuffle(found)
    return found


def strike(child: Child, stroke: Stroke, rng: random.Random) -> str:
    """Send the signal. Return in words what it hit; '' if nothing lived any more."""
    own, workers = child.process.pid, child.workers()
    name, targets = stroke.target, [own]
    if stroke.target == "rank 0":
        targets = [workers[0]] if 0 in workers else []
    elif stroke.target == "one worker":
        rank = rng.choice(sorted(workers.keys() - {0}) or sorted(workers))
        name, targets = f"rank {rank}", [workers[rank]]
    elif stroke.target == "all processes":
        targets = [process.pid for process in child.processes()]
    if list(workers.values()) == [own]:
        name = "the run"
    if child.ended() is not None:  # another process may have its id by now
        return ""
    hit = [_send(pid, stroke.number) for pid in targets]
    return f"{stroke.number.name} to {name}" if any(hit) else ""
