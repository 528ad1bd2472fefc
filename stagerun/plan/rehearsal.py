"""What a rehearsal measured, and how fast the whole schedule then goes. Pure."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from stagerun.base.recipe import Schedule, Solver, Stage
from stagerun.plan.hours import Speed, cost_key, times
from stagerun.plan.planned import Plan
from stagerun.schedule.image_size import largest_crop_size


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
    average_bytes: int = 0  # of the network of an ensemble that averages weights


def speeds_of(schedule: Schedule, figures: Figures, workers: int) -> dict[str, Speed]:
    """By name, how fast the stages go whose kind was rehearsed."""
    costs = {cost.key: cost for cost in figures.costs}
    found = ((stage, costs.get(cost_key(schedule, stage))) for stage in schedule.stages)
    return {stage.name: _speed(stage, cost, figures, workers) for stage, cost in found if cost is not None}


def _speed(stage: Stage, cost: Cost, figures: Figures, workers: int) -> Speed:
    solver = stage.solver
    # Averaged weights are evaluated beside the trained ones.
    batch = cost.test_seconds * solver.test_batch_size / cost.test_batch_size * (1 if solver.ema_decay is None else 2)
    passes = [math.ceil(val.images / solver.test_batch_size) for val in stage.data.val]
    whole = sum(math.ceil(number / workers) * batch for number in passes)
    inside = sum(math.ceil(min(number, solver.test_iter or number) / workers) * batch for number in passes)
    # A rehearsal with another device batch: as if time went with the images.
    one_pass = cost.pass_seconds * solver.device_batch_size / cost.device_batch_size
    iteration = passes_of(solver, workers) * one_pass + cost.update_seconds
    if solver.asynchronous:  # what was measured is the time from one push to the next, of all who were there
        iteration *= figures.workers / workers
    return Speed(
        iteration=iteration,
        start=cost.start_seconds,
        test=whole,
        inner_test=min(inside, whole),
        blocked=figures.blocked_seconds,
        written=figures.snapshot_seconds,
    )


def passes_of(solver: Solver, workers: int) -> int:
    """Forward passes of the busiest worker per iteration; one worker computes all of a push."""
    return solver.logical_workers if solver.asynchronous else math.ceil(solver.logical_workers / workers)


def doubts(plan: Plan, figures: Figures) -> Iterator[str]:
    """What makes the estimate a rough one, one sentence each."""
    batches = {s.name: s.stage.solver.device_batch_size for s in plan.stages}
    other = [c for c in figures.costs for s in c.stages if batches.get(s) != c.device_batch_size]
    if other:
        batch = f"the device batch was {other[0].device_batch_size}"
        yield f"{batch}: time is taken to go with the images, and memory is that of the smaller one"
    growing = [s.stage for s in plan.stages if s.iterations_left and s.stage.solver.transform.crop_size_ramp]
    if growing:
        stages = ", ".join(f"`{s.name}` ({largest_crop_size(s.solver.transform)} pixels)" for s in growing)
        yield f"timed at their largest images, and faster where they are smaller: {stages}"


# -- what it keeps on disk


def snapshots_on_disk(schedule: Schedule) -> int:
    """Most snapshots there are at one time: of each stage the newest, those that others start from and its end, and one that is being
    written."""

    most = 1
    for stage in (stage for stage in schedule.stages if stage.enabled):
        due = times(0, stage.solver.max_iter, stage.solver.snapshot)
        most += min(schedule.keep_snapshots, 1 + due) + len(schedule.branch_points(stage.name)) + 1
    return most


def averages_on_disk(schedule: Schedule) -> int:
    """The networks in OUT/averages: of each ensemble that makes one of its members' weights, and whose members are all trained."""
    off = {stage.name for stage in schedule.stages if not stage.enabled}
    return sum(e.averages and off.isdisjoint(stage for stage, _ in e.points) for e in schedule.ensembles)
