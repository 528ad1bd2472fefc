"""Where an allocation of some length ends, and how many of them a schedule takes. Pure."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from stagerun.base.recipe import Schedule
from stagerun.base.text import duration
from stagerun.plan.hours import Hours, Speed, of_part, spent
from stagerun.plan.plan import Plan, PlannedStage

MOST = 1000  # allocations that are counted


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


@dataclass(frozen=True, slots=True)
class _Part:
    """What is left of a stage."""

    schedule: Schedule
    planned: PlannedStage
    speed: Speed

    @property
    def last(self) -> int:
        return self.planned.last

    def way(self, first: int, last: int) -> float:
        return spent(self.schedule, self.planned.stage, self.speed, first, last).total

    def reached(self, first: int, seconds: float) -> int:
        """The updates that are done so many seconds after `first` were."""
        numbers = range(first, self.last + 1)
        return first + bisect_right(numbers, seconds, key=lambda iter: self.way(first, iter)) - 1

    def saved(self, first: int, reached: int) -> int:
        """The updates of the last snapshot that is due inside the stage, after `first` and up to `reached`; `first` if none is."""
        solver = self.planned.stage.solver
        due = [p for p in self.schedule.branch_points(self.planned.stage.name) if first < p <= reached]
        inside = min(reached, solver.max_iter - 1)
        if solver.snapshot and (newest := inside // solver.snapshot * solver.snapshot) > first:
            due.append(newest)
        return max(due, default=first)


@dataclass(frozen=True, slots=True)
class _End:
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
    parts = [_Part(plan.schedule, p, of_part(p, hours.speeds[p.stage.name])) for p in plan.work]
    total = ensembles + sum(
        p.speed.start + p.way(p.planned.iter, p.last) + p.speed.written + p.speed.test for p in parts
    )
    total += hours.opening if total else 0.0
    first = parts[0].planned.iter if parts else 0
    room = seconds - hours.opening
    end = _allocation(parts, 0, first, room, ensembles) if total else None
    names = tuple(p.planned.label for p in parts)
    if end is None:
        return Budget(seconds=seconds, done=True, total=total, finished=names)
    allocations: int | None = 1
    then: _End | None = end
    place = 0, first
    while then is not None and allocations is not None and allocations <= MOST:
        allocations = None if (then.number, then.stopped) == place else allocations + 1
        place = then.number, then.stopped
        then = _allocation(parts, *place, room, ensembles)
    if end.number == len(parts):
        return Budget(
            seconds=seconds, done=False, total=total, finished=names, testing=True, allocations=allocations
        )  # fmt: skip
    part, planned = parts[end.number], parts[end.number].planned
    stage = planned.stage
    position = planned.position + end.iter * stage.solver.batch_size + planned.skipped
    return Budget(
        seconds=seconds,
        done=False,
        total=total,
        finished=names[: end.number],
        stage=planned.label,
        iter=end.iter,
        last=part.last,
        epoch=position / stage.data.train.images,
        testing=end.testing,
        stop_iter=end.stopped,
        # A stage that has no snapshot of its own starts from its parent's.
        saved_stage=stage.name if end.saved else stage.parent or "",
        saved_iter=end.saved or plan.schedule.start_iter(stage),
        allocations=allocations,
    )


def _allocation(parts: Sequence[_Part], number: int, iter: int, room: float, ensembles: float) -> _End | None:
    """One that begins with `iter` updates of the part with that number; None if all is done at its end."""
    for at in range(number, len(parts)):
        part, first = parts[at], iter if at == number else parts[at].planned.iter
        room -= part.speed.start
        if room < 0:
            return _End(at, first, first, first, testing=first == part.last)
        if first < part.last:
            # A snapshot is written behind training: it counts when it is on disk.
            safe = part.reached(first, room - part.speed.written)
            if safe < part.last:
                return _End(at, part.reached(first, room), max(first, safe), part.saved(first, safe))
            room -= part.way(first, part.last) + part.speed.written
        room -= part.speed.test
        if room < 0:
            return _End(at, part.last, part.last, part.last, testing=True)
    return None if room >= ensembles else _End(len(parts), 0, 0, 0, testing=True)


def render_budget(found: Budget) -> str:
    """Where an allocation of that length ends, and what follows."""
    if not found.total:
        return "nothing is left to do in an allocation"
    length = duration(found.seconds)
    if found.done:
        return f"an allocation of {length} is enough: all is done after {duration(found.total)}"
    done = f", after {', '.join(found.finished)}" if found.finished else ""
    if found.testing:
        lines = [f"an allocation of {length} ends in the evaluation of {found.stage or 'the ensembles'}{done}"]
        lines.append(f"  {f'{found.stage} is saved by then, and' if found.stage else 'which'} is evaluated again")
    else:
        place = f"{found.stage}, at iteration {found.iter} of {found.last} (epoch {found.epoch:.2f})"
        saved = f"the last snapshot by then is {found.saved_stage} at {found.saved_iter}"
        lines = [
            f"an allocation of {length} ends in {place}{done}",
            f"  asked to stop before (SIGTERM, SIGUSR1): saves {found.stage} at iteration {found.stop_iter}, and nothing is lost",
            f"  killed: {saved if found.saved_stage else 'there is no snapshot by then; it starts again from the seed'}",
        ]
    if found.allocations is None:
        short = "too short for a start and what is next, an iteration and its snapshot or an evaluation"
        return "\n".join([*lines, f"  with {length} each it gets nowhere: {short}"])
    times = str(found.allocations) if found.allocations <= MOST else f"more than {MOST}"
    return "\n".join(
        [*lines, f"  {times} allocations of {length} in all: the same command goes on where the last one ended"]
    )
