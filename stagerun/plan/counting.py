"""Decides which snapshots count for the current definition of a stage, and why others don't; and the target of a rollback. Pure."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import NamedTuple

from stagerun.base import recipe
from stagerun.base.recipe import (
    ABSENT,
    AVERAGE_MEMBERS,
    AVERAGE_OF,
    BEST,
    FILES,
    FOLLOWED,
    FROM_ITER,
    LAST_USED,
    TEACHER,
    TESTED_LABELS,
    OnNan,
    Schedule,
    Solver,
    Stage,
)
from stagerun.base.snapshots import TRAINING_SET, Inventory, SnapshotRef, how_far, same_set
from stagerun.language.build import meant
from stagerun.language.values import omitted_default
from stagerun.plan.described import unread
from stagerun.plan.planned import Change, Plan, PlannedStage, State, label
from stagerun.schedule import policy_fields

MAX_ITER = "solver.max_iter"
EMA = {"solver.ema_decay", "solver.ema_interval"}
IMAGES = "data.train.source"  # in a Change: not a field of identity, but the images at that path


class Source(NamedTuple):
    """The end of a stage, or its iteration `iter`, as another stage's start, teacher or member of an average. `refs`:
    the snapshots at that point that count; use the first, the oldest, so that all stages from that point start with the
    same bits. `alike`: ids of snapshots at that point that differ only in the weight average that the stage keeps: the
    trained weights are the same."""

    decision: "Decision"
    iter: int | None
    refs: tuple[SnapshotRef, ...]
    alike: frozenset[str] = frozenset()

    @property
    def planned(self) -> PlannedStage:
        return self.decision.planned

    @property
    def ref(self) -> SnapshotRef | None:
        return self.refs[0] if self.refs else None

    @property
    def is_gone(self) -> bool:
        return not (self.refs or self.alike)

    @property
    def reproducible(self) -> bool:
        """Return whether training the stage reproduces a lost snapshot at this point; an end only if the stage's length hasn't changed."""
        planned = self.planned
        if planned.state is State.STALE or planned.again:
            return False
        resumed = planned.start if planned.state is State.RESUME and self.iter is None else None
        return resumed is None or length_before(resumed, planned.stage) is None

    def id(self, recorded: str, inventory: Inventory) -> str:
        """Return the id of the snapshot at this point; '' if unknown. If an unchanged stage lost it, assume that training reproduces the recorded
        id."""
        if recorded in self.alike:
            return recorded
        if self.ref is not None:
            return self.ref.id
        return recorded if self.reproducible and recorded not in inventory.ids else ""


class Decision(NamedTuple):
    """The decision about a stage. `source`: its start; `members`: the sources of its average. `usable`: the snapshots that count. `shown`:
    `planned` as the plan shows it, if --only or --until leave the stage out. `redo`: the stage is in --redo, or below such a stage.
    """

    source: Source | None
    members: tuple[Source, ...]
    usable: tuple[SnapshotRef, ...]
    planned: PlannedStage
    shown: PlannedStage
    redo: bool


def end_of(decision: Decision) -> Source:
    """Return the current end of a stage."""
    end = decision.planned.end
    return Source(decision, None, (end,) if end is not None else ())


def source_at(decision: Decision, iter: int | None, inventory: Inventory) -> Source:
    stage, source = decision.planned.stage, decision.source
    at = end_of(decision)
    if iter is not None:
        refs = (ref for ref in decision.usable if ref.iter == iter)
        at = Source(decision, iter, tuple(sorted(refs, key=lambda ref: ref.attempt)))
    if stage.solver.early_stop is not None:
        return at
    last = stage.solver.max_iter if iter is None else iter
    parents = {""} if source is None else {ref.id for ref in source.refs} | source.alike
    others = (ref for ref in inventory.of(stage.name) if ref.iter == last and ref.parent in parents)
    alike = (ref.id for ref in others if (changed := changed_fields(ref, stage)) and EMA.issuperset(changed))
    return at._replace(alike=frozenset(alike))


def best_of(decision: Decision) -> int | None:
    """Return the iteration of the best evaluation of a stage, its end if none was a number; None before it has ended."""
    end = decision.planned.end
    return None if end is None else end.best or end.iter


def start_of(decision: Decision, stage: Stage, inventory: Inventory) -> Source:
    """Return the start of a stage in its parent."""
    source = source_at(decision, stage.parent_iter, inventory)
    if stage.parent_at == recipe.EMA:
        return source._replace(alike=frozenset())  # it starts from that average
    if stage.parent_at == BEST and stage.parent_iter is None and source.reproducible:
        # The end is lost: then the same snapshot turns out the best again.
        return source._replace(alike=frozenset(ref.id for ref in decision.usable))
    return source


# -- differences between a snapshot and its stage's current definition


def counts(ref: SnapshotRef, stage: Stage, source: Source | None, inventory: Inventory) -> bool:
    """Return whether training the stage now would produce this snapshot."""
    changed = set(changed_fields(ref, stage))
    if source is None:
        came_from = ref.parent == ""
    elif source.refs or ref.parent in source.alike:
        came_from = ref.parent in source.alike or any(ref.parent == start.id for start in source.refs)
        changed.discard(FROM_ITER)  # the id decides: that iteration may have been the parent's end
    else:
        # The parent has lost that snapshot (damaged, or deleted). If unchanged, training reproduces the same bits; if it doesn't,
        # the next plan sees another id. A snapshot that still exists is not lost: it is the end of another stage, or of an
        # older definition of a parent that is being retrained.
        came_from = ref.parent != "" and ref.parent not in inventory.ids and source.reproducible
    return came_from and not changed and ref.iter <= stage.solver.max_iter


def usable_snapshots(
    stage: Stage, source: Source | None, inventory: Inventory, schedule: Schedule
) -> tuple[SnapshotRef, ...]:
    """Return the snapshots that count, except those that would silently retrain the stage's end: snapshots of a shorter version whose end no
    longer counts, and of an end from other images than now. A half-trained stage continues with the current images, which `run` reports
    as EQUIVALENT."""
    of_stage, last = inventory.of(stage.name), stage.solver.max_iter
    ended = (ref for ref in of_stage if goes_beyond(ref, stage) and changed_fields(ref, stage) == [MAX_ITER])
    over = {ref.identity.get(MAX_ITER) for ref in ended}
    refs = [r for r in of_stage if r.identity.get(MAX_ITER) not in over and counts(r, stage, source, inventory)]
    ends = [ref for ref in refs if ref.ends(last) or goes_beyond(ref, stage)]
    other = [ref for ref in refs if images_changed(ref, stage, schedule)]
    since = max(((ref.attempt, ref.serial) for ref in ends if ref in other), default=None)
    if since is None:
        return tuple(refs)
    return tuple(r for r in refs if r not in other and (r in ends or (r.attempt, r.serial) > since))


def images_changed(ref: SnapshotRef, stage: Stage, schedule: Schedule) -> tuple[Change, ...]:
    """Return the change of the images that a snapshot was trained on, if they certainly differ now."""
    old, new = ref.environment.get(TRAINING_SET, ""), schedule.sets.get(stage.data.train.path, "")
    if same_set(old, new) is not False:
        return ()
    return (Change(IMAGES, old, new, stage.written("data.train.images", "data.train.source")),)


def changed_fields(ref: SnapshotRef, stage: Stage) -> list[str]:
    """Return the fields of identity in which the stage differs from a snapshot. An upgrade makes nothing stale: a field
    that is newer than the snapshot had its default, and a field that no longer counts may have any value. Equivalent
    settings don't differ, nor do fields that the stage doesn't read: if it read one before, the field that decides this
    has changed."""
    files = FILES & stage.origins.keys()  # a missing file has no digest, but still counts
    if ref.identity == stage.identity and files <= ref.identity.keys():
        return []  # the usual case, which must be fast for hundreds of stages
    had, has = meant(ref.identity), meant(stage.identity)
    ignored = {f"solver.{field}" for field, _ in unread(stage)}

    def changed(field: str) -> bool:
        if field == FOLLOWED:  # a snapshot that records more is as good
            return field not in had
        if field == TESTED_LABELS and not (field in had and field in has):
            return False  # newer than the snapshot, or no longer counts: a stage whose evaluations begin to count differs in other fields
        if field in ignored or has.get(field) == ABSENT:  # a package that this machine lacks
            return False
        if default := omitted_default(field):
            return had.get(field, default) != has.get(field, default)
        if field == MAX_ITER and length_before(ref, stage) is not None and not what_differs(ref, stage):
            return False
        if field == AVERAGE_MEMBERS and (had.get(AVERAGE_OF) or "?") == has.get(AVERAGE_OF):
            return False  # the ids decide: a member may have been a stage's end
        if field in had:
            gone = field not in stage.identity and field in stage.origins
            return not gone and had[field] != has.get(field)
        origin = stage.origins.get(field)
        return (field in files) if field in FILES else origin is None or origin.layer != "default"

    return sorted(field for field in had.keys() | has.keys() | files if changed(field))


def length_before(ref: SnapshotRef, stage: Stage) -> int | None:
    """Return a snapshot's `max_iter` if the stage has another now."""
    text = ref.identity.get(MAX_ITER, "")
    is_number = text.isascii() and text.isdigit() and len(text) <= 18
    return int(text) if is_number and int(text) != stage.solver.max_iter else None


def goes_beyond(ref: SnapshotRef, stage: Stage) -> bool:
    """Return whether the snapshot was the final one of an earlier, shorter version of the stage."""
    return not ref.ended and ref.iter == length_before(ref, stage) and ref.iter < stage.solver.max_iter


def what_differs(ref: SnapshotRef, stage: Stage) -> str:
    """Return why training the stage now would not reproduce a snapshot of a shorter or longer version; '' if it would."""
    before, now = length_before(ref, stage), stage.solver.max_iter
    if before is None:
        return ""
    if before > now and (ref.iter >= now or ref.ended):
        # An end does more than an inner snapshot.
        return f"it was trained to iteration {ref.iter}, and would end at {now}"
    if difference := what_end_differs(stage.solver, before, at_end=goes_beyond(ref, stage)):
        return difference
    # Before the end, too: it may have gone back from the end.
    if stage.solver.on_nan is OnNan.ROLLBACK and ref.skipped:
        return f"`on_nan: ROLLBACK` has left out images, and leaves out others at the end, iteration {min(before, now)}"
    return ""


def what_end_differs(solver: Solver, before: int, at_end: bool = True) -> str:
    """Return `what_differs` for a stage that was trained to `before` and is otherwise unchanged. An evaluation for `early_stop` at that end
    happens when the stage continues."""
    if before != solver.max_iter and "max_iter" in policy_fields(solver.lr_policy):
        return f"lr_policy `{solver.lr_policy}` reads max_iter"
    if at_end and solver.sync is not None:
        return f"its replicas became one at its end, iteration {before}"
    return ""


# -- the reason in words if no snapshot counts


def why_stale(
    schedule: Schedule, stage: Stage, source: Source | None, inventory: Inventory
) -> tuple[str, tuple[Change, ...]]:
    """Return why a stage's snapshots don't count, in words, and the fields that differ."""
    newest = max(inventory.of(stage.name), key=lambda ref: (ref.attempt, ref.iter))
    changed = changed_fields(newest, stage)
    changes = tuple(
        change_of(field, newest, stage) for field in changed if field not in (FROM_ITER, TEACHER, AVERAGE_OF)
    )
    images = images_changed(newest, stage, schedule)
    if FOLLOWED in changed:
        keeps = f'`from: "{stage.name}@ITERATION"` keeps it'
        return f"it was trained before a stage started from its best evaluation ({keeps})", changes
    if changes:
        why = "its definition has changed since it was trained: it was edited, or `run` had a --set missing here"
        if changed == [MAX_ITER] and newest.iter < stage.solver.max_iter and (differs := what_differs(newest, stage)):
            why = f"its max_iter was changed, and it can't continue from its snapshots: {differs}"
        return why, changes + images
    if images:
        return "the training images have changed since it was trained", images
    if TEACHER in changed:
        teacher = stage.solver.teacher
        if stage.identity.get(TEACHER):
            return f"it was taught by another snapshot than the end of `{teacher}` now", ()
        return f"its teacher `{teacher}` is stale, longer now, or to be trained again", ()
    if AVERAGE_OF in changed:
        return _other_average(newest, stage), ()
    if source is None:
        return "it was trained from another stage, and now starts from the seed", ()
    return _other_start(newest, stage, source, inventory, FROM_ITER in changed)


def _other_start(
    ref: SnapshotRef, stage: Stage, source: Source, inventory: Inventory, moved: bool
) -> tuple[str, tuple[Change, ...]]:
    """Return `why_stale` for a changed start. `moved`: to another iteration of its parent."""
    parent, now = source.planned.stage, stage.starts_from
    started = next((other for other in inventory.snapshots if other.id == ref.parent), None)
    before = started.stage if started is not None else parent.name
    longer = started is not None and before == parent.name and goes_beyond(started, parent)
    if started is not None and longer and stage.parent_iter is None and not changed_fields(started, parent):
        keeps = f' (`from: "{parent.name}@{started.iter}"` keeps it)' if stage.average is None else ""
        goes = f"continues from iteration {started.iter} to {parent.solver.max_iter}"
        return f"it started from the end of `{parent.name}`, which {goes}{keeps}", ()
    if ref.parent == "":
        return f"it was trained from the seed, and now starts from `{now}`", ()
    if moved or before != parent.name:
        at = ref.identity.get(FROM_ITER)
        old = label(before, at if at in (BEST, None) else ref.whole(FROM_ITER, 0))
        change = (change_of(FROM_ITER, ref, stage),) if moved else ()
        return f"it was trained from `{old}`, and now starts from `{now}`", change
    if source.refs:
        return f"it was trained from another {'' if stage.parent_iter is not None else 'end of '}`{now}`", ()
    how = "stale" if source.planned.state is State.STALE else "to be trained again"
    return f"its parent `{parent.name}` is {how}", ()


def _other_average(ref: SnapshotRef, stage: Stage) -> str:
    if stage.average is not None and not stage.identity.get(AVERAGE_OF):
        return f"snapshots in the average `{stage.average}` are stale, longer now, or to be trained again"
    was = "trained from an average of other snapshots" if AVERAGE_OF in ref.identity else "not trained from an average"
    return f"it was {was}, and now starts from `{stage.starts_from or 'the seed'}`"


def change_of(field: str, ref: SnapshotRef, stage: Stage) -> Change:
    missing = {FROM_ITER: "(the end)", LAST_USED: "(1 stage before)"}.get(field) or omitted_default(field) or "(none)"
    old, new = ref.identity.get(field, missing), stage.identity.get(field, missing)
    name = "from" if field == FROM_ITER else field.removeprefix("solver.")
    return Change(name, old, new, stage.written(field))


# -- snapshots by identity, not by name
#
# A snapshot's identity excludes the stage's name. So a snapshot under a name that the schedule lacks belongs to the first stage, in running
# order, that would produce it: the stage was renamed, or its block has one more entry in `from`.


def claim_strangers(stage: Stage, source: Source | None, inventory: Inventory, strangers: Collection[str]) -> Inventory:
    """Return the inventory with each snapshot of `strangers`, names that no stage has, under `stage` if it counts for the stage. If its start is
    gone, nothing proves that it came from this parent. One end is enough, first under the stage's name: so two stages that were trained
    alike each get their snapshots."""
    if not strangers or (source is not None and not source.refs):
        return inventory
    length, claimed = stage.solver.max_iter, dict[str, str]()
    ended = any(ref.ends(length) for ref in inventory.of(stage.name) if counts(ref, stage, source, inventory))
    for name in strangers:
        fitting = [ref for ref in inventory.of(name) if counts(ref, stage, source, inventory)]
        ends = any(ref.ends(length) for ref in fitting)
        if not (ends and ended):
            claimed |= {ref.name: stage.name for ref in fitting}
            ended = ended or ends
    return under(inventory, claimed)


def under(inventory: Inventory, names: Mapping[str, str]) -> Inventory:
    """Return the inventory with snapshots under other stages; `names`: the stage's name by the snapshot's."""
    if not names:
        return inventory

    def renamed(ref: SnapshotRef) -> SnapshotRef:
        name = names.get(ref.name, ref.stage)
        return ref if name == ref.stage else replace(ref, stage=name, trained_as=ref.trained_as or ref.stage)

    return replace(inventory, snapshots=tuple(map(renamed, inventory.snapshots)))


def names_of(inventory: Inventory) -> dict[str, str]:
    """Return the names with which `under` makes this inventory from the one on disk."""
    return {ref.name: ref.stage for ref in inventory.snapshots if ref.trained_as}


def lineage(plan: Plan, planned: PlannedStage) -> list[SnapshotRef]:
    """Return the snapshots of other stages that a folder needs to train a stage: of its ancestors, its teacher and its average."""
    stages = {other.name: other for other in plan.stages}
    needed = [planned.start] if planned.state is State.FRESH else []
    stage = planned.stage
    while stage.parent is not None:
        parent, at = stages[stage.parent], plan.schedule.start_iter(stage)
        needed += [*(ref for ref in plan.inventory.of(stage.parent) if ref.iter == at), parent.end]
        stage = parent.stage
    return [ref for ref in (*needed, planned.teacher, *planned.averaged) if ref is not None]


# -- the target of `on_nan: ROLLBACK`


def rollback_iter(iter: int, every: int, branches: Collection[int]) -> int:
    """Return the iteration that a run which fails after `iter` updates goes back to if no snapshot is lost; 0: the stage's start. After an
    earlier rollback it is the same: that rollback went to such an iteration, and no later one is in between."""
    return max([iter - iter % every if every else 0, *(branch for branch in branches if branch <= iter)])


def targets(
    inventory: Inventory, stage: Stage, branches: Collection[int], parent: str, skipped: int, iter: int
) -> tuple[SnapshotRef, ...]:
    """Return the snapshots that a stage at `iter`, with `skipped` images left out so far, may go back to, the best first; (): back to its start,
    the snapshot with the id `parent`. Snapshots that only a stop wrote don't count: the bits must not depend on them."""

    def fits(ref: SnapshotRef) -> bool:
        is_due = ref.iter > 0 and rollback_iter(ref.iter, stage.solver.snapshot, branches) == ref.iter
        return is_due and ref.parent == parent and (ref.skipped, ref.iter) <= (skipped, iter)

    fitting = [ref for ref in inventory.of(stage.name) if fits(ref) and not changed_fields(ref, stage)]
    return tuple(sorted(fitting, key=how_far, reverse=True))
