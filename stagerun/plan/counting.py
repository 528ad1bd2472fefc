"""Which snapshots of a stage count for what it is now, and why others don't; rollbacks. Pure."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from stagerun.base.recipe import (
    ABSENT,
    AVERAGE_MEMBERS,
    AVERAGE_OF,
    FILES,
    FROM_ITER,
    LAST_USED,
    TEACHER,
    TESTED_LABELS,
    Schedule,
    Stage,
)
from stagerun.base.snapshots import TRAINING_SET, Inventory, SnapshotRef, how_far, same_set
from stagerun.language.build import meant
from stagerun.language.values import unsaid
from stagerun.plan.described import unread
from stagerun.plan.planned import Change, Plan, PlannedStage, State, label
from stagerun.plan.raised import MAX_ITER, goes_beyond, length_before, on_the_way, what_differs

IMAGES = "data.train.source"  # in a Change: no field of identity, but what lies there


@dataclass(frozen=True, slots=True)
class Source:
    """What a stage with a parent starts from: `at` are the snapshots of the parent there that count, the one to take first;
    `alike` are the ids of `same_weights`."""

    parent: PlannedStage
    at: tuple[SnapshotRef, ...]
    alike: frozenset[str] = frozenset()

    @property
    def start(self) -> SnapshotRef | None:
        return self.at[0] if self.at else None


EMA = {"solver.ema_decay", "solver.ema_interval"}


def same_weights(stage: Stage, iter: int | None, source: Source | None, inventory: Inventory) -> frozenset[str]:
    """The ids of snapshots of a stage, at an iteration, None for its end, that lack nothing but the average that it keeps of its weights, or
    have one that it doesn't keep. What starts there starts from the same trained weights."""
    parents = {""} if source is None else {ref.id for ref in source.at} | source.alike
    return frozenset(
        ref.id
        for ref in inventory.of(stage.name)
        if ref.iter == (stage.solver.max_iter if iter is None else iter) and ref.parent in parents
        if stage.solver.early_stop is None and (changed := changed_fields(ref, stage)) and EMA.issuperset(changed)
    )


def source_of(stage: Stage, parent: PlannedStage, usable: tuple[SnapshotRef, ...], alike: frozenset[str]) -> Source:
    """`usable` are the parent's snapshots that count.

    If there are several at one iteration (one was trained again elsewhere), the oldest is taken, so that all that start there start
    from the same bits.
    """
    if stage.parent_iter is None:
        return Source(parent, (parent.end,) if parent.end is not None else (), alike)
    at = [ref for ref in usable if ref.iter == stage.parent_iter]
    return Source(parent, tuple(sorted(at, key=lambda ref: ref.attempt)), alike)


def points_of(schedule: Schedule, usable: Mapping[str, tuple[SnapshotRef, ...]]) -> dict[tuple[str, int], SnapshotRef]:
    """The snapshots before a stage's end that ensembles are made from, the oldest as in `source_of`. `usable`: by stage, what counts."""
    wanted = {point for ensemble in schedule.ensembles for point in ensemble.points}
    found = {(stage, iter): oldest_at(iter, usable[stage]) for stage, iter in wanted if iter is not None}
    return {point: ref for point, ref in found.items() if ref is not None}


def oldest_at(iter: int, usable: tuple[SnapshotRef, ...]) -> SnapshotRef | None:
    """The one to take at an iteration of the snapshots of a stage that count."""
    return min((ref for ref in usable if ref.iter == iter), key=lambda ref: ref.attempt, default=None)


def points_averaged(schedule: Schedule, stage: Stage) -> tuple[tuple[str, int | None], ...]:
    """The stages and iterations of them that the stage's start is averaged from; () for another stage."""
    return schedule.ensemble(stage.average).points if stage.average is not None else ()


def at(iter: int | None, planned: PlannedStage, usable: tuple[SnapshotRef, ...]) -> SnapshotRef | None:
    """The snapshot of a stage at an iteration, None for its end, as far as it is there."""
    return planned.end if iter is None else oldest_at(iter, usable)


def left_off(stage: Stage, sources: Mapping[str, Source | None]) -> tuple[int, int, bool]:
    """Where the stage goes on in its training set: the images of it that the last stage with that set consumed up to where the path
    leaves it, and those that rollbacks have left out there; and whether that is the most it can be, because `early_stop` may yet end a
    stage before. `sources` are those of the stage and all above it.

    Where a stage is not there yet, or has lost that place, it has left out as many as so far.
    """
    source = sources[stage.name] if stage.solver.carry_data else None
    below = stage
    while source is not None and not source.parent.stage.data.train.same(stage.data.train):
        below = source.parent.stage
        source = sources[below.name]
    if source is None:
        return 0, 0, False
    parent = source.parent
    iterations, batch_size = parent.stage.solver.max_iter, parent.stage.solver.batch_size
    if parent.end is not None:
        iterations = parent.end.iter  # `early_stop` may have ended it
    consumed = parent.position + (iterations if below.parent_iter is None else below.parent_iter) * batch_size
    open_end = below.parent_iter is None and parent.end is None and parent.stage.solver.earliest_end < iterations
    skipped = source.start.skipped if source.start is not None else parent.skipped
    return consumed, skipped, parent.at_most or open_end


def taught_by(stage: Stage, teacher: PlannedStage, inventory: Inventory) -> Stage:
    """The stage with the id of its teacher's end in its identity; '' where no one knows what that will be. An end that is gone, of a
    teacher that is as it was, will be what it was: that of the stage's newest snapshot."""
    found = teacher.end.id if teacher.end is not None else ""
    own = inventory.of(stage.name)
    if not found and own and teacher.comes_to_the_same_end:
        before = own[-1].identity.get(TEACHER, "")
        found = before if all(ref.id != before for ref in inventory.snapshots) else ""
    return replace(stage, identity={**stage.identity, TEACHER: found})


def averaged_from(
    stage: Stage,
    members: Sequence[tuple[PlannedStage, int | None, SnapshotRef | None]],
    alike: Mapping[tuple[str, int | None], frozenset[str]],
    inventory: Inventory,
) -> Stage:
    """The stage with the ids of the snapshots that it is averaged from in its identity, as `taught_by`; '' where one is not known. `alike`:
    `same_weights` of each stage and iteration."""
    own = inventory.of(stage.name)
    before = own[-1].identity.get(AVERAGE_OF, "").split() if own else []
    before = before if len(before) == len(members) else [""] * len(members)
    there = {ref.id for ref in inventory.snapshots}
    ids = []
    for (planned, iter, ref), id in zip(members, before, strict=True):
        same = planned.comes_to_the_same_end if iter is None else planned.comes_by_the_same
        comes_again = same and id not in there
        if id in alike[planned.stage.name, iter]:
            ids.append(id)
        else:
            ids.append(ref.id if ref is not None else id if comes_again else "")
    return replace(stage, identity={**stage.identity, AVERAGE_OF: " ".join(ids) if all(ids) else ""})


def counts(ref: SnapshotRef, stage: Stage, source: Source | None, inventory: Inventory) -> bool:
    """Whether the stage, trained now, would come by this snapshot."""
    changed = set(changed_fields(ref, stage))
    if source is None:
        came_from = ref.parent == ""
    elif source.at or ref.parent in source.alike:
        came_from = ref.parent in source.alike or any(ref.parent == start.id for start in source.at)
        changed.discard(FROM_ITER)  # the id says it: that place may have been the parent's end
    else:
        # The parent has lost that snapshot (damaged, or deleted). Unchanged, it will come to the same bits, and if not,
        # the next plan sees another id. What is still there did not get lost: the end of another stage, or that of an
        # older definition of a parent that is half trained again.
        lost = ref.parent != "" and all(ref.parent != other.id for other in inventory.snapshots)
        parent = source.parent
        came_from = lost and (parent.comes_to_the_same_end if stage.parent_iter is None else parent.comes_by_the_same)
    return came_from and not changed and ref.iter <= stage.solver.max_iter


def unless_over(refs: tuple[SnapshotRef, ...], own: tuple[SnapshotRef, ...], stage: Stage) -> tuple[SnapshotRef, ...]:
    """The snapshots that count for the stage, without those of a shorter one whose end is among its `own` and doesn't: from before it
    that would be trained again, unasked."""
    over = {
        ref.identity.get(MAX_ITER)
        for ref in own
        if goes_beyond(ref, stage) and changed_fields(ref, stage) == [MAX_ITER]
    }
    return tuple(ref for ref in refs if ref.identity.get(MAX_ITER) not in over)


def of_these_images(refs: tuple[SnapshotRef, ...], stage: Stage, schedule: Schedule) -> tuple[SnapshotRef, ...]:
    """The snapshots that count for the stage, without those trained on other images than are there now, where one of them is its end.
    A stage that is half trained continues with what is there, and `run` says that it is EQUIVALENT."""
    now, last = schedule.sets.get(stage.data.train.path, ""), stage.solver.max_iter

    def other(ref: SnapshotRef) -> bool:
        return same_set(ref.environment.get(TRAINING_SET, ""), now) is False

    # What led to such an end is not a place to go on from: the stage would be trained again, unasked.
    def ends(ref: SnapshotRef) -> bool:
        return ref.ends(last) or goes_beyond(ref, stage)

    since = max(((ref.attempt, ref.serial) for ref in refs if ends(ref) and other(ref)), default=None)
    if since is None:
        return refs
    return tuple(ref for ref in refs if not other(ref) and (ends(ref) or (ref.attempt, ref.serial) > since))


def changed_fields(ref: SnapshotRef, stage: Stage) -> list[str]:
    """The fields of identity in which a snapshot was made from something else than the stage is now.

    A field that the snapshot's version of stagerun did not know had its default then, and one that counted there and does not any
    more is as good with any value: an upgrade makes nothing stale. Nor does what is written in another way and means the same, or
    what the stage doesn't read: where it did, before, the field that says so has changed.
    """
    given = FILES & stage.origins.keys()  # a file that is not there has no digest, and is weights nevertheless
    if ref.identity == stage.identity and given <= ref.identity.keys():
        return []  # as a plan of hundreds of stages finds most of the time
    had, has = meant(ref.identity), meant(stage.identity)
    anything_goes = {f"solver.{field}" for field, _ in unread(stage)}

    def changed(field: str) -> bool:
        if field in anything_goes:
            return False
        if has.get(field) == ABSENT:  # a package that `run` has, and this machine hasn't
            return False
        if default := unsaid(field):
            return had.get(field, default) != has.get(field, default)
        if field == TESTED_LABELS and field not in had:
            return False  # not known then; a stage that had neither labels nor `early_stop` differs in these
        if field == MAX_ITER and on_the_way(ref, stage):
            return False
        if field == AVERAGE_MEMBERS and (had.get(AVERAGE_OF) or "?") == has.get(AVERAGE_OF):
            return False  # the ids say it: one of them may have been a stage's end
        if field in FILES and field not in had:
            return field in stage.origins
        if field not in stage.identity and field in stage.origins:
            return False
        if field in had:
            return had[field] != has.get(field)
        origin = stage.origins.get(field)
        return origin is None or origin.layer != "default"

    return sorted(field for field in had.keys() | has.keys() | given if changed(field))


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


# -- snapshots by what they are, not by what they are called
#
# What a snapshot depends on does not include the stage's name. So a snapshot under a name that the schedule doesn't have belongs to
# the first stage, in running order, that would come by it: the stage was renamed, or its block has one more entry in `from`.


def found_for(stage: Stage, source: Source | None, inventory: Inventory, known: Collection[str]) -> Inventory:
    """Return the inventory with each snapshot that counts for `stage`, under a name that is not `known`, as one of the stage's.

    Where the snapshot that it came from is gone, nothing shows that it came from this parent, and it stays what it was. One end is
    enough, the stage's own first: so two stages that were trained alike each find their own.
    """
    if source is not None and not source.at:
        return inventory
    length, found = stage.solver.max_iter, dict[str, str]()
    ended = any(ref.ends(length) for ref in inventory.of(stage.name) if counts(ref, stage, source, inventory))
    for name in dict.fromkeys(ref.stage for ref in inventory.snapshots if ref.stage not in known):
        fitting = [ref for ref in inventory.of(name) if counts(ref, stage, source, inventory)]
        ends = any(ref.ends(length) for ref in fitting)
        if not (ends and ended):
            found |= {ref.name: stage.name for ref in fitting}
            ended = ended or ends
    return under(inventory, found)


def under(inventory: Inventory, names: Mapping[str, str]) -> Inventory:
    """The inventory with snapshots under other stages: by the snapshot's name the stage's."""
    if not names:
        return inventory

    def renamed(ref: SnapshotRef) -> SnapshotRef:
        if ref.name not in names or names[ref.name] == ref.stage:
            return ref
        return replace(ref, stage=names[ref.name], trained_as=ref.trained_as or ref.stage)

    return replace(inventory, snapshots=tuple(renamed(ref) for ref in inventory.snapshots))


def names_of(inventory: Inventory) -> dict[str, str]:
    """The names that `under` needs to make this inventory from the one on disk."""
    return {ref.name: ref.stage for ref in inventory.snapshots if ref.trained_as}


def lineage(schedule: Schedule, plan: Plan, planned: PlannedStage) -> list[SnapshotRef]:
    """The snapshots of others that a folder must have for a stage to be trained there: those that it and its ancestors start from, the ends of
    these, its teacher's, and those that it is averaged from."""
    stages = {other.stage.name: other for other in plan.stages}
    found = [planned.start] if planned.state is State.FRESH and planned.start is not None else []
    stage = planned.stage
    while stage.parent is not None:
        parent, at = stages[stage.parent], schedule.start_iter(stage)
        found += [ref for ref in plan.inventory.of(stage.parent) if ref.iter == at]
        found += [parent.end] if parent.end is not None else []
        stage = parent.stage
    return [*found, *([planned.teacher] if planned.teacher is not None else []), *planned.averaged]


# -- where `on_nan: ROLLBACK` goes back to


def scheduled(iter: int, every: int, branches: Collection[int]) -> bool:
    """Whether a run that nothing interrupts has a snapshot of the stage there. One that a stop made at such a place is as good."""
    return iter in branches or (every > 0 and iter > 0 and iter % every == 0)


def place(iter: int, every: int, branches: Collection[int]) -> int:
    """The iteration that a run which fails after `iter` updates goes back to, if nothing is lost; 0: the stage's start.

    Also where it has gone back before: the way that it is on began at such a place, at or before `iter`, and no later one lies
    between them.
    """
    return max([iter - iter % every if every else 0, *(branch for branch in branches if branch <= iter)])


def targets(
    inventory: Inventory,
    stage: Stage,
    branches: Collection[int],
    parent: str,
    skipped: int,
    iter: int,
) -> tuple[SnapshotRef, ...]:
    """The snapshots that a stage in training at `iter`, with `skipped` images left out so far, may go back to: the first is the one
    to take, the others stand in for it. None: back to the stage's start.

    Snapshots at other places than scheduled ones are passed over: they are there only where someone stopped the run, and the
    bits must not depend on that. `parent` is the id of what the stage started from.
    """

    def its_own(ref: SnapshotRef) -> bool:
        return ref.parent == parent and not changed_fields(ref, stage) and (ref.skipped, ref.iter) <= (skipped, iter)

    every = stage.solver.snapshot
    own = [ref for ref in inventory.of(stage.name) if scheduled(ref.iter, every, branches) and its_own(ref)]
    return tuple(sorted(own, key=how_far, reverse=True))


# -- what an evaluation depends on besides weights


BESIDE = " + "  # between texts of several validation sets


def tested_set(schedule: Schedule, stage: Stage) -> str:
    """Which validation images the stage has, as far as someone has looked: texts of `lmdb_file.set_of`."""
    return BESIDE.join(schedule.sets.get(val.path, "") for val in stage.data.val)


def other_set(schedule: Schedule, stage: Stage, tested: str) -> bool:
    """Whether the stage's validation images are known to be others than those that `tested` (`tested_set` of a result) is of."""
    before, now = tested.split(BESIDE), tested_set(schedule, stage).split(BESIDE)
    return any(same_set(*pair) is False for pair in zip(before, now, strict=False))


def tested_on(stage: Stage, places: bool = False) -> str:
    """Images and transform of a stage's evaluation, as text; '' without validation images. `places`: with where they are on this machine in
    place of what is written, as results of older versions have it."""
    images = [f"{val.path if places else val.source} {val.images}" for val in stage.data.val]
    return f"{BESIDE.join(images)} {_seen_as(stage, places)}" if images else ""


def _seen_as(stage: Stage, places: bool = False) -> str:
    transform = stage.solver.test_transform
    text = str(transform if places else replace(transform, mean_path=""))
    for unset in (", crop_size_ramp=None", ", python=None", ", mean_file=None, mean_path=''"):
        text = text.replace(unset, "")  # so that the results of a version that did not know the field still count
    return text + "".join(f" {val.labels_digest}" for val in stage.data.val if val.labels_digest)


def tested_alike(schedule: Schedule, stage: Stage, tested: str, images: str) -> bool:
    """Whether a result (its `tested_on` and `tested_set`) is of the images and the transform that the stage has now. Images that are known
    to be the same may have moved."""
    if tested in (tested_on(stage), tested_on(stage, places=True)):
        return not other_set(schedule, stage, images)
    pairs = zip(images.split(BESIDE), tested_set(schedule, stage).split(BESIDE), strict=False)
    same = all(same_set(*pair) for pair in pairs) and images.count(BESIDE) == len(stage.data.val) - 1
    return same and tested.endswith(f" {stage.data.val[-1].images} {_seen_as(stage)}")
