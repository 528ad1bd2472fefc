"""Schedule + inventory -> for each stage what will be done, and why. Pure.

A stage's snapshot counts if the stage has the same identity now as when it was trained, and started from the snapshot that
its parent ends in now. So a changed stage makes itself and its descendants stale, and never its ancestors.
"""

import enum
from collections.abc import Collection
from dataclasses import dataclass

from stagerun.errors import Problem, RecipeError, ResumeRefused, Span, listing, nearest
from stagerun.recipe import Schedule, Stage
from stagerun.snapshots import Inventory, SnapshotRef


class State(enum.Enum):
    FRESH = "fresh"
    RESUME = "resume"
    DONE = "done"
    STALE = "stale"


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
    """`iter`: updates done already. `position`: images consumed before the stage along its path.

    `start` is the snapshot that training goes on from: its own (RESUME), its parent's last (FRESH), or None: the seed, or
    a parent that is yet to be trained. `end` is the finished stage's snapshot (DONE).
    """

    stage: Stage
    state: State
    iter: int
    position: int
    start: SnapshotRef | None = None
    end: SnapshotRef | None = None
    why: str = ""
    changes: tuple[Change, ...] = ()
    kept: bool = False
    again: bool = False  # trained again by --redo

    @property
    def iterations_left(self) -> int:
        return 0 if self.state is State.DONE else self.stage.solver.max_iter - self.iter


@dataclass(frozen=True, slots=True)
class Plan:
    schedule: Schedule
    stages: tuple[PlannedStage, ...]

    @property
    def stale(self) -> tuple[PlannedStage, ...]:
        return tuple(s for s in self.stages if s.state is State.STALE)

    @property
    def next(self) -> PlannedStage | None:
        """The stage to train now; None when all are done. Parents come first, so its start is on disk."""
        return next((s for s in self.stages if s.state in (State.FRESH, State.RESUME)), None)

    @property
    def iterations(self) -> int:
        return sum(s.stage.solver.max_iter for s in self.stages)

    @property
    def iterations_left(self) -> int:
        return sum(s.iterations_left for s in self.stages)


def make_plan(schedule: Schedule, inventory: Inventory, redo: Collection[str] = (), keep: Collection[str] = ()) -> Plan:
    """What is left to do.

    `redo` names stale stages to train again, with their stale descendants; `keep` names stale stages whose snapshots
    count as they are. On a stage that is not stale both do nothing, so that a command with them can be repeated.
    RecipeError when they name no stage.
    """
    _check_names(schedule, redo, keep)
    planned: dict[str, PlannedStage] = {}
    below: set[str] = set(redo)  # the stages named by `redo`, and what follows from them
    for stage in schedule.stages:
        parent = planned[stage.parent] if stage.parent else None
        if stage.parent in below and stage.name not in keep:
            below.add(stage.name)
        named = stage.name in redo
        planned[stage.name] = _plan_stage(stage, parent, inventory, stage.name in below, named, stage.name in keep)
    return Plan(schedule, tuple(planned.values()))


def require_fresh(plan: Plan) -> None:
    """ResumeRefused naming each stale stage, what changed in it, and how to go on."""
    if not plan.stale:
        return
    lines = []
    for planned in plan.stale:
        lines.append(f"stage `{planned.stage.name}` is stale: {planned.why}")
        lines += [f"  {change}" for change in planned.changes]
    first = plan.stale[0].stage.name
    raise ResumeRefused(
        "\n".join(lines),
        f"`--redo {first}` trains it and what follows from it again; `--keep {first}` keeps its snapshots as they are; "
        "or undo the change, or take another --out",
    )


def _plan_stage(
    stage: Stage, parent: PlannedStage | None, inventory: Inventory, redo: bool, named: bool, keep: bool
) -> PlannedStage:
    position = _images_after(parent) if parent is not None and stage.solver.carry_data else 0
    start = parent.end if parent else None
    own = inventory.of(stage.name)
    usable = [ref for ref in own if _counts(ref, stage, parent, inventory)]
    kept = keep and not usable and bool(own)
    if kept:
        usable = [max(own, key=lambda ref: (ref.attempt, ref.iter))]
    if usable:
        newest = max(usable, key=lambda ref: (ref.iter, ref.attempt))
        length = stage.solver.max_iter
        if kept:  # finished where it was to finish then
            length = min(length, int(newest.identity.get("solver.max_iter", length)))
        done = newest.iter >= length
        why = ("kept as it is" if kept else "") if done else f"from {newest.name}"
        return PlannedStage(
            stage=stage,
            state=State.DONE if done else State.RESUME,
            iter=newest.iter,
            position=position,
            start=None if done else newest,
            end=newest if done else None,
            why=why,
            kept=kept,
        )
    if not own:
        return PlannedStage(stage=stage, state=State.FRESH, iter=0, position=position, start=start)
    why, changes = _why_stale(stage, parent, own, inventory)
    # Below a stage that `redo` names but that is up to date again (the same command, typed a second time) only what is
    # stale because of it follows; a change of its own must be named.
    if redo and not named and changes and not (parent and parent.again):
        redo = False
    if parent is not None and parent.state is State.STALE:
        redo = False  # there is nothing to start from
    state = State.FRESH if redo else State.STALE
    return PlannedStage(
        stage=stage,
        state=state,
        iter=0,
        position=position,
        start=start,
        changes=changes,
        why=f"trained again: {why}" if redo else why,
        again=redo,
    )


def _images_after(parent: PlannedStage) -> int:
    """Images consumed when `parent` has ended. A kept snapshot consumed as many as its own definition said: its children
    would otherwise see other images than before, under the same identity."""
    iterations, batch_size = parent.stage.solver.max_iter, parent.stage.solver.batch_size
    if parent.kept and parent.end is not None:
        iterations = parent.end.iter
        batch_size = int(parent.end.identity.get("solver.batch_size", batch_size))
    return parent.position + iterations * batch_size


def _counts(ref: SnapshotRef, stage: Stage, parent: PlannedStage | None, inventory: Inventory) -> bool:
    if parent is None:
        came_from = ref.parent == ""
    elif parent.end is not None:
        came_from = ref.parent == parent.end.id
    else:
        # The parent has lost its last snapshot (damaged, or deleted). Unchanged, it will end in the same bits, and if not,
        # the next plan sees another id. What is still there did not get lost: the end of another stage, or that of an
        # older definition of a parent that is half trained again.
        lost = ref.parent != "" and all(ref.parent != other.id for other in inventory.snapshots)
        came_from = lost and parent.state is not State.STALE and not parent.again
    return came_from and not changed_fields(ref, stage) and ref.iter <= stage.solver.max_iter


def changed_fields(ref: SnapshotRef, stage: Stage) -> list[str]:
    """The fields of identity in which a snapshot was made from something else than the stage is now.

    A field that the snapshot's version of stagerun did not know had its default then, and one that counted there and does not any
    more is as good with any value: an upgrade makes nothing stale.
    """

    def changed(field: str) -> bool:
        if field not in stage.identity and field in stage.origins:
            return False
        if field in ref.identity:
            return ref.identity[field] != stage.identity.get(field)
        origin = stage.origins.get(field)
        return origin is None or origin.layer != "default"

    return sorted(field for field in ref.identity.keys() | stage.identity.keys() if changed(field))


def _why_stale(
    stage: Stage, parent: PlannedStage | None, own: tuple[SnapshotRef, ...], inventory: Inventory
) -> tuple[str, tuple[Change, ...]]:
    newest = max(own, key=lambda ref: (ref.attempt, ref.iter))
    changes = []
    for field in changed_fields(newest, stage):
        old, new = newest.identity.get(field, "(none)"), stage.identity.get(field, "(none)")
        origin = stage.origins.get(field)
        changes.append(Change(field.removeprefix("solver."), old, new, origin.span if origin else None))
    if changes:
        return "its definition has changed since it was trained", tuple(changes)
    if parent is None:
        return "it was trained from another stage, and now starts from the seed", ()
    if newest.parent == "":
        return f"it was trained from the seed, and now starts from `{parent.stage.name}`", ()
    before = next((ref.stage for ref in inventory.snapshots if ref.id == newest.parent), parent.stage.name)
    if before != parent.stage.name:
        return f"it was trained from `{before}`, and now starts from `{parent.stage.name}`", ()
    if parent.state is State.DONE:
        return f"it was trained from another end of `{parent.stage.name}`", ()
    if parent.state is State.STALE:
        return f"its parent `{parent.stage.name}` is stale", ()
    return f"its parent `{parent.stage.name}` is to be trained again", ()


def _check_names(schedule: Schedule, redo: Collection[str], keep: Collection[str]) -> None:
    known = [stage.name for stage in schedule.stages]
    problems = []
    for option, names in (("--redo", redo), ("--keep", keep)):
        for name in names:
            if name not in known:
                hint = nearest(name, known) or f"the stages are {listing(known)}"
                problems.append(Problem(f"no stage is named `{name}`", Span(option, 1, 1, len(name)), name, hint))
            elif option == "--redo" and name in keep:
                problems.append(
                    Problem(f"`{name}` is both in --redo and in --keep", Span(option, 1, 1, len(name)), name)
                )
    if problems:
        raise RecipeError(problems)
