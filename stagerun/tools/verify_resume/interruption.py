"""Where and how a short run is interrupted: the moments along its course, its process lives, and the signals that hit them."""

import os
import random
import signal
import subprocess
import sys
import time
import uuid
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from stagerun.base.errors import ExitCode
from stagerun.base.events import (
    Event,
    Iterated,
    RunFinished,
    RunStarted,
)
from stagerun.launch.folder import LAUNCHER_PID
from stagerun.launch.local import sweep
from stagerun.system.process import all_living, living, program, words

Timed = Sequence[tuple[float, Event]]


@dataclass(frozen=True, slots=True)
class Moment:
    """`delay` seconds after `done` iterations of all stages, or after the run's start where that is 0."""

    done: int
    delay: float


@dataclass(frozen=True, slots=True)
class Course:
    """How an uninterrupted run went. `times[n]`: when n iterations were done, times[0] when the first stage could begin; `end`: when
    all was; seconds of one clock. `places`: (stage, iteration, epoch) -> n, in the order of training: after a rollback an iteration comes
    again, with other images, and so at another epoch."""

    times: tuple[float, ...]
    end: float
    places: dict[tuple[str, int, float], int] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return max(0.0, self.end - self.times[0])

    def moment(self, reached: int, left: int, rng: random.Random) -> Moment:
        """A moment in the first of `left` equal shares of the time that is left when `reached` iterations are done: in iterations,
        in evaluations, while a snapshot is written, as often as these take."""
        start = self.times[min(reached, len(self.times) - 1)]
        at = start + (self.end - start) * rng.random() / left
        done = max(0, bisect_right(self.times, at) - 1)
        return Moment(done, max(0.0, at - self.times[done]))

    def done(self, event: Event) -> int:
        """How many iterations were done when a run of the same schedule reported `event`; 0 if it doesn't say."""
        return self.places.get((event.stage, event.iter, event.epoch), 0) if isinstance(event, Iterated) else 0

    def place(self, done: int) -> str:
        """In words."""
        names = {n: f"iteration {iter} of {stage}" for (stage, iter, _), n in self.places.items()}
        return f"after {names[done]}" if done in names else "before its first iteration"


def course_of(events: Timed) -> Course:
    """The course in the log of one life that trained a whole schedule. Raises ValueError for any other log."""
    started = [moment for moment, event in events if isinstance(event, RunStarted)]
    ended = [moment for moment, event in events if isinstance(event, RunFinished)]
    if len(started) != 1 or len(ended) != 1:
        raise ValueError("not the log of one uninterrupted run")
    iterated = [(moment, event) for moment, event in events if isinstance(event, Iterated)]
    # The wall clock may be set back meanwhile: then two moments are one.
    times = [started[0]]
    for moment, _ in iterated:
        times.append(max(moment, times[-1]))
    places = {(event.stage, event.iter, event.epoch): n for n, (_, event) in enumerate(iterated, 1)}
    return Course(tuple(times), max(ended[0], times[-1]), places)


# -- the process lives

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

    `said`: the file that takes what it prints. Use as a context manager: no process of it is left afterwards, and no folder of its launcher.
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
        seen = {self.process.pid}
        # A dying process has no environment any more by which it is found before it lets go of its files: a folder that it holds `sweep` leaves,
        # and one in which it writes can't be removed.
        while ((left := self.found()) or any(map(living, seen))) and time.monotonic() < last:
            for process in left:
                seen.add(process.pid)
                send(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=0.05)
            time.sleep(LOOK_S)
        sweep()

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
)  # where the only worker is the command itself, it is the one that was killed
KILLS = (
    Stroke("rank 0", signal.SIGKILL, _LOST),
    Stroke("one worker", signal.SIGKILL, _LOST),
    Stroke("all processes", signal.SIGKILL, _DEAD),
    Stroke("the launcher", signal.SIGKILL, _DEAD),
)
STOP = Stroke("the launcher", signal.SIGTERM, frozenset({int(ExitCode.SAVED)}))


def strokes(number: int, rng: random.Random) -> list[Stroke]:
    """In random order. One in five is a stop, and at least one of two or more."""
    stops = max(1, number // 5) if number > 1 else 0
    found = [KILLS[i % len(KILLS)] for i in range(number - stops)] + [STOP] * stops
    rng.shuffle(found)
    return found


def strike(life: Victim, stroke: Stroke, rng: random.Random) -> str:
    """Sends the signal. Returns in words what it hit, '' if nothing lived any more."""
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
