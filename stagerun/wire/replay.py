"""The order of pushes of a stage with `method: ASYNC`: who comes next, what snapshots record of it, and `run --replay OUT`, which trains by the
record and compares the bits. Torch is loaded for tensors in snapshots alone: most mistakes are reported before workers start."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from stagerun import store
from stagerun.base.errors import RanksDiffer, ResumeRefused, UsageError, listing
from stagerun.base.events import Note
from stagerun.base.recipe import Schedule
from stagerun.base.snapshots import SnapshotRef
from stagerun.base.text import listed
from stagerun.plan import Plan, PlannedStage, State, make_plan
from stagerun.train.progress import ARRIVALS, MOMENTUM, WEIGHTS, most_bytes

# -- the order of pushes

# The file's tensors. A claim numbers a push of its leg; older versions may apply claims in another order.
_TYPES = {
    "legs": "int64",  # [n, 5]: first iteration, last, pushes, 0, 0
    "iterations": "int64",  # by claim, as are the replicas
    "replicas": "int16",
    "0/pushes": "int64",  # by leg
    "0/order": "int32",  # the claims of a leg, as they were applied
    "0/staleness": "int32",
}


@dataclass(slots=True)
class Record:
    """The order of pushes, as snapshots keep it (`train.progress.ARRIVALS`); a replay trains by it to the same bits. Lists have an entry for each
    push from iteration 0, in the order of application: its iteration, its replica, and how many updates it had not seen. `ends`: the last
    iterations of legs, growing."""

    ends: list[int] = field(default_factory=list)
    iterations: list[int] = field(default_factory=list)
    replicas: list[int] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)

    @property
    def last(self) -> int:
        """The iteration at which the record ends."""
        return self.ends[-1] if self.ends else 0

    def until(self, end: int) -> "Record":
        """Return the legs up to iteration `end`."""
        ends = [iter for iter in self.ends if iter <= end]
        pushes = ends[-1] if ends else 0
        return Record(ends, self.iterations[:pushes], self.replicas[:pushes], self.staleness[:pushes])

    def encoded(self) -> bytes:
        import torch

        from stagerun.engine.codec import encode

        bounds = list(zip([0, *self.ends], self.ends, strict=False))
        lists: dict[str, list[int]] = {
            "legs": [n for first, last in bounds for n in (first, last, last - first, 0, 0)],
            "iterations": self.iterations,
            "replicas": self.replicas,
            "0/pushes": [last - first for first, last in bounds],
            "0/order": [claim for first, last in bounds for claim in range(last - first)],
            "0/staleness": self.staleness,
        }
        tensors = {name: torch.tensor(numbers, dtype=getattr(torch, _TYPES[name])) for name, numbers in lists.items()}
        return encode(tensors | {"legs": tensors["legs"].reshape(-1, 5)})


def record_of(data: bytes) -> Record:
    """Decode a record. ValueError for other data, or an order that no run of this version writes."""
    from stagerun.engine.codec import decode

    tensors = decode(data)
    if "1/order" in tensors:
        raise ValueError("it is of several servers, and one server holds the model")
    for name, dtype in _TYPES.items():
        shape = (5,) if name == "legs" else ()
        tensor = tensors.get(name)
        if tensor is None or str(tensor.dtype) != f"torch.{dtype}" or not tensor.dim() or tensor.shape[1:] != shape:
            raise ValueError(f"not a record of pushes: `{name}` is missing, or not what a run writes")
    legs, iterations, replicas, _, order, staleness = (tensors[name].tolist() for name in _TYPES)
    record, lengths = Record(staleness=staleness), {len(iterations), len(replicas), len(order), len(staleness)}
    for first, last, *_ in legs:
        sound = first == record.last < last <= min(lengths) and sorted(order[first:last]) == list(range(last - first))
        if sound:
            record.iterations += [iterations[first + claim] for claim in order[first:last]]
            record.replicas += [replicas[first + claim] for claim in order[first:last]]
            sound = sorted(record.iterations[first:]) == list(range(first, last))
        if not sound or not all(0 <= behind <= at for at, behind in enumerate(staleness[first:last])):
            raise ValueError(f"not a record of pushes: its leg at iteration {first} is impossible")
        record.ends.append(last)
    if lengths != {record.last}:
        raise ValueError("not a record of pushes: its lists and legs differ")
    return record


AHEAD = 2  # iterations that a replica reserves after the one that it begins


class Turns:
    """Decides who trains which iteration, and whose push is applied next. Pure.

    Ages stay at most `max_staleness`. Every replica that has begun must find a turn in time, whatever the others do: sort the ages in
    falling order, then the k-th (from 0) plus k is at most `max_staleness`, after every step. The oldest can always push next: so
    it never deadlocks. With a record, replicas take the positions of its order in turn, so each knows in advance which images it needs; a position
    begins after the pushes that it must see, and the lowest that has begun can always push next.
    """

    def __init__(self, replicas: int, first: int, last: int, max_staleness: int, recorded: Record | None) -> None:
        """The iterations are `first` .. `last` - 1."""
        self.replicas, self._max_staleness, self._recorded = replicas, max_staleness, recorded
        self.version = self.limit = first  # pushes that are applied; the present leg ends before position `limit`
        self._top = first  # positions from here on have not begun
        self._reserved = [deque[int]() for _ in range(replicas)]
        self._sources = [iter(range(first, last))] * replicas
        if recorded is not None:
            self._sources = [iter(range(first + replica, last, replicas)) for replica in range(replicas)]
        self.begun: dict[int, tuple[int, int]] = {}  # by replica, its position and the version that it sees

    def cut(self) -> None:
        """End the leg as soon as possible: replicas finish what has begun, and all positions before it."""
        self.limit = min(self.limit, self._top)

    def begin(self, replica: int) -> list[int] | None:
        """Return the iteration that `replica` begins now, then its reserved iterations. None: it must wait; []: its part of the leg is over."""
        reserved, record = self._reserved[replica], self._recorded
        reserved.extend(islice(self._sources[replica], AHEAD + 1 - len(reserved)))
        if not reserved or reserved[0] >= self.limit:
            return []
        position = reserved[0]
        seen = self.version if record is None else position - record.staleness[position]
        if seen > self.version or not self._fits([seen, *(seen for _, seen in self.begun.values())]):
            return None
        self.begun[replica] = position, seen
        self._top = max(self._top, position + 1)
        iterations = list(reserved) if record is None else [record.iterations[n] for n in reserved]
        reserved.popleft()
        return iterations

    def push(self, replica: int) -> int | None:
        """Return how many updates the push of `replica`, which is applied now, has not seen. None: it must wait."""
        position, seen = self.begun[replica]
        if self._recorded is not None and position != self.version:
            return None
        if not self._fits([seen - 1 for other, (_, seen) in self.begun.items() if other != replica]):
            return None
        del self.begun[replica]
        self.version += 1
        return self.version - 1 - seen

    def _fits(self, seen: Iterable[int]) -> bool:
        """Return whether replicas that see these versions all get a turn in time; a recorded order has proved it."""
        ages = enumerate(sorted(seen))
        return self._recorded is not None or all(self.version - one + k <= self._max_staleness for k, one in ages)


# -- a replay


def recorded(replayed: Path, schedule: Schedule, out: Path) -> Mapping[str, SnapshotRef]:
    """Return the snapshot in `replayed` with the newest record of each stage with `ASYNC`. `out` is the replay's output folder.

    UsageError if nothing can be replayed, or of another schedule; StorageError, PermissionDenied, ResumeRefused.
    """
    flag = f"--replay {replayed}"
    if replayed.resolve() == out.resolve():
        text = "name another one with --out; without --out it is out/NAME-replay"
        raise UsageError(f"{flag} is the replay's output folder, too", text)
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
        raise UsageError("\n".join(lines), "name the schedule as it was then, with the same --set")
    refs = {planned.stage.name: ref for planned in pushing if (ref := newest(planned)) is not None}
    if not refs:
        names = listing([planned.stage.name for planned in pushing], "or")
        text = "name the output folder of a run, ./out/NAME or what --out named, that has saved a snapshot: it holds the order of pushes"
        raise UsageError(f"{flag}: no snapshot of {names} can be read", text)
    return refs


def newest(planned: PlannedStage) -> SnapshotRef | None:
    """Return the stage's newest snapshot."""
    if planned.state is State.DONE:
        return planned.end
    return planned.start if planned.state is State.RESUME else None


@dataclass(frozen=True, slots=True)
class Recorded:
    """A snapshot of OUT: its file with the order of pushes, and digests of its tensors."""

    ref: SnapshotRef
    arrivals: bytes
    digests: Mapping[str, int]


def _digests(ref: SnapshotRef, files: Mapping[str, bytes]) -> dict[str, int]:
    """Return digests by tensor; names of what updates remember have a slash. ResumeRefused for an unreadable file."""
    from stagerun.engine.codec import decode, digest

    try:
        return {name: digest(tensor) for file in (WEIGHTS, MOMENTUM) for name, tensor in decode(files[file]).items()}
    except (ValueError, KeyError) as error:
        raise ResumeRefused(f"snapshot {ref.name} can't be read: {error}", "no run has written it") from error


class Replay:
    """The recorded stages; rank 0 consults it before each step."""

    def __init__(self, replayed: Path, schedule: Schedule, out: Path) -> None:
        """Takes the newest snapshot of each stage. Raises as `recorded` does, and ResumeRefused for a damaged one."""
        self.replayed, self.records = replayed, dict[str, Recorded]()
        self._same: set[str] = set()  # ids of this run's snapshots that were compared
        for name, ref in recorded(replayed, schedule, out).items():
            try:
                files = store.read(
                    store.LocalDisk(), replayed, ref, most_bytes(schedule.stage(name).model, pushes=ref.iter)
                )
            except store.Damaged as error:  # or just deleted: a run may be active there
                todo = "delete that snapshot, or move it: the order up to the previous one is then replayed"
                raise ResumeRefused(f"--replay {replayed}: {error}", todo) from error
            if ARRIVALS not in files:
                text = f"--replay {replayed}: snapshot {ref.name} has no {ARRIVALS}"
                raise UsageError(text, "no run of this version has written it")
            self.records[name] = Recorded(ref, files[ARRIVALS], _digests(ref, files))

    def ends(self, planned: PlannedStage) -> int | None:
        """Return the iteration at which a stage's record ends, 0 if it has none; None for a stage without `ASYNC`."""
        if not planned.stage.solver.asynchronous:
            return None
        record = self.records.get(planned.stage.name)
        return record.ref.iter if record is not None else 0

    def over(self, planned: PlannedStage) -> Note | None:
        """Return a note if the record ends before the next step."""
        ends = self.ends(planned)
        if ends is None or planned.state is State.DONE or planned.iter < min(ends, planned.last):
            return None
        where = f"the record of `{planned.stage.name}` ends at iteration {ends}"
        return Note(text=f"{where}, and the replay with it; without --replay training continues in a new order")

    def compared(self, plan: Plan, read: Callable[[SnapshotRef], Mapping[str, bytes] | None]) -> list[Note] | None:
        """Compare each snapshot of `plan` at the end of a record, once. `read` returns a snapshot's files, None if it was damaged and is set aside:
        then return None, and make the plan again. RanksDiffer if bits differ."""
        notes = []
        for planned in plan.stages:
            record, ref = self.records.get(planned.stage.name), newest(planned)
            if record is None or ref is None or ref.iter != record.ref.iter or ref.id in self._same:
                continue
            where = self.replayed / "snapshots" / record.ref.name
            if ref.id != record.ref.id:
                files = read(ref)
                if files is None:
                    return None
                names = sorted({name for name, _ in _digests(ref, files).items() ^ record.digests.items()})
                if names:  # ids differ by the stage's name, too
                    named = listed([f"`{name}`" for name in names], 3)
                    hint = "run it with the same torch, on the same kind of machine; then test memory and processor of both"
                    raise RanksDiffer(f"replay: {ref.name} has other bits than {where} in {named}", hint)
            self._same.add(ref.id)
            notes.append(Note(text=f"replay: {ref.name} has the same bits as {where}"))
        return notes
