"""The proofs in a run's log (`audit_param { proof_iter }`): how each stage came to where it is, whether its proofs follow from one another, and
which stretches of training check some of them. Pure."""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from stagerun.base.events import Event, NotFinite, Proof, Renamed, RunStarted, StageStarted, chained
from stagerun.base.recipe import Schedule
from stagerun.base.snapshots import SnapshotRef
from stagerun.plan import PlannedStage, State
from stagerun.store import parse_name


@dataclass(slots=True)
class Course:
    """How a stage came to where it is. `lives`: the iterations at which process lives took over; `returns`: by number, where `on_nan: ROLLBACK`
    went back to: what lies behind was trained after it."""

    proofs: dict[int, Proof] = field(default_factory=dict)
    lives: list[tuple[int, RunStarted]] = field(default_factory=list)
    returns: dict[int, int] = field(default_factory=dict)

    def number(self, iter: int) -> int:
        """Return how often the stage had gone back when it trained this iteration."""
        return max((number for number, back_to in self.returns.items() if back_to < iter), default=0)

    def start(self, event: StageStarted, life: RunStarted | None) -> None:
        """What lies behind the iteration is trained again."""
        fresh = event.iter == event.begins
        self.returns = {n: to for n, to in self.returns.items() if to < event.iter and not fresh}
        self.proofs = {n: proof for n, proof in self.proofs.items() if n <= event.iter and not fresh}
        self.lives = [(n, other) for n, other in self.lives if n < event.iter]
        if life is not None:
            self.lives.append((event.iter, life))

    def trained(self, begins: int, until: int) -> list[RunStarted]:
        """Return the lives that trained the iterations from `begins` on."""
        ends = [start for start, _ in self.lives[1:]] + [until]
        return [life for (start, life), end in zip(self.lives, ends, strict=False) if end > begins and start < until]


def courses_of(events: Iterable[Event]) -> tuple[dict[str, Course], list[str]]:
    """Return the course of each stage that has proofs, by its present name, and contradictions in words. What was trained again after a kill
    or a rollback replaces the earlier proof, which must be equal unless images were left out."""
    found: dict[str, Course] = {}
    wrong: list[str] = []
    life: RunStarted | None = None
    returning, taken = set[str](), set[str]()
    for event in events:
        match event:
            case RunStarted():
                life = event
                returning.clear()
            case Renamed():
                for name in set(event.snapshots) - taken:  # each life tells of it again
                    taken.add(name)
                    place = parse_name(name)
                    if place is not None and place.stage in found and event.stage not in found:
                        found[event.stage] = found.pop(place.stage)
            case StageStarted():
                course = found.setdefault(event.stage, Course())
                kept = course.returns
                course.start(event, life)
                if event.stage in returning:
                    course.returns = kept
                returning.discard(event.stage)
            case NotFinite() if event.back_to is not None and event.until is None:
                course = found.setdefault(event.stage, Course())
                course.returns = {n: to for n, to in course.returns.items() if n < event.number} | {
                    event.number: event.back_to
                }
                returning.add(event.stage)
            case Proof():
                proofs = found.setdefault(event.stage, Course()).proofs
                if proofs.get(event.iter, event) != event:
                    wrong.append(f"the log has two proofs of `{event.stage}` at iteration {event.iter} that differ")
                proofs[event.iter] = event
    courses = {stage: course for stage, course in found.items() if course.proofs}
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
class Saved:
    """A snapshot on disk, and how often its stage had gone back."""

    ref: SnapshotRef
    number: int = 0


@dataclass(frozen=True, slots=True)
class Stretch:
    """Training of a stage from a snapshot (None: from its start) up to iteration `until`, which checks the proofs at `iters`."""

    stage: str
    base: SnapshotRef | None
    begins: int
    until: int
    iters: tuple[int, ...]
    workers: int
    threads: int


Resources = Callable[[RunStarted], tuple[int, int]]  # workers and threads for the iterations of a process life


def stretches(
    schedule: Schedule,
    courses: Mapping[str, Course],
    snapshots: Sequence[Saved],
    number: int,
    seed: int,
    resources: Resources,
) -> tuple[list[Stretch], int]:
    """Return the stretches that check `number` proofs, drawn evenly from all behind a stage's start; and how many proofs can't be trained up to:
    those behind a rollback or a change of workers, where no snapshot after it is left."""
    found: list[Stretch] = []
    for stage in schedule.stages:
        if not stage.enabled or stage.name not in courses:
            continue
        course = courses[stage.name]
        for until in (n for n in course.proofs if n > stage.begins):
            own = [s for s in snapshots if s.ref.stage == stage.name and s.ref.iter < until]
            own = [s for s in own if s.number == course.number(until)]
            base = max(own, key=lambda one: (one.ref.iter, one.ref.attempt), default=None)
            begins = base.ref.iter if base is not None else stage.begins
            needs = {resources(life) for life in course.trained(begins, until)}
            if len(needs) == 1 and (base is not None or not course.number(until)):
                iters = tuple(n for n in course.proofs if begins < n <= until)
                ref = base.ref if base is not None else None
                found.append(Stretch(stage.name, ref, begins, until, iters, *needs.pop()))
    everything = sum(n > stage.begins for stage in schedule.stages for n in courses.get(stage.name, Course()).proofs)
    drawn = random.Random(seed).sample(range(len(found)), min(number, len(found)))
    longest = {(found[n].stage, found[n].begins): found[n] for n in sorted(drawn)}  # the last drawn is the furthest
    return list(longest.values()), everything - len(found)


def broken_link(before: str, proofs: Sequence[tuple[int, str, str]]) -> int | None:
    """The iteration of the first of (iteration, state, chain), in order, that does not follow from what is before it."""
    for iter, state, chain in proofs:
        if chained(before, iter, state) != chain:
            return iter
        before = chain
    return None
