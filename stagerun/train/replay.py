"""Stages with `method: ASYNC`: the order of pushes that one goes by, what was recorded of it so far, and on rank 0 of `run --replay OUT` the
records of OUT, and whether the replay has come to the same bits."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stagerun import store
from stagerun.base.errors import RanksDiffer, ResumeRefused, UsageError
from stagerun.base.events import Note
from stagerun.base.recipe import Schedule
from stagerun.base.snapshots import SnapshotRef
from stagerun.base.text import listed
from stagerun.engine.asynchronous.record import Record, record_of
from stagerun.engine.asynchronous.training import Asynchronous
from stagerun.engine.codec import decode, digest
from stagerun.engine.loop import StageLoop
from stagerun.engine.state import TrainState
from stagerun.plan import Plan, PlannedStage, State
from stagerun.train.agreement import rank0
from stagerun.train.output import DISK
from stagerun.train.progress import ARRIVALS, MOMENTUM, WEIGHTS
from stagerun.train.recorded import newest, recorded
from stagerun.train.stored import most_arrivals, most_bytes

if TYPE_CHECKING:
    from stagerun.train.worker import StageRun

_NAMED = 3  # tensors that an error names
_REDO = "take `--redo` for the stage, or another --out"


@dataclass(frozen=True, slots=True)
class Kept:
    """What OUT has of one stage. `arrivals`: the file that its snapshot `ref` keeps the order of pushes in; `digests`: of the snapshot's
    tensors."""

    ref: SnapshotRef
    arrivals: bytes
    digests: Mapping[str, int]


def records(replayed: Path, schedule: Schedule, out: Path) -> dict[str, Kept]:
    """By the name of a stage, from its newest snapshot that is as it was written. UsageError, StorageError, PermissionDenied,
    ResumeRefused."""
    damaged: set[str] = set()
    while True:
        found = {}
        try:
            for name, ref in recorded(replayed, schedule, out, damaged).items():
                stage = schedule.stage(name)
                most = most_bytes(stage.model, arrivals=most_arrivals(stage.solver, ref.iter))
                files = store.read(DISK, replayed, ref, most)
                if ARRIVALS not in files:
                    text = f"--replay {replayed}: snapshot {ref.name} has no {ARRIVALS}"
                    raise UsageError(text, "no run of this version has written it")
                found[name] = Kept(ref, files[ARRIVALS], _digests(ref, files))
            return found
        except store.Damaged as error:  # or just deleted: a run may go on there
            damaged.add(error.name)


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
        where = f"the record of `{planned.stage.name}` ends at iteration {ends}"
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
                names = sorted({name for name, _ in _digests(own, files).items() ^ record.digests.items()})
                if names:  # none where the stage had another name then
                    text = f"replay: {own.name} has other bits than {where} in {listed([f'`{name}`' for name in names], _NAMED)}"
                    raise RanksDiffer(
                        text,
                        "run it with the same torch, on the same kind of machine; then test memory and processor of both",
                    )
            self._same.add(own.id)
            notes.append(Note(text=f"replay: {own.name} has the same bits as {where}"))
        return notes


# -- a stage


def asynchronous(run: "StageRun", loop: StageLoop, state: TrainState) -> Asynchronous:
    """The replicas and the server of a stage with `ASYNC`. Collective."""
    worker, name = run.worker, run.stage.name
    record, known = Record(), None if worker.replay is None else Record()

    def look() -> None:
        """On rank 0."""
        nonlocal record, known
        if run.is_piece and worker.replaying is None:  # what others start from has no order of its own
            text = f"stage `{name}` pushed without waiting (`method: ASYNC`), and its snapshot after {run.planned.until} iterations is gone"
            again = f"train it anew with `--redo {name}`; `--replay` makes it once more in another folder"
            raise ResumeRefused(text, again)
        try:
            if state.arrivals is not None:
                record = record_of(state.arrivals)
            if worker.replaying is not None:
                known = record_of(worker.replaying.records[name].arrivals)
        except ValueError as error:
            text = f"the order of pushes in stage `{name}` can't be read: {error}"
            raise ResumeRefused(text, f"no run has written it, or an older version; {_REDO}") from error
        if record.last != state.iter:
            text = f"the order of pushes in stage `{name}` is known up to iteration {record.last}"
            raise ResumeRefused(f"{text}, and its snapshot is of {state.iter}", _REDO)
        if known is not None and known.until(state.iter) != record:
            text = f"snapshots of stage `{name}` have two orders of pushes up to iteration {state.iter}"
            raise ResumeRefused(text, _REDO)

    rank0(worker.comm, look)
    return Asynchronous(loop, state, run.stage.solver, worker.schedule.determinism, worker.comm, record, known)
