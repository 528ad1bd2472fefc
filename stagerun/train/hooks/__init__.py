"""What hangs on the events of a stage: each feature is an object that sees them (`stage.hooks_of` lists them in their order).

The loop of the engine yields what has happened or is due: Iterated, SnapshotDue, TestDue, Stopped and so on. Each event goes through the
hooks in turn. A hook yields it on, with what it has to add before or after it, or something else in its place; what one hook yields, the
next one sees. The last one yields to the log.
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
    """An evaluation inside the stage is complete: the same scores on every rank, those of the first set first. It stays among the hooks:
    the log has a Tested for each score."""

    iter: int
    scores: tuple[SetScore, ...]


Seen = Event | Evaluated


class Hook(Protocol):
    def on(self, event: Seen) -> Iterator[Seen]:
        """Yield the event on, with what comes of it. Called on every rank. SnapshotDue, TestDue, Evaluated and Stopped come alike on all, and
        Iterated and NotFinite do but for `method: ASYNC`: what all ranks call together belongs to these. Others, as of snapshots that
        are written, come on rank 0 alone."""


def pass_through(hooks: Sequence[Hook], event: Seen) -> Iterator[Event]:
    """What the hooks make of an event."""
    if hooks:
        for seen in hooks[0].on(event):
            yield from pass_through(hooks[1:], seen)
    elif not isinstance(event, Evaluated):
        yield event
