"""Where a short run is to be interrupted, and whether what was interrupted came out as what was not. Pure: events in, values out."""

import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from stagerun.base.events import (
    EnsembleTested,
    Event,
    Iterated,
    Note,
    NotFinite,
    PieceStarted,
    RunFinished,
    RunStarted,
    StageFinished,
    StageStarted,
    Tested,
)

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
    """The course in the log of one life that trained a whole schedule. ValueError if it is not."""
    started = [time for time, event in events if isinstance(event, RunStarted)]
    ended = [time for time, event in events if isinstance(event, RunFinished)]
    if len(started) != 1 or len(ended) != 1:
        raise ValueError("not the log of one uninterrupted run")
    iterated = [(time, event) for time, event in events if isinstance(event, Iterated)]
    # The wall clock may be set back meanwhile: then two moments are one.
    times = [started[0]]
    for time, _ in iterated:
        times.append(max(time, times[-1]))
    places = {(event.stage, event.iter, event.epoch): n for n, (_, event) in enumerate(iterated, 1)}
    return Course(tuple(times), max(ended[0], times[-1]), places)


@dataclass(frozen=True, slots=True)
class Compared:
    """How many numbers of a log were compared with those of an uninterrupted run, and what differs, in words."""

    losses: int = 0
    tests: int = 0
    different: tuple[str, ...] = ()


def compare_logs(straight: Timed, other: Timed) -> Compared:
    """Each loss, each failure (`on_nan`) and each evaluation that `other` tells, which may tell one several times: what was trained
    again. A log may lack some, those between the last event and a kill.

    An evaluation says nothing of its images: where `straight` was there several times, with a rollback in between, each will do."""
    wanted: dict[_Place, list[_Numbers]] = {}
    for place, numbers in _numbers(straight):
        wanted.setdefault(place, []).append(numbers)
    losses = tests = 0
    different = []
    for place, numbers in _numbers(other):
        losses, tests = losses + (place[0] == "loss"), tests + (place[0] not in ("loss", "failure"))
        if numbers not in wanted.get(place, []):
            expected = " or ".join(map(_text, wanted.get(place, []))) or "nothing"
            different.append(f"{_words(place)}: {expected} straight, {_text(numbers)} interrupted")
    return Compared(losses, tests, tuple(different))


_Place = tuple[str, str, int, float]  # kind, stage, iteration, and where in the data that was, if it is reported
_Numbers = tuple[object, ...]


def _numbers(events: Timed) -> Iterator[tuple[_Place, _Numbers]]:
    for _, event in events:
        match event:
            case Iterated():
                yield ("loss", event.stage, event.iter, event.epoch), (event.loss,)
            case NotFinite() if event.until is None:
                failed = (event.what, event.lr, event.done, event.number, event.back_to)
                yield ("failure", event.stage, event.iter, event.position), failed
            case Tested():
                kind = "evaluation of averaged weights" if event.ema else "evaluation"
                yield (kind, event.stage, event.iter, 0), (event.top1, event.top5, event.loss)
            case StageFinished():
                yield ("result", event.stage, event.iterations, 0), result_numbers(event)
            case EnsembleTested():
                yield ("ensemble", event.name, 0, 0), (event.top1, event.top5, event.loss)


def result_numbers(r: StageFinished) -> tuple[float | None, ...]:
    """What of a stage's result follows from its training alone, and not from time or place."""
    return (r.loss, r.top1, r.top5, r.test_loss, r.ema_top1, r.ema_top5, r.ema_test_loss)


def _words(place: _Place) -> str:
    kind, name, iter, _ = place
    return f"{kind} {name}" if kind == "ensemble" else f"{kind} of {name} at iteration {iter}"


def _text(numbers: _Numbers) -> str:
    return ", ".join(map(repr, numbers))


def went_on(events: Timed) -> bool:
    """Whether the life of which these are began with what another had left on disk, and not from the seed."""
    for _, event in events:
        if isinstance(event, StageStarted | PieceStarted):
            return event.iter > 0 or not event.start.startswith("seed ")
        if isinstance(event, Tested):  # of a stage that was finished but for that
            return True
    return False


def promises(events: Timed) -> list[str]:
    """What the run has said about the bits of what it went on from."""
    return [event.text for _, event in events if isinstance(event, Note) and ("BIT-EXACT" in event.text)]
