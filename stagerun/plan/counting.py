"""Which snapshots of a stage count for what it is now; where a rollback goes; what an evaluation depends on. Pure."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from stagerun.base.recipe import (
    ABSENT,
    AVERAGE_MEMBERS,
    AVERAGE_OF,
    FILES,
    FROM_ITER,
    TEACHER,
    TESTED_LABELS,
    Schedule,
    Stage,
)
from stagerun.base.snapshots import TRAINING_SET, Inventory, SnapshotRef, how_far, same_set
from stagerun.language.build import meant
from stagerun.language.values import unsaid
from stagerun.plan.described import unread
from stagerun.plan.planned import Plan, PlannedStage, State
from stagerun.plan.raised import MAX_ITER, goes_beyond, on_the_way


@dataclass(frozen=True, slots=True)
class Source:
    """What a stage with a parent starts from: `at` are the snapshots of the parent there that count, the one to take first;
    `alike` are the ids of `same_weights`; `above` is the parent's own source."""

    parent: PlannedStage
    at: tuple[SnapshotRef, ...]
    alike: frozenset[str]
    above: "Source | None"

    @property
    def start(self) -> SnapshotRef | None:
        return self.at[0] if self.at else None


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """What a plan has decided about a stage, from its `own` snapshots and the decisions about the stages that it `needs`.

    `usable`: the snapshots that count. `shown`: `planned` as the plan shows it, where --only and --until may leave the stage out. `lacking`:
    the places of the snapshots that it is averaged from and that are gone. `redo`: it is named by --redo, or follows from such a stage.
    """

    own: tuple[SnapshotRef, ...]
    needs: tuple["Decision", ...]
    planned: PlannedStage
    shown: PlannedStage
    source: Source | None
    usable: tuple[SnapshotRef, ...]
    lacking: tuple[tuple[str, int | None], ...]
    redo: bool

    @property
    def lasts(self) -> bool:
        """Whether the decision holds as long as `own` and `needs` do: it hung on no other snapshot, as it does where one is gone."""
        if not self.own:
            return True
        started = self.source is None or bool(self.source.at)
        taught = self.planned.stage.solver.teacher is None or self.planned.teacher is not None
        explained = self.planned.state is State.STALE or self.planned.again  # by other snapshots
        return started and taught and not self.lacking and not explained


EMA = {"solver.ema_decay", "solver.ema_interval"}


def same_weights(decided: Decision, iter: int | None, inventory: Inventory) -> frozenset[str]:
    """The ids of snapshots of a stage, at an iteration, None for its end, that lack nothing but the average that it keeps of its weights, or
    have one that it doesn't keep. What starts there starts from the same trained weights."""
    stage, source = decided.planned.stage, decided.source
    parents = {""} if source is None else {ref.id for ref in source.at} | source.alike
    return frozenset(
        ref.id
        for ref in inventory.of(stage.name)
        if ref.iter == (stage.solver.max_iter if iter is None else iter) and ref.parent in parents
        if stage.solver.early_stop is None and (changed := changed_fields(ref, stage)) and EMA.issuperset(changed)
    )


def source_of(stage: Stage, above: Decision, alike: frozenset[str]) -> Source:
    """`above`: the decision about the parent.

    If there are several snapshots at one iteration (one was trained again elsewhere), the oldest is taken, so that all that start there
    start from the same bits.
    """
    parent = above.planned
    if stage.parent_iter is None:
        return Source(parent, (parent.end,) if parent.end is not None else (), alike, above.source)
    at = [ref for ref in above.usable if ref.iter == stage.parent_iter]
    return Source(parent, tuple(sorted(at, key=lambda ref: ref.attempt)), alike, above.source)


def points_of(schedule: Schedule, decided: Mapping[str, Decision]) -> dict[tuple[str, int], SnapshotRef]:
    """The snapshots before a stage's end that ensembles are made from, the oldest as in `source_of`."""
    wanted = {point for ensemble in schedule.ensembles for point in ensemble.points}
    found = {(stage, iter): oldest_at(iter, decided[stage].usable) for stage, iter in wanted if iter is not None}
    return {point: ref for point, ref in found.items() if ref is not None}


def oldest_at(iter: int, usable: tuple[SnapshotRef, ...]) -> SnapshotRef | None:
    """The one to take at an iteration of the snapshots of a stage that count."""
    return min((ref for ref in usable if ref.iter == iter), key=lambda ref: ref.attempt, default=None)


def points_averaged(schedule: Schedule, stage: Stage) -> tuple[tuple[str, int | None], ...]:
    """The stages and iterations of them that the stage's start is averaged from; () for another stage."""
    return schedule.ensemble(stage.average).points if stage.average is not None else ()


def left_off(stage: Stage, source: Source | None) -> tuple[int, int, bool]:
    """Where the stage goes on in its training set: the images of it that the last stage with that set consumed up to where the path
    leaves it, and those that rollbacks have left out there; and whether that is the most it can be, because `early_stop` may yet end a
    stage before.

    Where a stage is not there yet, or has lost that place, it has left out as many as so far.
    """
    below = stage
    while source is not None and not source.parent.stage.data.train.same(stage.data.train):
        below, source = source.parent.stage, source.above
    if source is None or not stage.solver.carry_data:
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
    """Return the stage with the id of its teacher's final snapshot in its identity; '' if unknown. If an unchanged teacher lost its final
    snapshot, assume that retraining reproduces the id which the stage's newest snapshot recorded."""
    found = teacher.end.id if teacher.end is not None else ""
    own = inventory.of(stage.name)
    if not found and own and teacher.comes_to_the_same_end:
        before = own[-1].identity.get(TEACHER, "")
        found = before if before not in inventory.ids else ""
    return replace(stage, identity={**stage.identity, TEACHER: found})


def averaged_from(
    stage: Stage,
    members: Sequence[tuple[Decision, int | None, SnapshotRef | None]],
    alike: Sequence[frozenset[str]],
    inventory: Inventory,
) -> Stage:
    """The stage with the ids of the snapshots that it is averaged from in its identity, as `taught_by`; '' where one is not known. `alike`:
    `same_weights` of each member."""
    own = inventory.of(stage.name)
    before = own[-1].identity.get(AVERAGE_OF, "").split() if own else []
    before = before if len(before) == len(members) else [""] * len(members)
    ids = []
    for (member, iter, ref), same_ids, id in zip(members, alike, before, strict=True):
        planned = member.planned
        same = planned.comes_to_the_same_end if iter is None else planned.comes_by_the_same
        comes_again = same and id not in inventory.ids
        if id in same_ids:
            ids.append(id)
        else:
            ids.append(ref.id if ref is not None else id if comes_again else "")
    return replace(stage, identity={**stage.identity, AVERAGE_OF: " ".join(ids) if all(ids) else ""})


def counts(ref: SnapshotRef, stage: Stage, source: Source | None, inventory: Inventory) -> bool:
    """Return whether training the stage now would produce this snapshot."""
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
        lost = ref.parent != "" and ref.parent not in inventory.ids
        parent = source.parent
        came_from = lost and (parent.comes_to_the_same_end if stage.parent_iter is None else parent.comes_by_the_same)
    return came_from and not changed and ref.iter <= stage.solver.max_iter


def unless_over(refs: tuple[SnapshotRef, ...], own: tuple[SnapshotRef, ...], stage: Stage) -> tuple[SnapshotRef, ...]:
    """Return the snapshots that count, without those of an earlier, shorter version of the stage whose final snapshot, among its `own`, no
    longer counts: resuming before that would retrain the end, unasked."""
    over = {
        ref.identity.get(MAX_ITER)
        for ref in own
        if goes_beyond(ref, stage) and changed_fields(ref, stage) == [MAX_ITER]
    }
    return tuple(ref for ref in refs if ref.identity.get(MAX_ITER) not in over)


def of_these_images(refs: tuple[SnapshotRef, ...], stage: Stage, schedule: Schedule) -> tuple[SnapshotRef, ...]:
    """Return the snapshots that count; if the stage's final snapshot was trained on other images than are there now, without those that were.
    A half-trained stage continues with the images that are there, and `run` says that it is EQUIVALENT."""
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
    """Return the fields of identity in which the stage differs from the one that a snapshot was made with.

    An upgrade makes nothing stale: a field that the snapshot's version of stagerun did not know had its default then, and a field that no
    longer counts may have any value. Fields that are written in another way and mean the same don't differ, nor do fields that the stage
    doesn't read: if it read one before, the field that decides this has changed.
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


# -- snapshots by what they are, not by what they are called
#
# What a snapshot depends on does not include the stage's name. So a snapshot under a name that the schedule doesn't have belongs to
# the first stage, in running order, that would come by it: the stage was renamed, or its block has one more entry in `from`.


def found_for(stage: Stage, source: Source | None, inventory: Inventory, known: Collection[str]) -> Inventory:
    """Return the inventory with each snapshot that counts for `stage`, under a name that is not `known`, as one of the stage's.

    Where the snapshot that it came from is gone, nothing shows that it came from this parent, and it stays what it was. One end is
    enough, the stage's own first: so two stages that were trained alike each find their own.
    """
    strangers = [name for name in inventory.by_stage if name not in known]
    if not strangers or (source is not None and not source.at):
        return inventory
    length, found = stage.solver.max_iter, dict[str, str]()
    ended = any(ref.ends(length) for ref in inventory.of(stage.name) if counts(ref, stage, source, inventory))
    for name in strangers:
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

    Snapshots at other places than those where a run that nothing interrupts has one are passed over: they are there only where someone
    stopped the run, and the bits must not depend on that. One that a stop made at such a place is as good. `parent` is the id of what the
    stage started from.
    """
    every = stage.solver.snapshot

    def fits(ref: SnapshotRef) -> bool:
        is_due = ref.iter in branches or (every > 0 and ref.iter > 0 and ref.iter % every == 0)
        return is_due and ref.parent == parent and (ref.skipped, ref.iter) <= (skipped, iter)

    own = [ref for ref in inventory.of(stage.name) if fits(ref) and not changed_fields(ref, stage)]
    return tuple(sorted(own, key=how_far, reverse=True))


# -- what an evaluation depends on besides weights


BESIDE = " + "  # between texts of several validation sets


def tested_set(schedule: Schedule, stage: Stage) -> str:
    """Which validation images the stage has, as far as someone has looked: texts of `image_sets.set_of`."""
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
