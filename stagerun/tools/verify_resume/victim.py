"""Process lives of a run that is to be interrupted: each is the command of a user in processes of its own, watched through its log."""

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
from stagerun.system.process import all_living, program, words

MARK = "STAGERUN_LIFE"
LOOK_S = 0.005  # a look into the log costs some 10 us
GONE_S = 30.0  # the kernel kills what is left of a launcher that was killed; freeing a network's memory takes a moment


@dataclass(frozen=True, slots=True)
class Found:
    """A process of a life. `rank` None: not a worker."""

    pid: int
    parent: int
    rank: int | None


class Victim:
    """`stagerun ARGUMENTS...` from its start on. It dies with this process, which has to start it in its main thread.

    `said`: the file that takes what it prints. Use as a context manager: no process of it is left afterwards.
    """

    def __init__(self, arguments: Sequence[str], said: Path) -> None:
        self.mark, self.started = uuid.uuid4().hex, time.monotonic()
        environment = {**os.environ, MARK: self.mark, LAUNCHER_PID: str(os.getpid())}
        with open(said, "wb") as file:
            # A session of its own: Ctrl-C is for the process that started it, which then ends it.
            self.process = subprocess.Popen(
                [sys.executable, *program("stagerun"), *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> "Victim":
        return self

    def __exit__(self, *_: object) -> None:
        last = time.monotonic() + GONE_S  # what hangs in the kernel can't be ended
        while (left := self.found()) and time.monotonic() < last:
            for process in left:
                send(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=0.05)
        self.process.poll()

    def ended(self) -> int | None:
        """Its exit code, negative for a signal; None while it lives."""
        return self.process.poll()

    def found(self) -> list[Found]:
        """Its living processes."""
        there = []
        for process in all_living():
            environment = words(process.pid, "environ")
            if f"{MARK}={self.mark}" in environment:
                rank = next((entry.removeprefix("RANK=") for entry in environment if entry.startswith("RANK=")), "")
                there.append(Found(process.pid, process.parent, int(rank) if rank.isdecimal() else None))
        return there

    def workers(self) -> dict[int, int]:
        """Process ids of the workers by rank: the launcher's own children, or the process itself where it is the only one."""
        own = self.process.pid
        children = {p.rank: p.pid for p in self.found() if p.parent == own and p.rank is not None}
        return children or {0: own}

    def gone(self) -> int:
        """How many processes are left GONE_S after its end."""
        last = time.monotonic() + GONE_S
        while (left := len(self.found())) and time.monotonic() < last:
            time.sleep(0.02)
        return left


def send(pid: int, number: signal.Signals) -> bool:
    """False if the process has ended."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


# -- what interrupts a life: which process gets which signal, and with what exit code the whole may end then


@dataclass(frozen=True, slots=True)
class Stroke:
    """`codes`: exit codes of the command that may follow, negative for a signal; not 0, which is one that came too late."""

    target: str
    number: signal.Signals
    codes: frozenset[int]


_DEAD = frozenset({-int(signal.SIGKILL)})
_LOST = frozenset(
    {int(ExitCode.PEER), *_DEAD}
)  # where the only worker is the command itself, it is that which was killed
KILLS = (
    Stroke("rank 0", signal.SIGKILL, _LOST),
    Stroke("one worker", signal.SIGKILL, _LOST),
    Stroke("all processes", signal.SIGKILL, _DEAD),
    Stroke("the launcher", signal.SIGKILL, _DEAD),
)
STOP = Stroke("the launcher", signal.SIGTERM, frozenset({int(ExitCode.SAVED)}))


def strokes(number: int, rng: random.Random) -> list[Stroke]:
    """In random order; one of five is a stop, and one of two or more."""
    stops = max(1, number // 5) if number > 1 else 0
    found = [KILLS[i % len(KILLS)] for i in range(number - stops)] + [STOP] * stops
    rng.shuffle(found)
    return found


def strike(life: Victim, stroke: Stroke, rng: random.Random) -> str:
    """Sends the signal; what was hit, in words, and '' if nothing lived any more."""
    own, workers = life.process.pid, life.workers()
    alone = list(workers.values()) == [own]
    name = "the run" if alone else stroke.target
    match stroke.target:
        case "rank 0":
            targets = [workers[0]] if 0 in workers else []
        case "one worker":
            rank = rng.choice(sorted(workers.keys() - {0}) or sorted(workers))
            name, targets = name if alone else f"rank {rank}", [workers[rank]]
        case "all processes":
            targets = [found.pid for found in life.found()]
        case _:
            targets = [own]
    if life.ended() is not None:  # its process id may be another's by now
        return ""
    hit = [send(pid, stroke.number) for pid in targets]
    return f"{stroke.number.name} to {name}" if any(hit) else ""
