"""`run --replay OUT`: what OUT has recorded of its stages with `method: ASYNC`, and whether the replay comes to the same bits. Torch is loaded
for what is in snapshots alone: before workers start, most that can be wrong is wrong here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from stagerun import store
from stagerun.base.errors import RanksDiffer, ResumeRefused, UsageError, listing
from stagerun.base.events import Note
from stagerun.base.recipe import Schedule
from stagerun.base.snapshots import SnapshotRef
from stagerun.base.text import listed
from stagerun.plan import Plan, PlannedStage, State, make_plan
from stagerun.train.progress import ARRIVALS, MOMENTUM, WEIGHTS


def recorded(replayed: Path, schedule: Schedule, out: Path) -> Mapping[str, SnapshotRef]:
    """By the name of a stage with `ASYNC`, the snapshot in `replayed` that holds its newest record. `out` is the replay's own folder.

    UsageError where there is nothing to replay, or of another schedule; StorageError, PermissionDenied, ResumeRefused.
    """
    flag = f"--replay {replayed}"
    if replayed.resolve() == out.resolve():
        text = "name another one with --out; without --out it is out/NAME-replay"
        raise UsageError(f"{flag} is the replay's own output folder", text)
    needed = {stage.name for stage in schedule.stages if stage.enabled and stage.solver.asynchronous}
    if not needed:
        text = "without it, the same command gives the same bits again: leave --replay out"
        raise UsageError(f"{flag}: no stage of {schedule.name} has `method: ASYNC`", text)
    plan = make_plan(schedule, store.inventory(store.LocalDisk(), replayed, looking=True))
    pushing = [planned for planned in plan.stages if planned.stage.name in needed]
    for stage in reversed(schedule.stages):  # parents stand before what starts from them
        needed |= {stage.parent} if stage.name in needed and stage.parent is not None else set()
    lines = [f"{flag} is of another schedule:"]
    for one in plan.stale:
        if one.stage.name in needed:
            lines += [f"  stage `{one.stage.name}`: {one.why}", *(f"    {change}" for change in one.changes)]
    if len(lines) > 1:
        raise UsageError("\n".join(lines), "give the schedule as it was then, with the same --set")
    refs = {planned.stage.name: ref for planned in pushing if (ref := newest(planned)) is not None}
    if not refs:
        names = listing([planned.stage.name for planned in pushing], "or")
        text = "name the output folder of a run, ./out/NAME or what --out named, that has saved a snapshot: it holds the order of pushes"
        raise UsageError(f"{flag}: there is no snapshot of {names} that can be read", text)
    return refs


def newest(planned: PlannedStage) -> SnapshotRef | None:
    """The stage's own snapshot that it has come to."""
    if planned.state is State.DONE:
        return planned.end
    return planned.start if planned.state is State.RESUME else None


@dataclass(frozen=True, slots=True)
class Kept:
    """What OUT has of one stage: its snapshot, in there the file with the order of pushes, and digests of the tensors."""

    ref: SnapshotRef
    arrivals: bytes
    digests: Mapping[str, int]


def _digests(ref: SnapshotRef, files: Mapping[str, bytes]) -> dict[str, int]:
    """By the tensor's name; of what is remembered of updates that has a slash. ResumeRefused for no file of tensors."""
    from stagerun.engine.codec import decode, digest

    try:
        return {name: digest(tensor) for file in (WEIGHTS, MOMENTUM) for name, tensor in decode(files[file]).items()}
    except (ValueError, KeyError) as error:
        raise ResumeRefused(f"snapshot {ref.name} can't be read: {error}", "no run has written it") from error


class Replay:
    """What rank 0 asks before each step."""

    def __init__(self, replayed: Path, schedule: Schedule, out: Path) -> None:
        """Takes the newest snapshot of each stage. Raises as `recorded` does, and ResumeRefused for a damaged one."""
        from stagerun.train.snapshot_sizes import most_bytes

        self.replayed, self.records = replayed, dict[str, Kept]()
        self._same: set[str] = set()  # ids of own snapshots that were compared
        for name, ref in recorded(replayed, schedule, out).items():
            try:
                files = store.read(
                    store.LocalDisk(), replayed, ref, most_bytes(schedule.stage(name).model, pushes=ref.iter)
                )
            except store.Damaged as error:  # or just deleted: a run may go on there
                todo = "delete that snapshot there, or move it away: the order up to the one before is replayed then"
                raise ResumeRefused(f"--replay {replayed}: {error}", todo) from error
            if ARRIVALS not in files:
                text = f"--replay {replayed}: snapshot {ref.name} has no {ARRIVALS}"
                raise UsageError(text, "no run of this version has written it")
            self.records[name] = Kept(ref, files[ARRIVALS], _digests(ref, files))

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
                    named = listed([f"`{name}`" for name in names], 3)
                    hint = "run it with the same torch, on the same kind of machine; then test memory and processor of both"
                    raise RanksDiffer(f"replay: {own.name} has other bits than {where} in {named}", hint)
            self._same.add(own.id)
            notes.append(Note(text=f"replay: {own.name} has the same bits as {where}"))
        return notes
