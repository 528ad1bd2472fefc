"""A Plan as values."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from stagerun.base.errors import Span
from stagerun.base.recipe import Schedule, Stage, Weights
from stagerun.base.snapshots import Inventory, SnapshotRef
from stagerun.base.text import between, count
from stagerun.plan.raised import length_before


class State(enum.Enum):
    FRESH = "fresh"
    RESUME = "resume"
    DONE = "done"
    STALE = "stale"
    DISABLED = "disabled"  # `enabled: false`, or below such a stage
    NOT_CHOSEN = "not chosen"  # left out by --only or --until, and not done


@dataclass(frozen=True, slots=True)
class Change:
    """A field whose value is not the one a snapshot was made with. `span` is where the new value is written, if anywhere."""

    field: str
    old: str
    new: str
    span: Span | None

    def __str__(self) -> str:
        place = f" ({self.span.path}:{self.span.line})" if self.span else " (a default)"
        return f"{self.field} {self.old} -> {self.new}{place}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStage:
    """`iter`: updates done already. `position`: images of its own training set consumed before the stage along its path, but for those that
    a rollback (`on_nan`) left out: of these `skipped` counts what lies before `iter`, along the path, too, and `skipped_before` what lies
    before the stage. So iteration i, from `iter` on, begins at image position + i * batch_size + skipped. `at_most`: `position` may turn
    out less, where `early_stop` ends a stage before.

    `start` is the snapshot that training goes on from: its own (RESUME), the one of its parent that it starts from (FRESH), or
    None: the seed, or a snapshot that is yet to be made. `end` is the finished stage's snapshot (DONE), and `teacher` that of the stage
    which teaches this one. A stage with a `solverstate` begins at the iteration of that, and `position` is as if it had come there from 0
    with the images before: below 0, as a rule. With a teacher the identity of `stage` has its id, and with an
    `average` those of the members, which are `averaged` where all are there; `start` is then the member named last.

    A piece (`Plan.pieces`) is a stretch of a stage that is trained once more, FRESH or RESUME, up to the iteration `until`, for the sake of
    a snapshot there; `children` are the stages that start from it, and ensembles made from it; `like` is the snapshot that shows in what
    environment the stage was trained there before.
    """

    stage: Stage
    state: State
    iter: int
    position: int
    start: SnapshotRef | None = None
    end: SnapshotRef | None = None
    why: str = ""
    changes: tuple[Change, ...] = ()
    again: bool = False  # trained again by --redo
    until: int | None = None
    children: tuple[str, ...] = ()
    like: SnapshotRef | None = None
    at_most: bool = False
    skipped: int = 0
    skipped_before: int = 0
    teacher: SnapshotRef | None = None
    averaged: tuple[SnapshotRef, ...] = ()

    @property
    def comes_by_the_same(self) -> bool:
        """Whether training the stage reproduces a snapshot of it that is gone."""
        return self.state is not State.STALE and not self.again

    @property
    def comes_to_the_same_end(self) -> bool:
        """Whether training the stage reproduces its final snapshot: not if its length has changed since."""
        ref = self.start if self.state is State.RESUME else None
        return self.comes_by_the_same and (ref is None or length_before(ref, self.stage) is None)

    @property
    def begins_at(self) -> int:
        """The image at which the stage's first iteration began, or will."""
        return self.position + self.stage.begins * self.stage.solver.batch_size + self.skipped_before

    @property
    def label(self) -> str:
        """The stage's name; of a piece what it is trained for, `main@7638`."""
        return label(self.stage.name, self.until)

    @property
    def id_stage(self) -> str:
        """The stage's name in the ids of its snapshots: the one that it started with."""
        own = self.like or (self.start if self.state is State.RESUME else None)
        return own.begun_as if own is not None else self.stage.name

    @property
    def last(self) -> int:
        """The iteration after which training stops."""
        return self.stage.solver.max_iter if self.until is None else self.until

    @property
    def length(self) -> tuple[int, int]:
        """Iterations of the stage at the least and at the most: `early_stop` may end it, or has."""
        solver = self.stage.solver
        if solver.early_stop is None or self.until is not None:
            return self.last, self.last
        if self.state is State.DONE:
            return self.iter, self.iter
        return max(self.iter, solver.earliest_end), self.last

    @property
    def least_left(self) -> int:
        return self.iterations_left - self.last + self.length[0] if self.iterations_left else 0

    @property
    def iterations_left(self) -> int:
        """At the most."""
        return self.last - self.iter if self.state in (State.FRESH, State.RESUME, State.STALE) else 0


def iterations_text(least: int, most: int) -> str:
    """`1 iteration`, `12 to 40 iterations`."""
    return between(least, most) + count(most, "iteration").removeprefix(str(most))


def needed(planned: PlannedStage) -> Weights | None:
    """The weights from elsewhere that the stage starts with, until it has started."""
    return planned.stage.solver.start if planned.state in (State.FRESH, State.STALE) else None


def label(parent: str, iter: int | None) -> str:
    """As `from` has it: `main`, `main@7638`."""
    return parent if iter is None else f"{parent}@{iter}"


@dataclass(frozen=True, slots=True)
class Lost:
    """A snapshot of `stage`, at `iter`, that is gone, from which stages came that count, and that is trained once more.

    `end`: it is the stage's end. `children` came from there, and count. `named` are those of them that --redo names,
    or that follow from such a one: of them the command says what becomes of them with other bits. `like` is a snapshot whose
    environment the stage was in there, as far as what is left shows; None if nothing does.
    """

    stage: str
    iter: int
    end: bool
    children: tuple[str, ...]
    named: tuple[str, ...]
    like: SnapshotRef | None

    @property
    def unasked(self) -> tuple[str, ...]:
        """Those that another environment would make stale, where the command doesn't say what to do then."""
        return tuple(name for name in self.children if name not in self.named)


@dataclass(frozen=True, slots=True)
class Plan:
    """`pieces` are in running order, each before the first stage that waits for it. `lost` is in that of the stages. `inventory` is
    what the plan was made from, with each snapshot under the name that its stage has now. `points` has the snapshots before a stage's end
    that ensembles are made from, as far as they are there, by stage and iteration."""

    schedule: Schedule
    stages: tuple[PlannedStage, ...]
    pieces: tuple[PlannedStage, ...] = ()
    lost: tuple[Lost, ...] = ()
    inventory: Inventory = field(default_factory=Inventory)
    points: Mapping[tuple[str, int], SnapshotRef] = field(default_factory=dict)

    @property
    def stale(self) -> tuple[PlannedStage, ...]:
        return tuple(s for s in self.stages if s.state is State.STALE)

    @property
    def work(self) -> tuple[PlannedStage, ...]:
        """Stages and pieces with something to train, stale ones too, in running order; pieces that only ensembles wait for come last."""
        found: list[PlannedStage] = []
        for planned in self.stages:
            if not planned.iterations_left:
                continue
            if planned.start is None and self.pieces:
                path = {planned.stage.name, planned.stage.average, *self.ancestors(planned.stage)}
                found += [p for p in self.pieces if p not in found and not path.isdisjoint(p.children)]
            found.append(planned)
        return (*found, *(piece for piece in self.pieces if piece not in found))

    @property
    def next(self) -> PlannedStage | None:
        """The stage, or the piece of one, to train now; None when nothing is left. Parents come first, so its start is on disk."""
        return next((s for s in self.work if s.state is not State.STALE), None)

    @property
    def left_out(self) -> tuple[PlannedStage, ...]:
        """Stages that are not done and that this plan doesn't train: those not enabled, and those not chosen."""
        return tuple(s for s in self.stages if s.state in (State.DISABLED, State.NOT_CHOSEN))

    @property
    def unclaimed(self) -> tuple[str, ...]:
        """Names that there are snapshots of, and no stage that they count for."""
        known = {s.stage.name for s in self.stages}
        return tuple(sorted({ref.stage for ref in self.inventory.snapshots if ref.stage not in known}))

    @property
    def iterations(self) -> int:
        """Iterations of all stages that are enabled, at the most; of one with a `solverstate` those from its iteration on."""
        return sum(s.length[1] - s.stage.begins for s in self.stages if s.state is not State.DISABLED)

    @property
    def iterations_left(self) -> int:
        """Iterations that the plan trains at the most, pieces among them."""
        return sum(s.iterations_left for s in (*self.stages, *self.pieces))

    @property
    def least(self) -> int:
        """`iterations`, where `early_stop` ends each stage as soon as it may."""
        return sum(s.length[0] - s.stage.begins for s in self.stages if s.state is not State.DISABLED)

    @property
    def least_left(self) -> int:
        """`iterations_left`, likewise."""
        return sum(s.least_left for s in (*self.stages, *self.pieces))

    @property
    def left(self) -> str:
        """`412 of 4143 iterations`: what is to do, of all."""
        return f"{between(self.least_left, self.iterations_left)} of {iterations_text(self.least, self.iterations)}"

    def ancestors(self, stage: Stage) -> set[str]:
        found: set[str] = set()
        while stage.parent is not None and stage.parent not in found:
            found.add(stage.parent)
            stage = self.schedule.stage(stage.parent)
        return found
