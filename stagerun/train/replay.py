"""`run --replay OUT` on rank 0: the records of OUT, and whether the replay has come to the same bits."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from stagerun import store
from stagerun.base.errors import RanksDiffer, ResumeRefused, UsageError
from stagerun.base.events import Note
from stagerun.base.recipe import Schedule
from stagerun.base.snapshots import SnapshotRef
from stagerun.base.text import listed
from stagerun.engine.codec import decode, digest
from stagerun.engine.device import differences
from stagerun.plan import Plan, PlannedStage, State
from stagerun.train.output import DISK
from stagerun.train.progress import ARRIVALS, MOMENTUM, WEIGHTS
from stagerun.train.recorded import newest, recorded
from stagerun.train.stored import most_arrivals, most_bytes

NAMED = 3  # tensors that an error names
_ANY = ("workers", "reducer")  # of an environment, what the bits of a replay don't hang on


@dataclass(frozen=True, slots=True)
class Record:
    """What is recorded of one stage. `arrivals`: the file that its snapshot `ref` keeps the order of pushes in; `digests`: of the snapshot's tensors."""

    ref: SnapshotRef
    arrivals: bytes
    digests: Mapping[str, int]


def records(replayed: Path, schedule: Schedule, out: Path) -> dict[str, Record]:
    """By the name of a stage, from its newest snapshot that is as it was written. UsageError, StorageError, PermissionDenied,
    ResumeRefused."""
    damaged: set[str] = set()
    while True:
        refs = recorded(replayed, schedule, out, damaged)
        try:
            return {name: _read(replayed, schedule, name, ref) for name, ref in refs.items()}
        except store.Damaged as error:  # or just deleted: a run may go on there
            damaged.add(error.name)


def _read(replayed: Path, schedule: Schedule, name: str, ref: SnapshotRef) -> Record:
    stage = schedule.stage(name)
    most = most_bytes(stage.model, arrivals=most_arrivals(stage.solver, ref.iter))
    files = store.read(DISK, replayed, ref, most)
    if ARRIVALS not in files:
        raise UsageError(
            f"--replay {replayed}: snapshot {ref.name} has no {ARRIVALS}", "no run of this version has written it"
        )
    return Record(ref, files[ARRIVALS], _digests(ref, files))


def _digests(ref: SnapshotRef, files: Mapping[str, bytes]) -> dict[str, int]:
    """By the tensor's name; of what is remembered of updates that has a slash. ResumeRefused for no file of tensors."""
    try:
        return {name: digest(tensor) for file in (WEIGHTS, MOMENTUM) for name, tensor in decode(files[file]).items()}
    except (ValueError, KeyError) as error:
        raise ResumeRefused(f"snapshot {ref.name} can't be read: {error}", "no run has written it") from error


class Replay:
    """What rank 0 asks before each step."""

    def __init__(self, replayed: Path, schedule: Schedule, out: Path) -> None:
        """Raises as `records` does."""
        self.replayed, self.records = replayed, records(replayed, schedule, out)
        self._same: set[str] = set()  # ids of own snapshots that were compared

    def ends(self, planned: PlannedStage) -> int | None:
        """The iteration of a stage with `ASYNC` at which its record ends: 0 of one that has none. None of any other stage."""
        if not planned.stage.solver.asynchronous:
            return None
        record = self.records.get(planned.stage.name)
        return record.ref.iter if record is not None else 0

    def over(self, planned: PlannedStage) -> Note | None:
        """What is said where the record has nothing left for what comes next."""
        ends = self.ends(planned)
        if ends is None or planned.state is State.DONE or planned.iter < min(ends, planned.last):
            return None
        name = planned.stage.name
        where = f"the record of `{name}` ends at iteration {ends}" if ends else f"nothing is recorded of `{name}`"
        return Note(text=f"{where}, and the replay with it; without --replay training goes on in an order of its own")

    def compared(self, plan: Plan, read: Callable[[SnapshotRef], Mapping[str, bytes] | None]) -> list[Note] | None:
        """Compares each snapshot of `plan` that lies where a record ends, once. `read` gives the files of one, or None if it was damaged
        and is out of the way now: then None, and the plan is to be made anew. RanksDiffer where bits are others."""
        notes = []
        for planned in plan.stages:
            record, own = self.records.get(planned.stage.name), newest(planned)
            if record is None or own is None or own.iter != record.ref.iter or own.id in self._same:
                continue
            where = self.replayed / "snapshots" / record.ref.name
            if own.id != record.ref.id:
                files = read(own)
                if files is None:
                    return None
                _require_same(own, where, _digests(own, files), record)
            self._same.add(own.id)
            notes.append(Note(text=f"replay: {own.name} has the same bits as {where}"))
        return notes


def _require_same(own: SnapshotRef, where: Path, found: Mapping[str, int], record: Record) -> None:
    names = [
        name for name in sorted(found.keys() | record.digests.keys()) if found.get(name) != record.digests.get(name)
    ]
    if not names:  # the stage had another name then
        return
    which = listed([f"`{name}`" for name in names], NAMED)
    # One process computes all of a push, whatever their number.
    then, now = ({k: v for k, v in ref.environment.items() if k not in _ANY} for ref in (record.ref, own))
    changed = "; ".join(differences(then, now, True))
    raise RanksDiffer(
        f"replay: {own.name} has other bits than {where} in {which}",
        f"it was made in another environment: {changed}"
        if changed
        else "nothing that is known of the environment has changed: test memory and processor of both machines",
    )
