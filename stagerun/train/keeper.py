"""The output folder on rank 0: its snapshots, the plan made from them, and the files that are written or deleted."""

import json
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import stagerun
from stagerun import store
from stagerun.base.errors import PermissionDenied, ResumeRefused, StorageError
from stagerun.base.events import RunStarted
from stagerun.base.recipe import OnNan, Schedule, Stage
from stagerun.base.snapshots import SnapshotRef, how_far
from stagerun.data.weights import looked_at
from stagerun.language import canonical
from stagerun.plan import Plan, State, changed_fields, make_plan, require_fresh
from stagerun.plan.counting import names_of, targets, under
from stagerun.store.errors import reporting
from stagerun.store.layout import averages_folder
from stagerun.system.files import who_else_writes
from stagerun.train.progress import ARRIVALS, CODE, RECIPE, STATE, WEIGHTS, Progress, most_bytes, progress_of
from stagerun.train.results import relied_on, require_progress, standing


class Selection(NamedTuple):
    """Stages that --redo, --only and --until name."""

    redo: Collection[str] = ()
    only: Collection[str] = ()
    until: str | None = None


ALL = Selection()


def run_started(schedule: Schedule, **more: Any) -> RunStarted:
    """Return the event that opens a run."""
    return RunStarted(
        schedule=schedule.name,
        stages=tuple(stage.name for stage in schedule.stages if stage.enabled),
        iterations=sum(stage.solver.max_iter for stage in schedule.stages if stage.enabled),
        version=stagerun.__version__,
        ensembles=tuple(ensemble.name for ensemble in schedule.ensembles),
        disabled=tuple(stage.name for stage in schedule.stages if not stage.enabled),
        **more,
    )


@dataclass(frozen=True, slots=True)
class Lineage:
    """Facts that the snapshots of a stage's run have in common. `parent`: id of the snapshot that it started from, '' for the seed.
    `id_stage` and `skipped` as in SnapshotRef."""

    stage: Stage
    parent: str
    environment: Mapping[str, str]
    id_stage: str = ""
    skipped: int = 0


class Keeper:
    """Holds `out`, by its lock and a lease, from `open` to `close`. Rank 0 only.

    `retry`: don't refuse after earlier lives without progress. `say` gets the reason if `open` waits, and `stop` is polled meanwhile.
    """

    disk: store.Disk = store.LocalDisk()  # tests replace it by one that fails

    def __init__(
        self,
        schedule: Schedule,
        out: Path,
        selection: Selection = ALL,
        retry: bool = False,
        say: Callable[[str], None] = lambda text: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.schedule, self.out, self.selection = schedule, out, selection

        self.retry, self.say, self.stop = retry, say, stop
        self.attempt = 1
        self.harmed: list[str] = []  # snapshots that were set aside when this process life began
        self.began_empty = False  # the folder had no snapshot when this process life began
        self.serial = 0  # of the newest snapshot that this process life has written, or tried to
        self.evaluated: set[str] = set()  # names of snapshots whose evaluation counts
        self._lock: store.Lock | None = None
        self._lease: store.Lease | None = None
        self._verified: set[str] = set()  # names of snapshots that read back in this life as they were written
        # What this process life has seen of the folder, which it holds: no manifest is read twice, and no result. `forget` ends that.
        self._seen: dict[str, SnapshotRef] = {}
        self._forgotten = False
        self._whole = False  # what the plan relies on was read back
        self._recipe: dict[str, bytes] = {}  # a snapshot's files of the schedule
        self._names: dict[str, str] = {}  # by snapshot its stage's present name, where it was trained under another

    def open(self) -> None:
        """Look at the images, make the folder, prove that it can be written, take it if it is free, and remove unfinished files of a
        killed run. PermissionDenied, StorageError, FolderInUseError; ResumeRefused after a few lives without progress; an error with
        the code of a stop."""
        self.look_at_images()
        store.prepare(self.disk, self.out)
        with reporting("look at the output folder", self.out):
            if others := who_else_writes(self.out):
                self.say(f"warning: {self.out}: {others}, who could change what this run trains from; `chmod o-w` it")
        self._lock = store.Lock(self.out)
        self._lock.acquire()
        lease = store.Lease(self.disk, self.out)
        lease.wait(self._lock.held, self.say, self.stop)
        inventory = self._look()
        self.began_empty = not inventory.snapshots and not inventory.damaged
        newest = standing(self.disk, self.out, self.schedule, inventory)
        if not self.retry:
            require_progress(self.disk, self.out, newest)
        self._lease = lease
        self.attempt = lease.take(newest, store.attempts_seen(self.disk, self.out))
        lease.keep_beating()
        store.sweep(self.disk, self.out)  # only now: until then the files might belong to a live run

    def _was_harmed(self, ref: SnapshotRef) -> bool:
        """Return whether a snapshot reads back differently than it was written; set it aside then."""
        whole = self.read(ref) is not None
        if whole and not store.is_harmed(self.disk, self.out, ref.name):
            return False
        if whole:
            self.set_aside(ref)
        self.harmed.append(ref.name)
        return True

    def look_at_images(self) -> bool:
        """Look which images and weights exist. Return whether the images differ from the last look."""
        before, self.schedule = self.schedule.sets, looked_at(self.schedule, self.out)
        self.evaluated.clear()
        self._recipe.clear()
        return self.schedule.sets != before

    def forget(self) -> bool:
        """Have the next plan read the whole folder again, before the run reports that it is done. False if the last plan did."""
        again, self._forgotten = not self._forgotten, True
        self._seen.clear()
        self.evaluated.clear()
        return again

    def close(self, code: int | None = 0) -> None:
        """`code`: exit code of the process; None if it is killed."""
        if self._lease is not None:
            self._lease.release(code)
        if self._lock is not None:
            self._lock.release()

    def require_held(self) -> None:
        """Raise FolderInUseError if another run has taken over: call it right before anything is renamed, replaced or deleted.
        StorageError, PermissionDenied if the disk can't tell."""
        if self._lease is not None:
            self._lease.require_held()

    def require_not_lost(self) -> None:
        """Raise FolderInUseError if the lease is already lost. Reads no disk."""
        if self._lease is not None and self._lease.lost:
            self._lease.require_held()

    def inventory(self) -> store.Inventory:
        """Return the snapshots, each under its stage's name in the newest plan."""
        return under(self._look(), self._names)

    def _look(self) -> store.Inventory:
        return store.inventory(self.disk, self.out, seen=self._seen)

    def plan(self) -> Plan:
        """Plan what remains. ResumeRefused when a stage is stale and --redo does not name it; StorageError as in `store.answers_now`."""
        while True:
            inventory = self._look()
            plan = self._made(inventory)
            if not self._whole and any(self._was_harmed(ref) for ref in relied_on(plan)):
                continue  # the plan without them relies on others
            fresh = {planned.stage.name for planned in plan.stages if planned.state is State.FRESH}
            if not store.answers_now(self.disk, self.out, inventory, fresh):
                break
        self._names, self._whole = names_of(plan.inventory), True
        require_fresh(plan)
        return plan

    def not_chosen(self) -> tuple[str, ...]:
        """Return stages that --only or --until leaves out, and that still have to be trained."""
        stages = self._made(self._look()).stages
        return tuple(planned.name for planned in stages if planned.state is State.NOT_CHOSEN)

    def _made(self, found: store.Inventory) -> Plan:
        return make_plan(self.schedule, found, *self.selection)

    def read(self, ref: SnapshotRef, most: Mapping[str, int] | None = None) -> dict[str, bytes] | None:
        """Return the verified files of a snapshot; None if it was damaged, and is set aside now. A file larger than `most` allows (by
        default what its network needs), or a state that no run writes, counts as damage.

        After an I/O error read again if another snapshot of the stage can be read: then the disk works. Else StorageError: the disk
        must be repaired. ResumeRefused for a snapshot that is too large because its network is another.
        """
        most = most or most_bytes(self.schedule.stage(ref.stage).model)
        for again in (True, False):
            try:
                files = store.read(self.disk, self.out, ref, most)
                progress_of(files)
                return files
            except store.TooLarge as error:
                self._require_same_network(ref, error)
                break
            except store.Damaged as error:
                if not error.disk_fails:
                    break
                if again and not self._another_is_well(ref.stage, ref.name):
                    raise store.only_one(error) from error
            except (ValueError, KeyError):
                break
        self.set_aside(ref)
        return None

    def is_harmed(self, stage: str, name: str) -> bool:
        """Return whether a snapshot listed as damaged really is: an I/O error counts only if another snapshot of the stage can be read."""
        try:
            store.inspect(self.disk, self.out, name)
        except store.Damaged as error:
            return not error.disk_fails or self._another_is_well(stage, name)
        return False

    def _another_is_well(self, stage: str, name: str) -> bool:
        for other in reversed(self.inventory().of(stage)):
            if other.name != name:
                with suppress(store.Damaged):
                    store.verify(self.disk, self.out, other.name)
                    return True
        return False

    def _require_same_network(self, ref: SnapshotRef, error: store.TooLarge) -> None:
        for stage in self.schedule.stages:
            if stage.name == ref.stage and any(field.startswith("model.") for field in changed_fields(ref, stage)):
                raise ResumeRefused(
                    f"snapshot {ref.name} does not fit network `{stage.model.name}`: {error.reason}",
                    "it was trained with another `model`: put that back, or train the stage again with --redo",
                ) from error

    def commit(self, lineage: Lineage, iter: int, files: Mapping[str, store.Blob], progress: Progress) -> SnapshotRef:
        """Write a snapshot with the tensor `files`. Called from the writing thread, one at a time. StorageError, PermissionDenied,
        FolderInUseError."""
        self.serial += 1
        ref = store.commit(
            self.disk,
            self.out,
            store.Metadata(
                place=store.Place(lineage.stage.name, iter, self.attempt),
                parent=lineage.parent,
                identity=lineage.stage.identity,
                environment=lineage.environment,
                id_stage=lineage.id_stage,
                serial=self.serial,
                skipped=lineage.skipped,
                began_empty=self.began_empty,
                ended=progress.best is not None and progress.best.ended,
                best=progress.best.at if progress.best and self.schedule.best_of(lineage.stage.name) else 0,
            ),
            files={**files, STATE: json.dumps(progress.record()).encode(), **self._recipe_files()},
            # ARRIVALS records how training went; nothing later depends on it.
            content=tuple(name for name in files if name != ARRIVALS),
            require_held=self.require_held,
        )
        self._seen[ref.name], self._forgotten = ref, False
        return ref

    def commit_average(
        self, name: str, stage: Stage, iter: int, weights: bytes, environment: Mapping[str, str]
    ) -> None:
        """Write the averaged network of an ensemble as a snapshot of the stage that it computes as, in a folder apart, since no stage
        resumes from it; drop the previous one. StorageError, PermissionDenied, FolderInUseError."""
        root, point = averages_folder(self.out) / name, store.Place(stage.name, iter, self.attempt)
        store.prepare(self.disk, root)
        store.sweep(self.disk, root)
        old = store.inventory(self.disk, root)
        made = store.snapshot_name(*point)
        self.require_held()
        if made in (*(ref.name for ref in old.snapshots), *old.damaged):
            store.discard(self.disk, root, made)
        store.commit(
            self.disk,
            root,
            store.Metadata(place=point, parent="", identity=stage.identity, environment=environment),
            files={WEIGHTS: weights, **self._recipe_files()},
            content=(WEIGHTS,),
            require_held=self.require_held,
        )
        for ref in old.snapshots:
            if ref.name != made:
                store.discard(self.disk, root, ref.name)

    def _recipe_files(self) -> dict[str, bytes]:
        if not self._recipe:
            self._recipe = {RECIPE: canonical(self.schedule).encode()}
            if code := dict(self.schedule.python.files):
                self._recipe[CODE] = json.dumps(code).encode()
        return self._recipe

    def retain(self, newest: SnapshotRef, spared: frozenset[str] | None = None) -> None:
        """Drop the snapshots that `newest` makes superfluous. `spared`: names to keep while a piece of a stage is retrained, of which
        only the newest snapshot is needed.

        Nothing is deleted before a newer snapshot that stays was read back from the disk; so one of `keep_snapshots` is read back.

        Called from the writing thread after `commit`. StorageError, PermissionDenied, FolderInUseError; Damaged if `newest` reads back
        differently: it is set aside, and the older ones remain.
        """
        for ref in self.inventory().of(newest.stage):
            self._seen.pop(ref.name, None)  # read again: a snapshot harmed meanwhile must not replace another
        inventory = self.inventory()
        stage, refs = self.schedule.stage(newest.stage), inventory.of(newest.stage)
        pinned = self._pinned(inventory, stage, finished=newest.ends(stage.solver.max_iter))
        pinned |= _ahead(refs, stage) if spared is None else spared
        keep = self.schedule.keep_snapshots if spared is None else 1
        # Snapshots of another definition don't count among those to keep.
        alike = tuple(ref for ref in refs if ref.identity == newest.identity)
        drop = store.superfluous(alike, keep, pinned, stage.solver.max_iter)
        drop += tuple(r for r in store.superfluous(refs, keep, pinned, stage.solver.max_iter) if r not in alike)
        if not drop:
            return
        newer = {ref.name for ref in refs[refs.index(drop[-1]) + 1 :] if ref not in drop}
        if not self._verified & newer:
            try:
                store.verify(self.disk, self.out, newest.name)
            except store.Damaged as error:
                if not error.disk_fails:
                    with suppress(StorageError, PermissionDenied):
                        self.set_aside(newest)
                raise
            self._verified.add(newest.name)
        for old in drop:
            self.require_held()
            store.discard(self.disk, self.out, old.name)

    def set_aside(self, ref: SnapshotRef) -> None:
        self.require_held()
        self._seen.pop(ref.name, None)
        store.set_aside(self.disk, self.out, ref.name)

    def before_piece(self, stage: Stage) -> frozenset[str]:
        """Return names of the stage's snapshots from its training. Later ones are from pieces that were broken off, and may be deleted
        once a newer one exists. Call it when a piece begins."""
        refs = self.inventory().of(stage.name)
        ends = [ref.attempt for ref in refs if ref.ends(stage.solver.max_iter) and not changed_fields(ref, stage)]
        return frozenset(ref.name for ref in refs if not ends or ref.attempt <= max(ends))

    def _pinned(self, inventory: store.Inventory, training: Stage, finished: bool) -> frozenset[str]:
        """Return names of the stage's snapshots that retention keeps: starts of other stages, and those pinned by a person.

        Until the stage is finished, also snapshots of an older definition: as long as the old end exists, a plan can tell that the
        stages after it were trained from something else; for the same reason the parent of any snapshot here stays. And the snapshot
        that `on_nan: ROLLBACK` would restore now, which may be older than those written by stops.
        """
        branches, refs = self.schedule.branch_points(training.name), inventory.of(training.name)
        pinned = {ref.parent for ref in inventory.snapshots}
        pinned |= {ref.id for ref in refs if ref.iter in (*branches, refs[-1].best)}
        if not finished:
            pinned |= {ref.id for ref in refs if changed_fields(ref, training)}
            if training.solver.on_nan is OnNan.ROLLBACK and refs:
                last = refs[-1]
                saved = self.schedule.saved_at(training.name)
                back_to = targets(inventory, training, saved, last.parent, last.skipped, last.iter)
                pinned |= {ref.id for ref in back_to[:1]}
        return frozenset(ref.name for ref in refs if ref.id in pinned) | store.pins(self.disk, self.out)


def _ahead(refs: tuple[SnapshotRef, ...], stage: Stage) -> frozenset[str]:
    """Return names of snapshots that a plan would prefer to the newest: the writer of the newest had not seen them, since the disk did not
    answer for a while. They stay until training has come as far."""
    alike = [ref for ref in refs if not changed_fields(ref, stage)]
    return frozenset(ref.name for ref in alike if ref.parent == alike[-1].parent and how_far(ref) > how_far(alike[-1]))
