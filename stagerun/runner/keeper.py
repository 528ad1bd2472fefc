"""Rank 0's side of a run: the output folder, what is in it, and what goes into it."""

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from stagerun import store
from stagerun.plan import Plan, changed_fields, make_plan, require_fresh
from stagerun.plan.renamed import names_of, under
from stagerun.recipe import Schedule, Stage
from stagerun.snapshots import SnapshotRef
from stagerun.spec import canonical

WEIGHTS, MOMENTUM, AVERAGE = "model.safetensors", "optim.safetensors", "ema.safetensors"
STATE, RECIPE = "state.json", "recipe.prototxt"


@dataclass(frozen=True, slots=True)
class Progress:
    """What a snapshot says besides tensors, for people, tables and limits; the weights need none of it.

    `position`: images consumed along the path of ancestors. `train_seconds`: over all process lives. `losses`: those of the
    last iterations. `bad_records`: [index, position, text] of those that were replaced, by all workers in all process lives.
    `plateau`: what lr_policy `plateau` goes on from, the fields of PlateauState; None of a stage with another policy.
    """

    position: int
    train_seconds: float
    losses: list[float]
    bad_records: list[list[int | str]] = field(default_factory=list)  # an older snapshot has none
    plateau: dict[str, Any] | None = None


class Keeper:
    """Only rank 0 makes one. Holds the lock on `out` from `open` to `close`."""

    def __init__(
        self,
        schedule: Schedule,
        out: Path,
        redo: Collection[str] = (),
        keep: Collection[str] = (),
        only: Collection[str] = (),
        until: str | None = None,
    ) -> None:
        self.schedule, self.out, self.redo, self.keep, self.only, self.until = schedule, out, redo, keep, only, until
        self.disk = store.LocalDisk()
        self.attempt = 1
        self._serial = 0
        self._lock: store.Lock | None = None
        # By a snapshot's name, the stage that the newest plan has it for, where it was trained under another name.
        self._names: dict[str, str] = {}

    def open(self) -> None:
        """Makes the folder, proves that it can be written, takes the lock, clears away what a killed run left half done.

        PermissionDenied, StorageError, FolderInUseError.
        """
        store.prepare(self.disk, self.out)
        self._lock = store.Lock(self.out)
        self._lock.acquire()
        store.sweep(self.disk, self.out)
        taken = [ref.attempt for ref in self.inventory().snapshots]
        self.attempt = max([*taken, *store.attempts_seen(self.disk, self.out)], default=0) + 1

    def close(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def inventory(self) -> store.Inventory:
        """With each snapshot under the stage that the newest plan has it for."""
        return under(store.inventory(self.disk, self.out), self._names)

    def plan(self) -> Plan:
        """What is left to do. ResumeRefused when a stage is stale and neither --redo nor --keep names it."""
        found = store.inventory(self.disk, self.out)
        plan = make_plan(self.schedule, found, self.redo, self.keep, self.only, self.until)
        self._names = names_of(plan.inventory)
        require_fresh(plan)
        return plan

    def read(self, ref: SnapshotRef) -> dict[str, bytes] | None:
        """The verified files of a snapshot, or None: it was damaged, and is set aside now."""
        try:
            return store.read(self.disk, self.out, ref)
        except store.Damaged:
            store.set_aside(self.disk, self.out, ref.name)
            return None

    def commit(
        self,
        stage: Stage,
        iter: int,
        parent: str,
        files: Mapping[str, bytes],
        progress: Progress,
        environment: Mapping[str, str],
        id_stage: str = "",
        skipped: int = 0,
    ) -> SnapshotRef:
        """Writes a snapshot; `files` are the tensors'. Called from the writing thread; one at a time. `id_stage` as in SnapshotRef.

        StorageError, PermissionDenied.
        """
        self._serial += 1
        return store.commit(
            self.disk,
            self.out,
            stage=stage.name,
            iter=iter,
            attempt=self.attempt,
            parent=parent,
            identity=stage.identity,
            environment=environment,
            files={
                **files,
                STATE: json.dumps(asdict(progress)).encode(),
                RECIPE: canonical(self.schedule).encode(),
            },
            content=tuple(files),
            id_stage=id_stage,
            serial=self._serial,
            skipped=skipped,
        )

    def retain(self, newest: SnapshotRef, spared: frozenset[str] | None = None) -> None:
        """Drops what `newest` makes superfluous; it was committed, so there is always one to go on from. `spared`: it is of a
        stretch that is trained once more, of which only the newest is needed, and these names are none of its.

        Called from the writing thread after `commit`. StorageError, PermissionDenied.
        """
        inventory = self.inventory()
        stage = self.schedule.stage(newest.stage)
        pinned = self._pinned(inventory, stage, finished=newest.iter == stage.solver.max_iter)
        keep = self.schedule.keep_snapshots if spared is None else 1
        ends = {s.name: s.solver.max_iter for s in self.schedule.stages}
        for old in store.superfluous(inventory, keep, pinned | (spared or frozenset()), ends):
            store.drop(self.disk, self.out, old)

    def before_piece(self, stage: Stage) -> frozenset[str]:
        """Names of the stage's snapshots that its training has left; what came in a life after its end are steps of pieces that
        were broken off, which may go once a newer one is there. To be asked where a piece begins."""
        own = self.inventory().of(stage.name)
        ends = [ref.attempt for ref in own if ref.iter == stage.solver.max_iter and not changed_fields(ref, stage)]
        return frozenset(ref.name for ref in own if not ends or ref.attempt <= max(ends))

    def _pinned(self, inventory: store.Inventory, training: Stage, finished: bool) -> frozenset[str]:
        """Names of the snapshots that retention leaves alone: those of every stage but the one in training, and those of that
        one that other stages start from.

        Of that one also those of an older definition, until the stage is finished: as long as the old end is there, a plan
        can tell that the stages after it were trained from something else. For the same reason what any snapshot here was
        started from stays as long as that one does, also where the schedule doesn't name the place any more.
        """
        branches = self.schedule.branch_points(training.name)
        started_from = {ref.parent for ref in inventory.snapshots}

        def pinned(ref: SnapshotRef) -> bool:
            if ref.stage != training.name or ref.iter in branches or ref.id in started_from:
                return True
            return not finished and bool(changed_fields(ref, training))

        return frozenset(ref.name for ref in inventory.snapshots if pinned(ref))


def progress_of(files: Mapping[str, bytes]) -> Progress:
    return Progress(**json.loads(files[STATE]))
