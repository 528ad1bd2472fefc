"""Which snapshots of a stage count for what it is now, and why others don't. Pure."""

from dataclasses import dataclass

from stagerun.plan.planned import Change, PlannedStage, State, label
from stagerun.recipe import FROM_ITER, Schedule, Stage
from stagerun.snapshots import TRAINING_SET, Inventory, SnapshotRef, same_set

IMAGES = "data.train.source"  # in a Change: no field of identity, but what lies there


@dataclass(frozen=True, slots=True)
class Source:
    """What a stage with a parent starts from: `at` are the snapshots of the parent there that count, the one to take first;
    `since` is the attempt of the oldest of the parent's that count, anywhere in it."""

    parent: PlannedStage
    at: tuple[SnapshotRef, ...]
    since: int = 0

    @property
    def start(self) -> SnapshotRef | None:
        return self.at[0] if self.at else None


def source_of(stage: Stage, parent: PlannedStage, usable: tuple[SnapshotRef, ...]) -> Source:
    """`usable` are the parent's snapshots that count.

    Of several at one iteration (one was trained once more, elsewhere) the oldest is taken, so that all that start there start
    from the same bits.
    """
    since = min((ref.attempt for ref in usable), default=0)
    if stage.parent_iter is None:
        return Source(parent, (parent.end,) if parent.end is not None else (), since)
    at = [ref for ref in usable if ref.iter == stage.parent_iter]
    return Source(parent, tuple(sorted(at, key=lambda ref: ref.attempt)), since)


def skipped_before(stage: Stage, source: Source | None) -> int:
    """Images that rollbacks have left out along the path up to where the stage starts. Where its parent is not there yet, or has lost
    that place, as many as it has left out so far."""
    if source is None or not stage.solver.carry_data:
        return 0
    return source.start.skipped if source.start is not None else source.parent.skipped


def counts(ref: SnapshotRef, stage: Stage, source: Source | None, inventory: Inventory) -> bool:
    """Whether the stage, trained now, would come by this snapshot."""
    if source is None:
        came_from = ref.parent == ""
    elif source.at:
        came_from = any(ref.parent == start.id for start in source.at)
    else:
        # The parent has lost that snapshot (damaged, or deleted). Unchanged, it will come to the same bits, and if not,
        # the next plan sees another id. What is still there did not get lost: the end of another stage, or that of an
        # older definition of a parent that is half trained again.
        lost = ref.parent != "" and all(ref.parent != other.id for other in inventory.snapshots)
        came_from = lost and source.parent.state is not State.STALE and not source.parent.again
    return came_from and not changed_fields(ref, stage) and ref.iter <= stage.solver.max_iter


def of_these_images(refs: tuple[SnapshotRef, ...], stage: Stage, schedule: Schedule) -> tuple[SnapshotRef, ...]:
    """The snapshots that count for the stage, without those trained on other images than are there now, where one of them is its end.
    A stage in its midst goes on with what is there, and `run` says that it is EQUIVALENT."""
    now, last = schedule.sets.get("train", ""), stage.solver.max_iter

    def other(ref: SnapshotRef) -> bool:
        return same_set(ref.environment.get(TRAINING_SET, ""), now) is False

    # What led to such an end is not a place to go on from: the stage would be trained again, unasked.
    since = max(((ref.attempt, ref.serial) for ref in refs if ref.iter == last and other(ref)), default=None)
    if since is None:
        return refs
    return tuple(ref for ref in refs if not other(ref) and (ref.iter == last or (ref.attempt, ref.serial) > since))


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


def why_stale(
    schedule: Schedule, stage: Stage, source: Source | None, own: tuple[SnapshotRef, ...], inventory: Inventory
) -> tuple[str, tuple[Change, ...]]:
    """In words, and the fields that differ. `own` are the stage's snapshots, none of which counts."""
    newest = max(own, key=lambda ref: (ref.attempt, ref.iter))
    changed = changed_fields(newest, stage)
    changes = tuple(_change(field, newest, stage) for field in changed if field != FROM_ITER)
    images = _other_images(newest, stage, schedule)
    if changes:
        return "its definition has changed since it was trained", changes + images
    if images:
        return "the training images have changed since it was trained", images
    if source is None:
        return "it was trained from another stage, and now starts from the seed", ()
    now = label(source.parent.stage.name, stage.parent_iter)
    if newest.parent == "":
        return f"it was trained from the seed, and now starts from `{now}`", ()
    before = next((ref.stage for ref in inventory.snapshots if ref.id == newest.parent), source.parent.stage.name)
    if before != source.parent.stage.name or FROM_ITER in changed:
        iter = newest.whole(FROM_ITER, 0) if FROM_ITER in newest.identity else None
        old = label(before, iter)
        change = (_change(FROM_ITER, newest, stage),) if FROM_ITER in changed else ()
        return f"it was trained from `{old}`, and now starts from `{now}`", change
    if source.at:
        what = "" if stage.parent_iter is not None else "end of "
        return f"it was trained from another {what}`{now}`", ()
    if source.parent.state is State.STALE:
        return f"its parent `{source.parent.stage.name}` is stale", ()
    return f"its parent `{source.parent.stage.name}` is to be trained again", ()


def _other_images(ref: SnapshotRef, stage: Stage, schedule: Schedule) -> tuple[Change, ...]:
    old, new = ref.environment.get(TRAINING_SET, ""), schedule.sets.get("train", "")
    origin = stage.origins.get("data.train.images")  # the line beside it
    return (Change(IMAGES, old, new, origin.span if origin else None),) * (same_set(old, new) is False)


def _change(field: str, ref: SnapshotRef, stage: Stage) -> Change:
    missing = "(the end)" if field == FROM_ITER else "(none)"
    old, new = ref.identity.get(field, missing), stage.identity.get(field, missing)
    origin = stage.origins.get(field)
    name = field.removeprefix("solver.")
    return Change("from" if field == FROM_ITER else name, old, new, origin.span if origin else None)
