"""Stages with `method: ASYNC`: the order of pushes that one goes by, what was recorded of it so far, and on rank 0 of `run --replay OUT` the
records of OUT, and whether the replay has come to the same bits."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stagerun import store
from stagerun.base.errors import RanksDiffer, ResumeRefused, UsageError
from stagerun.base.events import Note
from stagerun.base.recipe import Schedule, Stage
from stagerun.base.snapshots import SnapshotRef
from stagerun.base.text import listed
from stagerun.engine.asynchronous.record import Record, record_of
from stagerun.engine.asynchronous.training import Asynchronous
from stagerun.engine.codec import decode, digest
from stagerun.engine.device import differences
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
_ANY = ("workers", "reducer")  # of an environment, what the bits of a replay don't hang on
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
                files = store.read(DISK, replayed, ref, _most(schedule.stage(name), ref))
                if ARRIVALS not in files:
                    text = f"--replay {replayed}: snapshot {ref.name} has no {ARRIVALS}"
                    raise UsageError(text, "no run of this version has written it")
                found[name] = Kept(ref, files[ARRIVALS], _digests(ref, files))
            return found
        except store.Damaged as error:  # or just deleted: a run may go on there
            damaged.add(error.name)


def _most(stage: Stage, ref: SnapshotRef) -> Mapping[str, int]:
    return most_bytes(stage.model, arrivals=most_arrivals(stage.solver, ref.iter))


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
                _require_same(own, where, _digests(own, files), record)
            self._same.add(own.id)
            notes.append(Note(text=f"replay: {own.name} has the same bits as {where}"))
        return notes


def _require_same(own: SnapshotRef, where: Path, found: Mapping[str, int], record: Kept) -> None:
    names = sorted(name for name, _ in found.items() ^ record.digests.items())
    if not names:  # the stage had another name then
        return
    which = listed([f"`{name}`" for name in dict.fromkeys(names)], _NAMED)
    # One process computes all of a push, whatever their number.
    then, now = ({k: v for k, v in ref.environment.items() if k not in _ANY} for ref in (record.ref, own))
    changed = "; ".join(differences(then, now, True))
    raise RanksDiffer(
        f"replay: {own.name} has other bits than {where} in {which}",
        f"it was made in another environment: {changed}"
        if changed
        else "nothing that is known of the environment has changed: test memory and processor of both machines",
    )


# -- a stage


def asynchronous(run: "StageRun", loop: StageLoop, state: TrainState) -> Asynchronous:
    """The replicas and servers of a stage with `ASYNC`. Collective."""
    comm = run.worker.comm
    records: list[Record] = []

    def look() -> list[str]:
        """On rank 0."""
        known = _order(run) if run.replays else None
        record = _read(run, state.arrivals) if state.arrivals is not None else Record()
        if record.last != state.iter:
            text = f"the order of pushes in stage `{run.stage.name}` is known up to iteration {record.last}"
            raise ResumeRefused(f"{text}, and its snapshot is of {state.iter}", _REDO)
        if known is not None and [leg for leg in _read(run, known).legs if leg.last <= state.iter] != record.legs:
            text = f"snapshots of stage `{run.stage.name}` have two orders of pushes up to iteration {state.iter}"
            raise ResumeRefused(text, "name another folder with --out, or train the stage anew with `--redo`")
        records.append(record)
        return [known.hex()] if known is not None else []

    known = rank0(comm, look)
    recorded = record_of(bytes.fromhex(known[0])) if known else None
    record = records[0] if records else Record()
    return Asynchronous(loop, state, run.stage.solver, run.worker.schedule.determinism, comm, record, recorded)


def _order(run: "StageRun") -> bytes:
    """The order to go by. ResumeRefused for a piece: what others start from has no order of its own."""
    if run.worker.replaying is None:
        name = run.stage.name
        text = f"stage `{name}` pushed without waiting (`method: ASYNC`), and its snapshot after {run.planned.until} iterations is gone"
        raise ResumeRefused(
            text, f"train it anew with `--redo {name}`; `--replay` makes it once more in another folder"
        )
    return run.worker.replaying.records[run.stage.name].arrivals


def _read(run: "StageRun", data: bytes) -> Record:
    try:
        return record_of(data)
    except ValueError as error:
        text = f"the order of pushes in stage `{run.stage.name}` can't be read: {error}"
        hint = f"no run has written it, or a version that went on without dead workers; {_REDO}"
        raise ResumeRefused(text, hint) from error
