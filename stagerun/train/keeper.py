"""Rank 0's side of a run: the output folder, what is in it, and what goes into it."""

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
from stagerun.plan import Memory, Plan, State, changed_fields, make_plan, require_fresh
from stagerun.plan.counting import names_of, targets, under
from stagerun.store.errors import reporting
from stagerun.store.layout import averages_folder
from stagerun.system.files import who_else_writes
from stagerun.train.progress import ARRIVALS, CODE, RECIPE, STATE, WEIGHTS, Progress, progress_of
from stagerun.train.results import relied_on, require_progress, standing


class Selection(NamedTuple):
    """What --redo, --only and --until name."""

    redo: Collection[str] = ()
    only: Collection[str] = ()
    until: str | None = None


ALL = Selection()


def run_started(schedule: Schedule, **more: Any) -> RunStarted:
    """The event, with what the schedule says."""
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
    """What the snapshots of a stage's run have in common. `parent`: id of the snapshot that it started from, '' for the seed. `id_stage`
    and `skipped` as in SnapshotRef."""

    stage: Stage
    parent: str
    environment: Mapping[str, str]
    id_stage: str = ""
    skipped: int = 0


class Keeper:
    """Only rank 0 makes one. Holds `out`, by its lock and a lease, from `open` to `close`.

    `retry`: earlier lives that came to nothing are not a reason to refuse. `say` gets the reason if `open` waits, and `stop` is asked
    whether to go on waiting.
    """

    disk: store.Disk = store.LocalDisk()  # tests put one here that fails

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
        self._remembered: tuple[Schedule, Memory] = (schedule, {})
        self.retry, self.say, self.stop = retry, say, stop
        self.attempt = 1
        self.harmed: list[str] = []  # snapshots that were set aside when this process life began
        self.began_empty = False  # no snapshot was there when this process life began
        self.serial = 0  # of the newest snapshot that this process life has written, or tried to
        self.evaluated: set[str] = set()  # names of snapshots whose evaluation is there and counts
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
        """Look at the images, make the folder, prove that it can be written, take it if no one else holds it, and clear away what a killed
        run left half done. PermissionDenied, StorageError, FolderInUseError; ResumeRefused after a few lives that got nowhere; an error
        with the code of a stop."""
        self.look_at_images()
        store.prepare(self.disk, self.out)
        with reporting("look at the output folder", self.out):
            if others := who_else_writes(self.out):
                self.say(f"warning: {self.out}: {others}, who could change what this run trains from; `chmod o-w` it")
        self._lock = store.Lock(self.out)
        self._lock.acquire()
        lease = store.Lease(self.disk, self.out)
        lease.wait(self._lock.held, self.say, self.stop)
        found = self._look()
        self.began_empty = not found.snapshots and not found.damaged
        newest = standing(self.disk, self.out, self.schedule, found)
        if not self.retry:
            require_progress(self.disk, self.out, newest)
        self._lease = lease
        self.attempt = lease.take(newest, store.attempts_seen(self.disk, self.out))
        lease.keep_beating()
        store.sweep(self.disk, self.out)  # only now: until then they might be those of a run that lives

    def _was_harmed(self, ref: SnapshotRef) -> bool:
        """Whether a snapshot read back otherwise than it was written; it is set aside then."""
        whole = self.read(ref) is not None
        if whole and not store.is_harmed(self.disk, self.out, ref.name):
            return False
        if whole:
            self.set_aside(ref)
        self.harmed.append(ref.name)
        return True

    def look_at_images(self) -> bool:
        """Look which images and weights there are. Returns whether the images differ from the last look."""
        before, self.schedule = self.schedule.sets, looked_at(self.schedule, self.out)
        self.evaluated.clear()
        self._recipe.clear()
        return self.schedule.sets != before

    def forget(self) -> bool:
        """Have the next plan read the whole folder again, before the run says that nothing is left. False if the last one did."""
        again, self._forgotten = not self._forgotten, True
        self._seen.clear()
        self.evaluated.clear()
        return again

    def close(self, code: int | None = 0) -> None:
        """`code`: what the process ends with; None if it ends without a word, as a killed one does."""
        if self._lease is not None:
            self._lease.release(code)
        if self._lock is not None:
            self._lock.release()

    def require_held(self) -> None:
        """FolderInUseError if another run has taken over: to be asked right before anything is renamed, replaced or deleted.
        StorageError, PermissionDenied if that can't be known."""
        if self._lease is not None:
            self._lease.require_held()

    def require_not_lost(self) -> None:
        """FolderInUseError if it is known by now that another run has taken over. Looks at no disk."""
        if self._lease is not None and self._lease.lost:
            self._lease.require_held()

    def inventory(self) -> store.Inventory:
        """With each snapshot under the stage that the newest plan has it for."""
        return under(self._look(), self._names)

    def _look(self) -> store.Inventory:
        return store.inventory(self.disk, self.out, seen=self._seen)

    def plan(self) -> Plan:
        """What is left to do. ResumeRefused when a stage is stale and --redo does not name it; StorageError as of
        `store.answers_now`."""
        while True:
            found = self._look()
            plan = self._made(found)
            if not self._whole and any(self._was_harmed(ref) for ref in relied_on(plan)):
                continue  # the plan without them relies on others
            anew = {planned.stage.name for planned in plan.stages if planned.state is State.FRESH}
            if not store.answers_now(self.disk, self.out, found, anew):
                break
        self._names, self._whole = names_of(plan.inventory), True
        require_fresh(plan)
        return plan

    def not_chosen(self) -> tuple[str, ...]:
        """Stages that --only or --until leaves out, and that are still to be trained."""
        stages = self._made(self._look()).stages
        return tuple(planned.name for planned in stages if planned.state is State.NOT_CHOSEN)

    def _made(self, found: store.Inventory) -> Plan:
        if self._remembered[0] is not self.schedule:
            self._remembered = (self.schedule, {})
        return make_plan(self.schedule, found, *self.selection, memory=self._remembered[1])

    def read(self, ref: SnapshotRef, most: Mapping[str, int] | None = None) -> dict[str, bytes] | None:
        """The verified files of a snapshot, or None: it was damaged, and is set aside now. So is one with a file larger than
        `most` allows (`store.read`), by default what its network can take, and one whose state no run writes: someone else has signed that.

        After an I/O error once more, when another snapshot of the stage could be read: then it was not the disk that was away. Else
        StorageError: the disk must be mended. ResumeRefused for one that is too large because it is of another network.
        """
        from stagerun.train.snapshot_sizes import most_bytes  # needs torch, which nobody who only imports this does

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
        """Whether a snapshot that counts as damaged is: where the disk fails at it, only if it doesn't at another one of the stage."""
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
        """Writes a snapshot; `files` are the tensors'. Called from the writing thread; one at a time.

        StorageError, PermissionDenied, FolderInUseError.
        """
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
            ),
            files={**files, STATE: json.dumps(progress.record()).encode(), **self._recipe_files()},
            # ARRIVALS says how it came about; nothing that follows depends on it.
            content=tuple(name for name in files if name != ARRIVALS),
            require_held=self.require_held,
        )
        self._seen[ref.name], self._forgotten = ref, False
        return ref

    def commit_average(
        self, name: str, stage: Stage, iter: int, weights: bytes, environment: Mapping[str, str]
    ) -> None:
        """Writes the network that an ensemble makes, as a snapshot of the stage that it computes as, and drops the one before. It lies apart:
        no stage goes on from it. StorageError, PermissionDenied, FolderInUseError."""
        root, place = averages_folder(self.out) / name, store.Place(stage.name, iter, self.attempt)
        store.prepare(self.disk, root)
        store.sweep(self.disk, root)
        old = store.inventory(self.disk, root)
        made = store.snapshot_name(*place)
        self.require_held()
        if made in (*(ref.name for ref in old.snapshots), *old.damaged):
            store.discard(self.disk, root, made)
        store.commit(
            self.disk,
            root,
            store.Metadata(place=place, parent="", identity=stage.identity, environment=environment),
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
        """Drops what `newest` makes superfluous. `spared`: it is of a stretch that is trained once more, of which only the newest
        is needed, and these names are none of its.

        Nothing goes before a newer one that stays was read back from the disk. One that was lets those after it go, until it
        is to go itself: so of `keep_snapshots` one is read back.

        Called from the writing thread after `commit`. StorageError, PermissionDenied, FolderInUseError; Damaged if `newest` does
        not read back as it was written: then it is set aside, and the older ones are all there.
        """
        for ref in self.inventory().of(newest.stage):
            self._seen.pop(ref.name, None)  # one that was harmed meanwhile takes no place, and lets no other go
        inventory = self.inventory()
        stage, own = self.schedule.stage(newest.stage), inventory.of(newest.stage)
        pinned = self._pinned(inventory, stage, finished=newest.ends(stage.solver.max_iter))
        pinned |= _ahead(own, stage) if spared is None else spared
        keep = self.schedule.keep_snapshots if spared is None else 1
        # One of another definition takes no place among those to keep.
        alike = tuple(ref for ref in own if ref.identity == newest.identity)
        drop = store.superfluous(alike, keep, pinned, stage.solver.max_iter)
        drop += tuple(r for r in store.superfluous(own, keep, pinned, stage.solver.max_iter) if r not in alike)
        if not drop:
            return
        newer = {ref.name for ref in own[own.index(drop[-1]) + 1 :] if ref not in drop}
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
        self._seen.pop(ref.name, None)  # it counts as damaged wherever it lies
        store.set_aside(self.disk, self.out, ref.name)

    def before_piece(self, stage: Stage) -> frozenset[str]:
        """Names of the stage's snapshots that its training has left; what came in a life after its end are steps of pieces that
        were broken off, which may go once a newer one is there. To be asked where a piece begins."""
        own = self.inventory().of(stage.name)
        ends = [ref.attempt for ref in own if ref.ends(stage.solver.max_iter) and not changed_fields(ref, stage)]
        return frozenset(ref.name for ref in own if not ends or ref.attempt <= max(ends))

    def _pinned(self, inventory: store.Inventory, training: Stage, finished: bool) -> frozenset[str]:
        """Names of the snapshots of the stage in training that retention leaves alone: those that other stages start from, and those that
        a person has pinned.

        Also those of an older definition, until the stage is finished: as long as the old end is there, a plan
        can tell that the stages after it were trained from something else. For the same reason what any snapshot here was
        started from stays as long as that one does, also where the schedule doesn't name the place any more.

        And, until then, the one that `on_nan: ROLLBACK` would go back to now, which may be older than what stops have made.
        """
        branches, own = self.schedule.branch_points(training.name), inventory.of(training.name)
        gone_back_to: set[str] = set()
        if not finished and training.solver.on_nan is OnNan.ROLLBACK and own:
            last = own[-1]
            found = targets(inventory, training, branches, last.parent, last.skipped, last.iter)
            gone_back_to = {ref.name for ref in found[:1]}
        started_from = {ref.parent for ref in inventory.snapshots}

        def pinned(ref: SnapshotRef) -> bool:
            if ref.iter in branches or ref.id in started_from or ref.name in gone_back_to:
                return True
            return not finished and bool(changed_fields(ref, training))

        return frozenset(ref.name for ref in own if pinned(ref)) | store.pins(self.disk, self.out)


def _ahead(own: tuple[SnapshotRef, ...], stage: Stage) -> frozenset[str]:
    """Names of the stage's snapshots that a plan would go on from rather than from the newest: whoever wrote that had not seen them,
    since the disk did not answer for a while. They stay until training has come as far."""
    alike = [ref for ref in own if not changed_fields(ref, stage)]
    return frozenset(ref.name for ref in alike if ref.parent == alike[-1].parent and how_far(ref) > how_far(alike[-1]))
