"""What interrupts a life of a run: which process gets which signal, and with what exit code the whole may end then."""

import random
import signal
from dataclasses import dataclass

from stagerun.cli.victim import Victim, send
from stagerun.errors import ExitCode


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
