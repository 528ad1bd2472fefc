"""What a tracker gets and does. Another package that adds one needs nothing else of stagerun's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """One run of a tracker: all of a schedule, over all its process lives. `id` is the same in each of them; a tracker's run that shows
    what was undone is left as it is, and another one with another id takes its place. `settings`: of the schedule, by stage."""

    id: str
    name: str
    project: str
    out: Path
    settings: Mapping[str, Mapping[str, Any]]
    workers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One line for good. `number` counts them without a gap, from 0, the same in every process life. `iteration`: of the
    stage, plus those of its ancestors along the path. Names of `values` begin with the stage's, `trunk/loss`."""

    number: int
    time: float  # seconds since the epoch
    stage: str
    iteration: int
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Text:
    """A word with a name, of which the newest counts: a snapshot, a warning. It may come more than once."""

    name: str
    text: str


class Tracker(Protocol):
    """Made without arguments, in a process of its own. Whatever it raises costs one warning, and it is made anew and asked once more
    where it is; however long it takes, training doesn't wait."""

    def begin(self, run: TrackedRun) -> int | None:
        """Makes the run, or goes on with it. How many points its store holds, counted from the first; None if it can't say: then those come
        that it may lack, and `send` may get points that are there."""

    def send(self, points: Sequence[Point], texts: Sequence[Text]) -> None:
        """Returns once they are on their way, or, where `begin` can't say what is there, once they are there."""

    def end(self, status: str) -> None:
        """`status`: finished, stopped (it will go on), failed, or undone (another run takes its place). Waits for what is on its way."""
