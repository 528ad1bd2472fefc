"""Where an allocation of some length ends, and how many of them a schedule takes. Pure."""

from bisect import bisect_right
from dataclasses import dataclass

from stagerun.base.recipe import Schedule
from stagerun.base.text import count, duration
from stagerun.plan.hours import Hours, Speed, of_part, spent
from stagerun.plan.plan import Plan, PlannedStage

MOST = 1000  # allocations that are counted


@dataclass(frozen=True, slots=True)
class Place:
    """`iter` updates of the stage with that number are done, counted from 0 among those with something to train."""

    number: int
    iter: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How far an allocation of `seconds`, started now, gets.

    `stage` and `iter`: what it is at when the time is over, `last` being the updates that the stage is trained to; `testing`:
    all of them are done, and it is being evaluated; the ensembles are, where `stage` is ''. `epoch`: of the whole schedule,
    along the path of ancestors. `finished`: the stages that are done by then, of those that were not.

    `saved_stage`, `saved_iter`: from where the same command continues if the run is killed then, '' for the seed. If it is asked to stop
    a little before, it continues from `stop_iter` of the stage. `lost`: updates that a kill costs. `allocations`: how many of that
    length it takes in all when each is asked to stop, `killed_allocations` when each is killed; None if it never ends, MOST + 1 for
    more than MOST.
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
    lost: int = 0
    lost_seconds: float = 0.0
    allocations: int | None = 1
    killed_allocations: int | None = 1


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
class _Job:
    """Everything that is left, in running order."""

    parts: list[_Part]
    opening: float
    ensembles: float

    @property
    def total(self) -> float:
        parts = sum(p.speed.start + p.way(p.planned.iter, p.last) + p.speed.written + p.speed.test for p in self.parts)
        return self.opening + parts + self.ensembles if parts or self.ensembles else 0.0


@dataclass(frozen=True, slots=True)
class _End:
    """How an allocation ends: where it is, and where the next one continues after a stop, and after a kill."""

    at: Place
    testing: bool
    stopped: Place
    saved: Place


def budget(plan: Plan, hours: Hours, seconds: float, ensembles: float = 0.0) -> Budget:
    """An allocation of `seconds`. The speeds of all stages with something to train must be in `hours`; `ensembles`: seconds of
    their evaluation, after everything else."""
    parts = [_Part(plan.schedule, p, of_part(p, hours.speeds[p.stage.name])) for p in plan.work]
    job = _Job(parts, hours.opening, ensembles)
    first = Place(0, parts[0].planned.iter if parts else 0)
    end = _allocation(job, first, seconds) if job.total else None
    names = tuple(p.planned.label for p in parts)
    if end is None:
        return Budget(seconds=seconds, done=True, total=job.total, finished=names)
    allocations = _count(job, first, seconds, killed=False)
    killed_allocations = _count(job, first, seconds, killed=True)
    if end.at.number == len(parts):
        return Budget(
            seconds=seconds,
            done=False,
            total=job.total,
            finished=names,
            testing=True,
            allocations=allocations,
            killed_allocations=killed_allocations,
        )
    part, at = parts[end.at.number], end.at
    planned = part.planned
    position = planned.position + at.iter * planned.stage.solver.batch_size + planned.skipped
    saved_stage, saved_iter = _name(parts, end.saved)
    saved = end.saved.iter if end.saved.number == at.number else planned.iter
    return Budget(
        seconds=seconds,
        done=False,
        total=job.total,
        finished=names[: at.number],
        stage=planned.label,
        iter=at.iter,
        last=part.last,
        epoch=position / planned.stage.data.train.images,
        testing=end.testing,
        stop_iter=end.stopped.iter,
        saved_stage=saved_stage,
        saved_iter=saved_iter,
        lost=at.iter - saved,
        lost_seconds=part.way(saved, at.iter),
        allocations=allocations,
        killed_allocations=killed_allocations,
    )


def _name(parts: list[_Part], place: Place) -> tuple[str, int]:
    """The stage and the updates of the snapshot that `place` is; a stage that has none of its own starts from its parent's."""
    part = parts[place.number]
    stage = part.planned.stage
    return (stage.name, place.iter) if place.iter else (stage.parent or "", part.schedule.start_iter(stage))


def _allocation(job: _Job, place: Place, seconds: float) -> _End | None:
    """One that begins where `place` says; None if all is done at its end."""
    parts, room = job.parts, seconds - job.opening
    for number in range(place.number, len(parts)):
        part, first = parts[number], place.iter if number == place.number else parts[number].planned.iter
        here = Place(number, first)
        room -= part.speed.start
        if room < 0:
            return _End(here, first == part.last, here, here)
        if first < part.last:
            at, safe = part.reached(first, room), part.reached(first, room - part.speed.written)
            if safe < part.last:
                # A snapshot is written behind training: it counts when it is on disk.
                return _End(
                    Place(number, at), False, Place(number, max(first, safe)), Place(number, part.saved(first, safe))
                )
            room -= part.way(first, part.last) + part.speed.written
        room -= part.speed.test
        if room < 0:
            trained = Place(number, part.last)
            return _End(trained, True, trained, trained)
    after = Place(len(parts), 0)
    return None if room >= job.ensembles else _End(after, True, after, after)


def _count(job: _Job, first: Place, seconds: float, killed: bool) -> int | None:
    """How many allocations until all is done, each continuing where the last one was saved; None if one gets nowhere."""
    place, number = first, 1
    while (end := _allocation(job, place, seconds)) is not None:
        then = end.saved if killed else end.stopped
        if then == place:
            return None
        place, number = then, number + 1
        if number > MOST:
            break
    return number


def render_budget(found: Budget) -> str:
    """Where an allocation of that length ends, and what follows."""
    if not found.total:
        return "nothing is left to do in an allocation"
    if found.done:
        return f"an allocation of {duration(found.seconds)} is enough: all is done after {duration(found.total)}"
    done = f", after {', '.join(found.finished)}" if found.finished else ""
    ends = f"an allocation of {duration(found.seconds)} ends in"
    if found.testing:
        lines = [f"{ends} the evaluation of {found.stage or 'the ensembles'}{done}"]
        lines.append(f"  {f'{found.stage} is saved by then, and' if found.stage else 'which'} is evaluated again")
    else:
        lines = [f"{ends} {found.stage}, at iteration {found.iter} of {found.last} (epoch {found.epoch:.2f}){done}"]
        saved = f"{found.saved_stage} at {found.saved_iter}" if found.saved_stage else "the seed"
        lines.append(
            f"  asked to stop before (SIGTERM, SIGUSR1): saves {found.stage} at iteration {found.stop_iter}, and nothing is lost"
        )
        lines.append(
            f"  killed: the last snapshot by then is {saved}; {count(found.lost, 'iteration')}, "
            f"{duration(found.lost_seconds)}, are trained again"
            if found.saved_stage
            else f"  killed: there is no snapshot by then; it starts again from the seed, {duration(found.lost_seconds)} lost"
        )
    return "\n".join([*lines, f"  {_allocations(found)}"])


def _allocations(found: Budget) -> str:
    length = duration(found.seconds)
    if found.allocations is None:
        short = "too short for a start and what is next, an iteration and its snapshot or an evaluation"
        return f"with {length} each it gets nowhere: {short}"
    times = _number(found.allocations)
    text = f"{times} allocations of {length} in all: the same command goes on where the last one ended"
    if found.killed_allocations is None:
        return text + "; if each is killed, it never gets beyond its last snapshot: set a smaller `snapshot`"
    if found.killed_allocations != found.allocations:
        return text + f"; {_number(found.killed_allocations)} if each is killed"
    return text


def _number(allocations: int) -> str:
    return str(allocations) if allocations <= MOST else f"more than {MOST}"
