"""What a schedule will take in time, disk and memory, from what a rehearsal measured. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stagerun.plan.hours import Speed, stage_left, times
from stagerun.plan.plan import Plan, PlannedStage
from stagerun.plan.rehearsal import cost_key
from stagerun.recipe import Schedule, Solver, Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Seconds of one kind of stage (`cost_key`), on one worker among those of the rehearsal."""

    key: str
    stages: tuple[str, ...]  # in which it was measured
    iterations: int  # that it is the mean of
    device_batch_size: int
    pass_seconds: float  # forward and backward of one device batch, waiting for its images included
    update_seconds: float  # once per iteration: the rest of the reduction, the weight update
    test_batch_size: int
    test_seconds: float  # one batch of an evaluation; 0 without data.val
    start_seconds: float  # of a stage: reading the snapshot, building the network, the first and slowest iteration


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a rehearsal measured. Content of OUT/rehearsal.json."""

    schedule: str
    date: str  # YYYY-MM-DD HH:MM
    host: str
    device: str
    torch: str
    workers: int
    local_workers: int  # on rank 0's node
    threads: int
    synthetic: str  # what images were made up; '' for real ones
    costs: tuple[Cost, ...]
    snapshot_bytes: int
    snapshot_seconds: float  # until one is on disk
    blocked_seconds: float  # that training stands still for one
    memory_bytes: int  # of the largest worker, at its peak
    gpu_memory_bytes: int
    log_bytes: float  # per iteration


def figures_from(record: Mapping[str, object]) -> Figures:
    """The inverse of dataclasses.asdict. TypeError, KeyError for what was written by another version."""
    costs = record["costs"]
    if not isinstance(costs, list | tuple):
        raise TypeError("costs")
    made = tuple(Cost(**{**c, "stages": tuple(c["stages"])}) for c in costs)
    return Figures(**{**record, "costs": made})  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """Seconds of what is left of one stage. `passes`: forward passes of the busiest worker per iteration."""

    stage: str
    iterations: int
    passes: int
    iteration: float
    training: float
    tests: float
    snapshots: float
    start: float
    images_per_second: float

    @property
    def total(self) -> float:
        return self.training + self.tests + self.snapshots + self.start


def estimate(plan: Plan, figures: Figures, workers: int) -> dict[str, StageTime | None]:
    """For each stage that is not done, and each piece that is trained again, by label, what it will take on `workers` workers like
    those of the rehearsal; None for one of a kind that was not rehearsed. Traffic between more machines than were rehearsed on is
    not in it.
    """
    speeds = speeds_of(plan.schedule, figures, workers)
    return {
        planned.label: _stage(plan.schedule, planned, speeds.get(planned.stage.name), workers) for planned in plan.work
    }


def speeds_of(schedule: Schedule, figures: Figures, workers: int) -> dict[str, Speed]:
    """By name, how fast the stages go whose kind was rehearsed."""
    costs = {cost.key: cost for cost in figures.costs}
    kinds = {stage.name: costs.get(cost_key(schedule, stage.solver)) for stage in schedule.stages}
    return {
        stage.name: _speed(schedule, stage.solver, cost, figures, workers)
        for stage in schedule.stages
        if (cost := kinds[stage.name]) is not None
    }


def _speed(schedule: Schedule, solver: Solver, cost: Cost, figures: Figures, workers: int) -> Speed:
    val = schedule.data.val
    whole = one_test = 0.0
    if val is not None:
        # Averaged weights are evaluated beside the trained ones.
        batch = cost.test_seconds * solver.test_batch_size / cost.test_batch_size
        batch *= 1 if solver.ema_decay is None else 2
        whole = math.ceil(math.ceil(val.images / solver.test_batch_size) / workers) * batch
        one_test = whole if solver.test_iter is None else math.ceil(solver.test_iter / workers) * batch
    return Speed(
        iteration=passes_of(solver, workers) * _one_pass(solver, cost) + cost.update_seconds,
        start=cost.start_seconds,
        test=whole,
        inner_test=min(one_test, whole),
        blocked=figures.blocked_seconds,
        written=figures.snapshot_seconds,
    )


def pass_of(schedule: Schedule, solver: Solver, figures: Figures) -> tuple[float, float] | None:
    """Seconds of one device batch's forward and backward, and of an update; None for a kind of stage that was not rehearsed."""
    cost = next((c for c in figures.costs if c.key == cost_key(schedule, solver)), None)
    return None if cost is None else (_one_pass(solver, cost), cost.update_seconds)


def _one_pass(solver: Solver, cost: Cost) -> float:
    # A rehearsal with another device batch: as if time went with the images.
    return cost.pass_seconds * solver.device_batch_size / cost.device_batch_size


def passes_of(solver: Solver, workers: int) -> int:
    """Forward passes of the busiest worker per iteration."""
    return math.ceil(solver.logical_workers / workers)


def _stage(schedule: Schedule, planned: PlannedStage, speed: Speed | None, workers: int) -> StageTime | None:
    if speed is None:
        return None
    time, solver = stage_left(schedule, planned, speed), planned.stage.solver
    return StageTime(
        stage=planned.label,
        iterations=planned.iterations_left,
        passes=passes_of(solver, workers),
        iteration=speed.iteration,
        training=time.training,
        tests=time.tests,
        snapshots=time.snapshots,
        start=time.start,
        images_per_second=solver.batch_size / speed.iteration,
    )


def snapshots_on_disk(schedule: Schedule) -> int:
    """Most snapshots there are at one time: of each stage the newest, those that others start from and its end, and one that is being
    written."""

    def kept(stage: Stage) -> int:
        solver, branches = stage.solver, len(schedule.branch_points(stage.name))
        return min(schedule.keep_snapshots, 1 + times(0, solver.max_iter, solver.snapshot)) + branches + 1

    return sum(kept(s) for s in schedule.stages if s.enabled) + 1


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
