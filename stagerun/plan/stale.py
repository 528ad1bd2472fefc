"""Why the snapshots of a stage don't count, in words. Pure."""

from stagerun.base.recipe import AVERAGE_OF, FROM_ITER, LAST_USED, TEACHER, Schedule, Stage
from stagerun.base.snapshots import TRAINING_SET, Inventory, SnapshotRef, same_set
from stagerun.language.values import unsaid
from stagerun.plan.counting import Source, changed_fields
from stagerun.plan.planned import Change, State, label
from stagerun.plan.raised import MAX_ITER, goes_beyond, length_before, what_differs

IMAGES = "data.train.source"  # in a Change: no field of identity, but what lies there


def why_stale(
    schedule: Schedule, stage: Stage, source: Source | None, own: tuple[SnapshotRef, ...], inventory: Inventory
) -> tuple[str, tuple[Change, ...]]:
    """The reason in words, and the fields that differ. `own` are the stage's snapshots, none of which counts."""
    newest = max(own, key=lambda ref: (ref.attempt, ref.iter))
    changed = changed_fields(newest, stage)
    changes = tuple(_change(field, newest, stage) for field in changed if field not in (FROM_ITER, TEACHER, AVERAGE_OF))
    images = _other_images(newest, stage, schedule)
    if changed == [MAX_ITER] and newest.iter < stage.solver.max_iter and (differs := what_differs(newest, stage)):
        return f"its max_iter was changed, and it can't go on from what was trained: {differs}", changes + images
    if changes:
        return (
            "its definition has changed since it was trained: it was edited, or `run` had a --set that isn't given here",
            changes + images,
        )
    if images:
        return "the training images have changed since it was trained", images
    if TEACHER in changed:
        return _other_teacher(newest, stage, inventory), ()
    if AVERAGE_OF in changed:
        return _other_average(newest, stage), ()
    if source is None:
        return "it was trained from another stage, and now starts from the seed", ()
    now = stage.starts_from
    if text := _from_old_end(newest, stage, source, inventory):
        return text, ()
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


def _from_old_end(ref: SnapshotRef, stage: Stage, source: Source, inventory: Inventory) -> str:
    """What is said of a stage that started where its parent, which is longer now, ended; '' of another."""
    parent = source.parent.stage
    start = next((other for other in inventory.of(parent.name) if other.id == ref.parent), None)
    if (
        stage.parent_iter is not None
        or start is None
        or not goes_beyond(start, parent)
        or changed_fields(start, parent)
    ):
        return ""
    keeps = f' (`from: "{parent.name}@{start.iter}"` keeps it)' if stage.average is None else ""
    goes = f"goes on from iteration {start.iter} to {parent.solver.max_iter}"
    return f"it started from the end of `{parent.name}`, which {goes}{keeps}"


def raised(ref: SnapshotRef, stage: Stage) -> tuple[Change, ...]:
    """The change of `max_iter` since a snapshot that counts, if there was one."""
    return (_change(MAX_ITER, ref, stage),) * (length_before(ref, stage) is not None)


def _other_teacher(ref: SnapshotRef, stage: Stage, inventory: Inventory) -> str:
    teacher, now, before = stage.solver.teacher, stage.identity.get(TEACHER, ""), ref.identity.get(TEACHER, "")
    old = next((other.stage for other in inventory.snapshots if other.id == before), teacher)
    if old != teacher:
        return f"it was taught by `{old}`, and now is by `{teacher}`"
    return (
        f"it was taught by another end of `{teacher}`"
        if now
        else f"its teacher `{teacher}` is stale, longer now, or to be trained again"
    )


def _other_average(ref: SnapshotRef, stage: Stage) -> str:
    if stage.average is None:
        return f"it was trained from an average of snapshots, and now starts from `{stage.starts_from or 'the seed'}`"
    if AVERAGE_OF not in ref.identity:
        return f"it was not trained from an average, and now starts from `{stage.average}`"
    if stage.identity.get(AVERAGE_OF):
        return f"it was trained from an average `{stage.average}` of other snapshots"
    return f"snapshots that `{stage.average}` is averaged from are stale, longer now, or to be trained again"


def _other_images(ref: SnapshotRef, stage: Stage, schedule: Schedule) -> tuple[Change, ...]:
    old, new = ref.environment.get(TRAINING_SET, ""), schedule.sets.get(stage.data.train.path, "")
    place = stage.written("data.train.images", "data.train.source")
    return (Change(IMAGES, old, new, place),) * (same_set(old, new) is False)


def _change(field: str, ref: SnapshotRef, stage: Stage) -> Change:
    missing = {FROM_ITER: "(the end)", LAST_USED: "(1 stage before)"}.get(field) or unsaid(field) or "(none)"
    old, new = ref.identity.get(field, missing), stage.identity.get(field, missing)
    name = field.removeprefix("solver.")
    return Change("from" if field == FROM_ITER else name, old, new, stage.written(field))
