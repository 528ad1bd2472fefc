"""Which stretches of training check a choice of the proofs, and with what each is trained. Pure."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from stagerun.base.events import Event, Iterated, NotFinite, RunStarted, StageStarted
from stagerun.base.recipe import Schedule, Stage
from stagerun.base.snapshots import SnapshotRef
from stagerun.tools.verify_run.proofs import Return, Way


@dataclass(frozen=True, slots=True)
class Leg:
    """A part of a stretch that has the same workers and threads throughout. It is over at `until` once the stage has gone back `returns`
    times, or, if that doesn't come, at `latest`."""

    until: int
    workers: int
    threads: int
    returns: int = 0
    latest: int = 0


@dataclass(frozen=True, slots=True)
class Stretch:
    """Training of a stage from a snapshot on disk (None: from the stage's start) up to iteration `until`, by which the proofs at `iters` are
    checked, the chosen ones and those between."""

    stage: str
    base: SnapshotRef | None
    begins: int
    until: int
    iters: tuple[int, ...]
    legs: tuple[Leg, ...]
    returns: Mapping[int, Return]  # those that it must come to
    number: int = 0  # how often the stage had gone back where it begins

    @property
    def iterations(self) -> int:
        return self.until - self.begins + sum(one.iter - one.back_to for one in self.returns.values())


class Until:
    """Asked of each event of a run: whether its leg of a stage is over with the iteration that comes next."""

    def __init__(self, stage: str, leg: Leg) -> None:
        self.stage, self.leg, self.there, self.returned = stage, leg, False, 0

    def __call__(self, event: Event) -> bool:
        if isinstance(event, Iterated | StageStarted | NotFinite) and event.stage == self.stage:
            back = isinstance(event, NotFinite) and event.back_to is not None
            done = event.iter + isinstance(event, NotFinite)
            self.returned += back
            last = self.leg.until - 1 if self.returned >= self.leg.returns else self.leg.latest
            self.there = done >= last and not back  # a StageStarted says where it goes on
        return self.there


How = Callable[[RunStarted], tuple[int, int]]  # workers and threads with which a life's iterations are trained again


def legs(way: Way, begins: int, number: int, until: int, how: How) -> tuple[Leg, ...]:
    """Those from iteration `begins`, by which the stage has gone back `number` times."""
    found: list[tuple[int, tuple[int, int]]] = []
    ends = [start for start, _ in way.lives[1:]] + [until]
    for (_, life), end in zip(way.lives, ends, strict=False):
        if end > begins and (not found or found[-1][0] < until):
            its = how(life)
            if found and found[-1][1] == its:
                found.pop()
            found.append((min(end, until), its))
    made = []
    for end, (workers, threads) in found:
        due = [one.iter + 1 for one in way.between(number, end).values()]
        made.append(Leg(end, workers, threads, len(due), max(due, default=0)))
        number = max(number, way.number(end))
    return tuple(made)


@dataclass(frozen=True, slots=True)
class Saved:
    """A snapshot on disk, and how often its stage had gone back."""

    ref: SnapshotRef
    number: int = 0


def stretches(
    schedule: Schedule, ways: Mapping[str, Way], snapshots: Sequence[Saved], number: int, seed: int, how: How
) -> list[Stretch]:
    """Those that check `number` proofs, drawn evenly from all that lie behind something to train from."""
    stages = {stage.name: stage for stage in schedule.stages if stage.enabled and stage.name in ways}
    places = [(name, n) for name in stages for n in ways[name].proofs if n > stages[name].begins]
    drawn = random.Random(seed).sample(places, min(number, len(places)))
    found: dict[tuple[str, str], Stretch] = {}
    for name, iter in sorted(drawn, key=places.index):
        one = stretch(stages[name], ways[name], newest_before(snapshots, stages[name], ways[name], iter), iter, how)
        found[name, one.base.name if one.base is not None else ""] = one  # the last drawn is the furthest
    return list(found.values())


def stretch(stage: Stage, way: Way, base: Saved | None, until: int, how: How) -> Stretch:
    begins, number = (base.ref.iter, base.number) if base is not None else (stage.begins, 0)
    return Stretch(
        stage.name,
        base.ref if base is not None else None,
        begins,
        until,
        tuple(n for n in way.proofs if begins < n <= until),
        legs(way, begins, number, until, how),
        way.between(number, until),
        number,
    )


def newest_before(snapshots: Sequence[Saved], stage: Stage, way: Way, iter: int) -> Saved | None:
    """The stage's newest snapshot before an iteration, on the way there."""
    own = [one for one in snapshots if one.ref.stage == stage.name and one.ref.iter < iter]
    own = [one for one in own if way.leads(one.ref.iter, one.number, iter)]
    return max(own, key=lambda one: (one.number, one.ref.iter, one.ref.attempt), default=None)


def next_from(snapshots: Sequence[Saved], stage: str, way: Way, iter: int) -> Saved | None:
    """The stage's first snapshot at an iteration or after it, on its way."""
    own = [one for one in snapshots if one.ref.stage == stage and one.ref.iter >= iter]
    own = [one for one in own if way.leads(one.ref.iter, one.number, one.ref.iter)]
    return min(own, key=lambda one: (one.ref.iter, -one.ref.attempt), default=None)
