"""The features of a stage: each is an object that sees the events of the stage in turn (`stage.hooks_of` lists them).

The engine's loop yields what happened or is due: Iterated, SnapshotDue, TestDue, Stopped and so on. A hook passes an event on, adds events
before or after it, or replaces it. The next hook sees what this one yields; what the last one yields goes to the log.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from stagerun.base.events import Event
from stagerun.engine.evaluate import Score


@dataclass(frozen=True, slots=True)
class SetScore:
    """The score of one validation set; `ema`: of the averaged weights."""

    val: str
    score: Score
    ema: bool


@dataclass(frozen=True, slots=True)
class Evaluated:
    """An evaluation inside the stage is complete. Every rank has the same scores, those of the first set first. Only hooks see this event;
    the log has a Tested for each score."""

    iter: int
    scores: tuple[SetScore, ...]


Seen = Event | Evaluated


class Hook(Protocol):
    def on(self, event: Seen) -> Iterator[Seen]:
        """Yield the event, and what follows from it. Called on every rank.

        SnapshotDue, TestDue, Evaluated and Stopped come on all ranks alike; so do Iterated and NotFinite, except with `method: ASYNC`. Only
        at these may a hook call something collective. SnapshotWritten and others come on rank 0 only."""


def pass_through(hooks: Sequence[Hook], event: Seen) -> Iterator[Event]:
    """Send an event through the hooks; yield what comes out."""
    if hooks:
        for seen in hooks[0].on(event):
            yield from pass_through(hooks[1:], seen)
    elif not isinstance(event, Evaluated):
        yield event
