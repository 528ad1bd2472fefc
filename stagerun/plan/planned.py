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
    """A field whose value differs from a snapshot's. `span`: of the new value, if it is written."""

    field: str
    old: str
    new: str
    span: Span | None

    def __str__(self) -> str:
        origin = f" ({self.span.path}:{self.span.line})" if self.span else " (a default)"
        return f"{self.field} {self.old} -> {self.new}{origin}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStage:
    """The plan for a stage: iteration i, from `iter` on, begins at image position + i * batch_size + skipped of its
    training set. A piece (`Plan.pieces`) is a stretch to retrain, FRESH or RESUME, for the snapshot at `until`;
    `children` are the stages and ensembles that start from it, and `like` shows the environment of the earlier
    training."""

    stage: Stage  # with the ids of its teacher and its average's members in its identity
    state: State
    iter: int  # updates done already
    position: int  # images consumed before the stage, below 0 after a `solverstate`, as if training had begun at 0
    start: SnapshotRef | None = None  # its newest (RESUME), its parent's (FRESH); None: fresh weights, or not made yet
    end: SnapshotRef | None = None  # the stage's final one (DONE)
    why: str = ""
    changes: tuple[Change, ...] = ()
    again: bool = False  # trained again by --redo
    until: int | None = None
    children: tuple[str, ...] = ()
    like: SnapshotRef | None = None
    at_most: bool = False  # `position` may turn out less, if `early_stop` ends an earlier stage
    skipped: int = 0  # images that rollbacks (`on_nan`) left out up to `iter`
    skipped_before: int = 0  # likewise up to the start of the stage
    teacher: SnapshotRef | None = None
    averaged: tuple[SnapshotRef, ...] = ()  # the members of its `average`, if all exist

    @property
    def name(self) -> str:
        return self.stage.name

    @property
    def begins_at(self) -> int:
        """Return the image at which the stage's first iteration began, or will begin."""
        return self.position + self.stage.begins * self.stage.solver.batch_size + self.skipped_before

    @property
    def label(self) -> str:
        """Return the stage's name; for a piece its target, `main@7638`."""
        return label(self.name, self.until)

    @property
    def id_stage(self) -> str:
        """Return the name under which the stage began, which the ids of its snapshots contain."""
        earlier = self.like or (self.start if self.state is State.RESUME else None)
        return earlier.begun_as if earlier is not None else self.name

    @property
    def last(self) -> int:
        """Return the iteration after which training stops."""
        return self.stage.solver.max_iter if self.until is None else self.until

    @property
    def length(self) -> tuple[int, int]:
        """Return the earliest and the latest iteration at which the stage ends: `early_stop` may end it, or has."""
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
        """Return the most iterations left."""
        return self.last - self.iter if self.state in TO_TRAIN else 0


def iterations_text(least: int, most: int) -> str:
    """Return `1 iteration`, `12 to 40 iterations`."""
    return between(least, most) + count(most, "iteration").removeprefix(str(most))


def needed(planned: PlannedStage) -> Weights | None:
    """Return the external weights that the stage still has to start with; None once it has started."""
    return planned.stage.solver.start if planned.state in (State.FRESH, State.STALE) else None


def label(stage: str, iter: int | str | None) -> str:
    """Return `main` or `main@7638`, as in `from`."""
    return stage if iter is None else f"{stage}@{iter}"


def options(option: str, schedule: Schedule, stages: Iterable[Stage]) -> list[str]:
    """Return `--redo a`, `--redo b`: one for each stage, or for a block with all its stages."""
    names = {stage.name for stage in stages}
    in_part = {stage.group for stage in schedule.stages if stage.enabled and stage.name not in names}
    targets = dict.fromkeys(s.name if s.group in in_part else s.group or s.name for s in stages)
    return [f"{option} {name}" for name in targets]


def points_averaged(schedule: Schedule, stage: Stage) -> tuple[tuple[str, int | None], ...]:
    """Return the stages and iterations whose average the stage starts from; () for other stages."""
    return schedule.ensemble(stage.average).points if stage.average is not None else ()


class Lost(NamedTuple):
    """A lost snapshot that will be retrained, with children whose snapshots still count."""

    stage: str
    iter: int
    end: bool  # it is the stage's end
    children: tuple[str, ...]
    named: tuple[str, ...]  # children of --redo, or below one: the command decides about them
    like: SnapshotRef | None  # shows the environment of the earlier training

    @property
    def unasked(self) -> tuple[str, ...]:
        """Return the children that another environment would make stale without a --redo to cover them."""
        return tuple(name for name in self.children if name not in self.named)


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan. `pieces`: in running order, each before the first stage that waits for it; `lost`: in the order of the stages. `inventory`: the
    snapshots, each under its stage's current name. `points`: the existing snapshots before a stage's end that ensembles use, by stage
    and iteration."""

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
        """Return stages and pieces to train, even stale ones, in running order; pieces that only ensembles wait for come last."""
        work: list[PlannedStage] = []
        for planned in self.stages:
            if not planned.iterations_left:
                continue
            if planned.start is None and self.pieces:
                path = {planned.name, planned.stage.average, *self.ancestors(planned.stage)}
                work += [p for p in self.pieces if p not in work and not path.isdisjoint(p.children)]
            work.append(planned)
        return (*work, *(piece for piece in self.pieces if piece not in work))

    @property
    def next(self) -> PlannedStage | None:
        """Return the stage or piece to train now; None if none is left. Parents come first, so its start is on disk."""
        return next((s for s in self.work if s.state is not State.STALE), None)

    @property
    def unclaimed(self) -> tuple[str, ...]:
        """Return the names of stages that have snapshots and are no longer in this schedule."""
        return tuple(sorted(self.inventory.by_stage.keys() - {s.name for s in self.stages}))

    @property
    def iterations(self) -> int:
        """Return the most iterations of all enabled stages; of a stage with a `solverstate` from its iteration on."""
        return sum(s.length[1] - s.stage.begins for s in self.enabled)

    @property
    def least(self) -> int:
        """Return `iterations` if `early_stop` ends each stage as soon as it may."""
        return sum(s.length[0] - s.stage.begins for s in self.enabled)

    @property
    def iterations_left(self) -> int:
        """Return the most iterations that the plan trains, including pieces."""
        return sum(s.iterations_left for s in (*self.stages, *self.pieces))

    @property
    def least_left(self) -> int:
        """Return `iterations_left` if `early_stop` ends each stage as soon as it may."""
        return sum(s.least_left for s in (*self.stages, *self.pieces))

    @property
    def left(self) -> str:
        """Return `412 of 4143 iterations`: the remaining and all."""
        return f"{between(self.least_left, self.iterations_left)} of {iterations_text(self.least, self.iterations)}"

    def ancestors(self, stage: Stage) -> set[str]:
        names: set[str] = set()
        while stage.parent is not None:
            names.add(stage.parent)
            stage = self.schedule.stage(stage.parent)
        return names
