"""A Plan as values."""

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from stagerun.base.errors import Span
from stagerun.base.recipe import Schedule, Stage, Weights
from stagerun.base.snapshots import Inventory, SnapshotRef
from stagerun.base.text import between, count


class State(enum.Enum):
    FRESH = "fresh"
    RESUME = "resume"
    DONE = "done"
    STALE = "stale"
    DISABLED = "disabled"  # `enabled: false`, or below such a stage
    NOT_CHOSEN = "not chosen"  # left out by --only or --until, and not done


TO_TRAIN = (State.FRESH, State.RESUME, State.STALE)


class Change(NamedTuple):
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
    """What to do about a stage: iteration i, from `iter` on, begins at image position + i * batch_size + skipped of its training set.

    A piece (`Plan.pieces`) is a stretch that is trained once more, FRESH or RESUME, for the snapshot at `until`; `children` are the stages
    and ensembles that start from it, and `like` shows in what environment the stage was trained there before.
    """

    stage: Stage  # with the ids of its teacher and of what it is averaged from in its identity
    state: State
    iter: int  # updates done already
    position: int  # images consumed before the stage; below 0 as a rule after a `solverstate`, as if it had come from 0
    start: SnapshotRef | None = None  # its own (RESUME), its parent's (FRESH); None: the seed, or yet to be made
    end: SnapshotRef | None = None  # the stage's final one (DONE)
    why: str = ""
    changes: tuple[Change, ...] = ()
    again: bool = False  # trained again by --redo
    until: int | None = None
    children: tuple[str, ...] = ()
    like: SnapshotRef | None = None
    at_most: bool = False  # `position` may turn out less, where `early_stop` ends a stage before
    skipped: int = 0  # images that rollbacks (`on_nan`) left out up to `iter`
    skipped_before: int = 0  # likewise up to the start of the stage
    teacher: SnapshotRef | None = None
    averaged: tuple[SnapshotRef, ...] = ()  # the members of its `average`, if all are there

    @property
    def name(self) -> str:
        return self.stage.name

    @property
    def begins_at(self) -> int:
        """The image at which the stage's first iteration began, or will."""
        return self.position + self.stage.begins * self.stage.solver.batch_size + self.skipped_before

    @property
    def label(self) -> str:
        """The stage's name; of a piece what it is trained for, `main@7638`."""
        return label(self.name, self.until)

    @property
    def id_stage(self) -> str:
        """The stage's name in the ids of its snapshots: the one that it started with."""
        own = self.like or (self.start if self.state is State.RESUME else None)
        return own.begun_as if own is not None else self.name

    @property
    def last(self) -> int:
        """The iteration after which training stops."""
        return self.stage.solver.max_iter if self.until is None else self.until

    @property
    def length(self) -> tuple[int, int]:
        """The iteration at which the stage ends, at the least and at the most: `early_stop` may end it, or has."""
        solver = self.stage.solver
        if solver.early_stop is None or self.until is not None:
            return self.last, self.last
        if self.state is State.DONE:
            return self.iter, self.iter
        return max(self.iter, solver.earliest_end), self.last

    @property
    def least_left(self) -> int:
        return self.length[0] - self.iter if self.state in TO_TRAIN else 0

    @property
    def iterations_left(self) -> int:
        """At the most."""
        return self.last - self.iter if self.state in TO_TRAIN else 0


def iterations_text(least: int, most: int) -> str:
    """`1 iteration`, `12 to 40 iterations`."""
    return between(least, most) + count(most, "iteration").removeprefix(str(most))


def needed(planned: PlannedStage) -> Weights | None:
    """The weights from elsewhere that the stage starts with, until it has started."""
    return planned.stage.solver.start if planned.state in (State.FRESH, State.STALE) else None


def label(stage: str, iter: int | None) -> str:
    """As `from` has it: `main`, `main@7638`."""
    return stage if iter is None else f"{stage}@{iter}"


def options(option: str, schedule: Schedule, stages: Iterable[Stage]) -> list[str]:
    """`--redo a`, `--redo b`: one for each stage, or for a block all of whose stages are meant."""
    names = {stage.name for stage in stages}
    in_part = {stage.group for stage in schedule.stages if stage.enabled and stage.name not in names}
    meant = dict.fromkeys(s.name if s.group in in_part else s.group or s.name for s in stages)
    return [f"{option} {name}" for name in meant]


def points_averaged(schedule: Schedule, stage: Stage) -> tuple[tuple[str, int | None], ...]:
    """The stages and iterations of them that the stage's start is averaged from; () for another stage."""
    return schedule.ensemble(stage.average).points if stage.average is not None else ()


class Lost(NamedTuple):
    """A snapshot that is gone and is trained once more, and from which stages came that count."""

    stage: str
    iter: int
    end: bool  # it is the stage's end
    children: tuple[str, ...]
    named: tuple[str, ...]  # children that --redo names, or that follow from such: it is said what becomes of them
    like: SnapshotRef | None  # shows in which environment the stage was trained there

    @property
    def unasked(self) -> tuple[str, ...]:
        """Those that another environment would make stale, where the command doesn't say what to do then."""
        return tuple(name for name in self.children if name not in self.named)


@dataclass(frozen=True, slots=True)
class Plan:
    """`pieces` are in running order, each before the first stage that waits for it; `lost` in that of the stages. `inventory` is what the
    plan was made from, with each snapshot under the name that its stage has now. `points` has the snapshots before a stage's end that
    ensembles are made from, as far as they are there, by stage and iteration."""

    schedule: Schedule
    stages: tuple[PlannedStage, ...]
    pieces: tuple[PlannedStage, ...]
    lost: tuple[Lost, ...]
    inventory: Inventory
    points: Mapping[tuple[str, int], SnapshotRef]

    @property
    def enabled(self) -> tuple[PlannedStage, ...]:
        return tuple(s for s in self.stages if s.state is not State.DISABLED)

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
                path = {planned.name, planned.stage.average, *self.ancestors(planned.stage)}
                found += [p for p in self.pieces if p not in found and not path.isdisjoint(p.children)]
            found.append(planned)
        return (*found, *(piece for piece in self.pieces if piece not in found))

    @property
    def next(self) -> PlannedStage | None:
        """The stage, or the piece of one, to train now; None when nothing is left. Parents come first, so its start is on disk."""
        return next((s for s in self.work if s.state is not State.STALE), None)

    @property
    def unclaimed(self) -> tuple[str, ...]:
        """Names of stages that have snapshots, and are in this schedule no more."""
        return tuple(sorted(self.inventory.by_stage.keys() - {s.name for s in self.stages}))

    @property
    def iterations(self) -> int:
        """Iterations of all stages that are enabled, at the most; of one with a `solverstate` those from its iteration on."""
        return sum(s.length[1] - s.stage.begins for s in self.enabled)

    @property
    def least(self) -> int:
        """`iterations`, where `early_stop` ends each stage as soon as it may."""
        return sum(s.length[0] - s.stage.begins for s in self.enabled)

    @property
    def iterations_left(self) -> int:
        """Iterations that the plan trains at the most, pieces among them."""
        return sum(s.iterations_left for s in (*self.stages, *self.pieces))

    @property
    def least_left(self) -> int:
        """`iterations_left`, where `early_stop` ends each stage as soon as it may."""
        return sum(s.least_left for s in (*self.stages, *self.pieces))

    @property
    def left(self) -> str:
        """`412 of 4143 iterations`: what is to do, of all."""
        return f"{between(self.least_left, self.iterations_left)} of {iterations_text(self.least, self.iterations)}"

    def ancestors(self, stage: Stage) -> set[str]:
        found: set[str] = set()
        while stage.parent is not None:
            found.add(stage.parent)
            stage = self.schedule.stage(stage.parent)
        return found
