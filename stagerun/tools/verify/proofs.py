"""The proofs in a run's log (`audit_param { proof_iter }`): how each stage came to where it is, whether its proofs follow from one another, and
which stretches of training check some of them. Pure."""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from stagerun.base.events import Event, Iterated, NotFinite, Proof, RunStarted, SnapshotWritten, StageStarted
from stagerun.base.recipe import Schedule, Stage
from stagerun.base.snapshots import SnapshotRef
from stagerun.plan import PlannedStage, State
from stagerun.schedule.proofs import broken_link


@dataclass(frozen=True, slots=True)
class Return:
    """`on_nan: ROLLBACK`: the update after `iter` updates failed, and training resumed at `back_to` with other images."""

    iter: int
    back_to: int


@dataclass(slots=True)
class Course:
    """How a stage came to where it is, without what it discarded. `lives`: the iterations at which process lives took over; `returns`: by
    number, those that led here. What lies behind `back_to` of a return was trained after it."""

    proofs: dict[int, Proof] = field(default_factory=dict)
    lives: list[tuple[int, RunStarted]] = field(default_factory=list)
    returns: dict[int, Return] = field(default_factory=dict)

    def number(self, iter: int) -> int:
        """Return how often the stage had gone back when it trained this iteration."""
        return max((number for number, one in self.returns.items() if one.back_to < iter), default=0)

    def between(self, number: int, iter: int) -> dict[int, Return]:
        """Return what led to an iteration since the stage had gone back `number` times."""
        return {n: one for n, one in self.returns.items() if number < n <= self.number(iter)}

    def leads(self, iter: int, number: int, until: int) -> bool:
        """Return whether the course to `until` passes `iter` when the stage has gone back `number` times."""
        return number <= self.number(until) and all(iter <= one.back_to for one in self.between(number, until).values())

    def discarded(self, iter: int, number: int) -> bool:
        """Return whether a later return discarded the state at `iter`."""
        return any(n > number and one.back_to < iter <= one.iter for n, one in self.returns.items())


class _Reading:
    """A course while the log is read. `returning`: the newest event of this life is a failure. `written`: by snapshot, the returns before it."""

    def __init__(self) -> None:
        self.course, self.returning = Course(), False
        self.written: dict[str, int] = {}

    def start(self, event: StageStarted, life: RunStarted | None) -> None:
        course, fresh = self.course, event.iter == event.begins
        if not self.returning:  # it resumes from a snapshot that a kill, or differing workers, left
            number = -1 if fresh else self.written.get(event.start, max(course.returns, default=0))
            kept = {n: one for n, one in course.returns.items() if n <= number and one.back_to < event.iter}
            course.returns = kept
        self.returning = False
        course.proofs = {n: proof for n, proof in course.proofs.items() if n <= event.iter and not fresh}
        course.lives = [(n, other) for n, other in course.lives if n < event.iter]
        if life is not None:
            course.lives.append((event.iter, life))

    def fail(self, event: NotFinite) -> None:
        if event.back_to is not None and event.until is None:
            kept = {n: one for n, one in self.course.returns.items() if n < event.number}
            self.course.returns = {**kept, event.number: Return(event.iter, event.back_to)}
            self.returning = True


def courses_of(events: Iterable[Event]) -> tuple[dict[str, Course], list[str]]:
    """Return the course of each stage that has proofs, and contradictions in words. What was trained again after a kill or a rollback
    replaces the earlier proof, which must be equal unless images were left out."""
    readings: dict[str, _Reading] = {}
    wrong: list[str] = []
    life: RunStarted | None = None
    for event in events:
        if isinstance(event, RunStarted):
            life = event
            for reading in readings.values():
                reading.returning = False
        if not isinstance(event, StageStarted | NotFinite | SnapshotWritten | Proof):
            continue
        reading = readings.setdefault(event.stage, _Reading())
        match event:
            case StageStarted():
                reading.start(event, life)
            case NotFinite():
                reading.fail(event)
            case SnapshotWritten():
                reading.written[event.name] = max(reading.course.returns, default=0)
            case Proof():
                if reading.course.proofs.get(event.iter, event) != event:
                    wrong.append(f"the log has two proofs of `{event.stage}` at iteration {event.iter} that differ")
                reading.course.proofs[event.iter] = event
    courses = {stage: reading.course for stage, reading in readings.items() if reading.course.proofs}
    for stage, course in courses.items():
        course.proofs = dict(sorted(course.proofs.items()))
        if not course.lives:
            wrong.append(f"the log has proofs of `{stage}`, and no run that trained it")
    return courses, wrong


def broken_chains(schedule: Schedule, courses: Mapping[str, Course]) -> list[str]:
    """Return a sentence for each stage whose proofs don't follow from one another, or from those of its parent."""
    found = []
    for stage in schedule.stages:
        before = ""
        if stage.parent is not None and stage.average is None:
            # The parent's last proof up to there: `early_stop` may have ended it, or it had gone further when this stage was added.
            proofs = courses.get(stage.parent, Course()).proofs.values()
            before = next((p.chain for p in reversed(proofs) if p.iter <= schedule.start_iter(stage)), "")
        links = [(p.iter, p.state, p.chain) for p in courses.get(stage.name, Course()).proofs.values()]
        if links and (iter := broken_link(before, links)) is not None:
            found.append(f"the proof of `{stage.name}` at iteration {iter} does not follow from the one before it")
    return found


def missing(planned: PlannedStage, course: Course | None) -> list[int]:
    """Return the trained iterations that lack their proof. Those at a stage's snapshots are checked with the snapshots."""
    audit, begins = planned.stage.solver.audit, planned.stage.begins
    if audit is None or not audit.proof_iter or planned.state not in (State.DONE, State.RESUME):
        return []
    every = audit.proof_iter
    due = {begins, *range((begins // every + 1) * every, planned.iter + 1, every)}
    if planned.state is State.DONE:
        due.add(planned.iter)
    return sorted(due - (course.proofs.keys() if course is not None else set()))


# -- what is trained again


@dataclass(frozen=True, slots=True)
class Leg:
    """A part of a stretch with the same workers and threads throughout. It ends at `until` once the stage has gone back `returns` times; if
    that doesn't happen, at `latest`."""

    until: int
    workers: int
    threads: int
    returns: int = 0
    latest: int = 0


@dataclass(frozen=True, slots=True)
class Stretch:
    """Training of a stage from a snapshot (None: from its start) up to iteration `until`, which checks the proofs at `iters`. `returns`:
    those that it must come to; `number`: the returns before it begins."""

    stage: str
    base: SnapshotRef | None
    begins: int
    until: int
    iters: tuple[int, ...]
    legs: tuple[Leg, ...]
    returns: Mapping[int, Return]
    number: int = 0

    @property
    def iterations(self) -> int:
        return self.until - self.begins + sum(one.iter - one.back_to for one in self.returns.values())


class Until:
    """Called with each event of a run: returns whether the leg of a stage ends with the next iteration."""

    def __init__(self, stage: str, leg: Leg) -> None:
        self.stage, self.leg, self.reached, self.returned = stage, leg, False, 0

    def __call__(self, event: Event) -> bool:
        if isinstance(event, Iterated | StageStarted | NotFinite) and event.stage == self.stage:
            failed = isinstance(event, NotFinite)
            back = isinstance(event, NotFinite) and event.back_to is not None
            self.returned += back
            last = self.leg.until - 1 if self.returned >= self.leg.returns else self.leg.latest
            self.reached = event.iter + failed >= last and not back  # after a return a StageStarted follows
        return self.reached


Resources = Callable[[RunStarted], tuple[int, int]]  # workers and threads for the iterations of a process life


def legs(course: Course, begins: int, number: int, until: int, resources: Resources) -> tuple[Leg, ...]:
    """Return the legs from iteration `begins`, where the stage has gone back `number` times, up to `until`."""
    parts: list[tuple[int, tuple[int, int]]] = []  # (end, resources)
    ends = [start for start, _ in course.lives[1:]] + [until]
    for (_, life), end in zip(course.lives, ends, strict=False):
        if end > begins and (not parts or parts[-1][0] < until):
            needs = resources(life)
            if parts and parts[-1][1] == needs:
                parts.pop()
            parts.append((min(end, until), needs))
    made = []
    for end, (workers, threads) in parts:
        due = [one.iter + 1 for one in course.between(number, end).values()]
        made.append(Leg(end, workers, threads, len(due), max(due, default=0)))
        number = max(number, course.number(end))
    return tuple(made)


@dataclass(frozen=True, slots=True)
class Saved:
    """A snapshot on disk, and how often its stage had gone back."""

    ref: SnapshotRef
    number: int = 0


def stretches(
    schedule: Schedule,
    courses: Mapping[str, Course],
    snapshots: Sequence[Saved],
    number: int,
    seed: int,
    resources: Resources,
) -> list[Stretch]:
    """Return the stretches that check `number` proofs, drawn evenly from all behind a stage's start."""
    stages = {stage.name: stage for stage in schedule.stages if stage.enabled and stage.name in courses}
    places = [(name, n) for name in stages for n in courses[name].proofs if n > stages[name].begins]
    drawn = random.Random(seed).sample(places, min(number, len(places)))
    found: dict[tuple[str, str], Stretch] = {}
    for name, iter in sorted(drawn, key=places.index):
        base = newest_before(snapshots, name, courses[name], iter)
        one = stretch(stages[name], courses[name], base, iter, resources)
        found[name, one.base.name if one.base is not None else ""] = one  # the last drawn is the furthest
    return list(found.values())


def stretch(stage: Stage, course: Course, base: Saved | None, until: int, resources: Resources) -> Stretch:
    begins, number = (base.ref.iter, base.number) if base is not None else (stage.begins, 0)
    return Stretch(
        stage.name,
        base.ref if base is not None else None,
        begins,
        until,
        tuple(n for n in course.proofs if begins < n <= until),
        legs(course, begins, number, until, resources),
        course.between(number, until),
        number,
    )


def newest_before(snapshots: Sequence[Saved], stage: str, course: Course, iter: int) -> Saved | None:
    """Return the stage's newest snapshot before an iteration, on its course."""
    own = [one for one in snapshots if one.ref.stage == stage and one.ref.iter < iter]
    own = [one for one in own if course.leads(one.ref.iter, one.number, iter)]
    return max(own, key=lambda one: (one.number, one.ref.iter, one.ref.attempt), default=None)


def next_from(snapshots: Sequence[Saved], stage: str, course: Course, iter: int) -> Saved | None:
    """Return the stage's first snapshot at an iteration or after it, on its course."""
    own = [one for one in snapshots if one.ref.stage == stage and one.ref.iter >= iter]
    own = [one for one in own if course.leads(one.ref.iter, one.number, one.ref.iter)]
    return min(own, key=lambda one: (one.ref.iter, -one.ref.attempt), default=None)
