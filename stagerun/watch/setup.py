"""What a monitor is told at its start, and what its two sides, rank 0's and the others', answer."""

from dataclasses import dataclass

from stagerun.watch.judge import Verdict


@dataclass(frozen=True, slots=True)
class Setup:
    """What a worker tells its monitor. `pulse`, `stack` and `link` are file descriptors."""

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
    gone: str = ""  # a file in which our launcher, if one started the worker, tells of a host that is gone


@dataclass(frozen=True, slots=True)
class Ending:
    """What the worker is to say and to end with."""

    text: str
    guilty: bool  # itself


def ending(rank: int, verdict: Verdict, stacks: dict[int, str]) -> Ending:
    return Ending(verdict.message(stacks), any(guilty.seen.rank == rank for guilty in verdict.guilty))
