"""What `plan` shows beside the stages: ensembles, how long it takes, and where an allocation of some length ends."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

from stagerun.base.errors import UsageError
from stagerun.base.recipe import Schedule
from stagerun.base.text import duration
from stagerun.plan import Plan, PlannedStage
from stagerun.plan.ensembles import ensembles_left, ensembles_record, ensembles_text
from stagerun.plan.hours import Hours, Speed, hours_record, of_part, render_hours, spent, stage_left
from stagerun.train.hours import find_hours
from stagerun.train.results import planned_ensembles

HINT = "give --images-per-second N, `stagerun rehearse` it here, or wait until a stage is trained"


@dataclass(frozen=True, slots=True)
class Beside:
    """As blocks of text, and as members of JSON."""

    blocks: tuple[str, ...]
    record: dict[str, object]


def beside(plan: Plan, out: Path, images_per_second: float | None, allocation: float | None) -> Beside:
    """With the given speed, in images per second of the whole job, or else the one measured here; `allocation` in seconds. UsageError for
    an allocation where no speed is known; StorageError, PermissionDenied for a log that can't be read."""
    hours, ensembles = find_hours(plan, out, images_per_second), planned_ensembles(plan, out)
    blocks = [ensembles_text(ensembles)]
    record: dict[str, object] = {"ensembles": ensembles_record(ensembles)}
    if hours is None:
        if allocation is not None:
            raise UsageError("--budget needs to know how fast training is, and nothing was measured here", HINT)
        return Beside(tuple(blocks), record)
    together = ensembles_left(plan.schedule, ensembles, hours.speeds)
    blocks.append(render_hours(plan, hours, together))
    record["time"] = hours_record(plan, hours, together)
    if allocation is not None:
        if unknown := [planned.label for planned in plan.work if planned.name not in hours.speeds]:
            raise UsageError(f"--budget: stage {', '.join(unknown)} {hours.unknown}", HINT)
        seconds = sum(time.total for time in together.values() if time is not None)
        ends = budget(plan, hours, allocation, seconds)
        blocks.append(render_budget(ends))
        record["budget"] = asdict(ends)
    return Beside(tuple(blocks), record)


# -- allocations

MOST = 1000  # that are counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How far an allocation of `seconds`, started now, gets.

    `stage` and `iter`: what it is at when the time is over, `last` being the updates that the stage is trained to; `testing`:
    all of them are done, and it is being evaluated; the ensembles are, where `stage` is ''. `epoch`: of the whole schedule,
    along the path of ancestors. `finished`: the stages that are done by then, of those that were not.

    `saved_stage`, `saved_iter`: from where the same command continues if the run is killed then, '' for the seed. If it is asked to stop
    a little before, it continues from `stop_iter` of the stage, and takes so many `allocations` in all; None if it never ends, MOST + 1
    for more than MOST.
    """

    seconds: float
    done: bool
    total: float
    finished: tuple[str, ...] = ()
    stage: str = ""
    iter: int = 0
    last: int = 0
    epoch: float = 0.0
    testing: bool = False
    stop_iter: int = 0
    saved_stage: str = ""
    saved_iter: int = 0
    allocations: int | None = 1


class _Part(NamedTuple):
    """What is left of a stage."""

    schedule: Schedule
    planned: PlannedStage
    speed: Speed

    def way(self, first: int, last: int) -> float:
        return spent(self.schedule, self.planned.stage, self.speed, first, last).total

    def reached(self, first: int, seconds: float) -> int:
        """The updates that are done so many seconds after `first` were."""
        numbers = range(first, self.planned.last + 1)
        return first + bisect_right(numbers, seconds, key=lambda iter: self.way(first, iter)) - 1

    def saved(self, first: int, reached: int) -> int:
        """The updates of the last snapshot that is due inside the stage, after `first` and up to `reached`; `first` if none is."""
        solver = self.planned.stage.solver
        due = [first, *(point for point in self.schedule.branch_points(self.planned.name) if point <= reached)]
        if solver.snapshot:
            due.append(min(reached, solver.max_iter - 1) // solver.snapshot * solver.snapshot)
        return max(due)


class _End(NamedTuple):
    """How an allocation ends: `iter` updates of the part with that number are done, those of `stopped` are on disk after a stop just
    before, and those of `saved` after a kill."""

    number: int
    iter: int
    stopped: int
    saved: int
    testing: bool = False


def budget(plan: Plan, hours: Hours, seconds: float, ensembles: float = 0.0) -> Budget:
    """An allocation of `seconds`. The speeds of all stages with something to train must be in `hours`; `ensembles`: seconds of
    their evaluation, after everything else."""
    parts = [_Part(plan.schedule, p, of_part(p, hours.speeds[p.name])) for p in plan.work]
    total = ensembles + sum(stage_left(p.schedule, p.planned, p.speed).total for p in parts)
    total += hours.opening if total else 0.0
    names, room = tuple(part.planned.label for part in parts), seconds - hours.opening
    place = 0, parts[0].planned.iter if parts else 0
    end = then = _allocation(parts, *place, room, ensembles) if total else None
    if end is None:
        return Budget(seconds=seconds, done=True, total=total, finished=names)
    allocations: int | None = 1
    while then is not None and allocations is not None and allocations <= MOST:
        allocations = None if (then.number, then.stopped) == place else allocations + 1
        place = then.number, then.stopped
        then = _allocation(parts, *place, room, ensembles)
    made = Budget(seconds=seconds, done=False, total=total, finished=names[: end.number], allocations=allocations)
    if end.number == len(parts):
        return replace(made, testing=True)
    planned = parts[end.number].planned
    stage = planned.stage
    return replace(
        made,
        stage=planned.label,
        iter=end.iter,
        last=planned.last,
        epoch=(planned.position + end.iter * stage.solver.batch_size + planned.skipped) / stage.data.train.images,
        testing=end.testing,
        stop_iter=end.stopped,
        # A stage that has no snapshot of its own starts from its parent's.
        saved_stage=stage.name if end.saved else stage.parent or "",
        saved_iter=end.saved or plan.schedule.start_iter(stage),
    )


def _allocation(parts: Sequence[_Part], number: int, iter: int, room: float, ensembles: float) -> _End | None:
    """One that begins with `iter` updates of the part with that number; None if all is done at its end."""
    for at in range(number, len(parts)):
        part, last = parts[at], parts[at].planned.last
        first = iter if at == number else part.planned.iter
        room -= part.speed.start
        if room < 0:
            return _End(at, first, first, first, testing=first == last)
        if first < last:
            # A snapshot is written behind training: it counts when it is on disk.
            safe = part.reached(first, room - part.speed.written)
            if safe < last:
                return _End(at, part.reached(first, room), max(first, safe), part.saved(first, safe))
            room -= part.way(first, last) + part.speed.written
        room -= part.speed.test
        if room < 0:
            return _End(at, last, last, last, testing=True)
    return None if room >= ensembles else _End(len(parts), 0, 0, 0, testing=True)


def render_budget(found: Budget) -> str:
    """Where an allocation of that length ends, and what follows."""
    if not found.total:
        return "nothing is left to do in an allocation"
    length, stage = duration(found.seconds), found.stage
    if found.done:
        return f"an allocation of {length} is enough: all is done after {duration(found.total)}"
    done = f", after {', '.join(found.finished)}" if found.finished else ""
    if found.testing:
        lines = [f"an allocation of {length} ends in the evaluation of {stage or 'the ensembles'}{done}"]
        lines.append(f"  {f'{stage} is saved by then, and' if stage else 'which'} is evaluated again")
    else:
        place = f"{stage}, at iteration {found.iter} of {found.last} (epoch {found.epoch:.2f})"
        saved = "there is no snapshot by then; it starts again from the seed"
        if found.saved_stage:
            saved = f"the last snapshot by then is {found.saved_stage} at {found.saved_iter}"
        lines = [f"an allocation of {length} ends in {place}{done}"]
        stops = f"saves {stage} at iteration {found.stop_iter}, and nothing is lost"
        lines += [f"  asked to stop before (SIGTERM, SIGUSR1): {stops}", f"  killed: {saved}"]
    if found.allocations is None:
        short = "too short for a start and what is next, an iteration and its snapshot or an evaluation"
        return "\n".join([*lines, f"  with {length} each it gets nowhere: {short}"])
    times = str(found.allocations) if found.allocations <= MOST else f"more than {MOST}"
    return "\n".join(
        [*lines, f"  {times} allocations of {length} in all: the same command goes on where the last one ended"]
    )
