"""The results of a rehearsal, and the estimate for the whole schedule. Pure."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from stagerun.base.recipe import Schedule, Solver, Stage
from stagerun.plan.hours import Speed, cost_key, times
from stagerun.plan.planned import Plan
from stagerun.schedule.image_size import largest_crop_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Seconds of one kind of stage (`cost_key`), on one worker of the rehearsal."""

    key: str
    stages: tuple[str, ...]  # the measured ones
    iterations: int  # in the mean
    device_batch_size: int
    pass_seconds: float  # forward and backward of one device batch, including the wait for its images
    update_seconds: float  # once per iteration: the rest of the reduction, the weight update
    test_batch_size: int
    test_seconds: float  # one batch of an evaluation; 0 without data.val
    start_seconds: float  # of a stage: reading the snapshot, building the network, the first and slowest iteration


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The results of a rehearsal: the content of OUT/rehearsal.json."""

    schedule: str
    date: str  # YYYY-MM-DD HH:MM
    host: str
    device: str
    torch: str
    workers: int
    local_workers: int  # on rank 0's node
    threads: int
    synthetic: str  # the made-up images; '' for real ones
    costs: tuple[Cost, ...]
    snapshot_bytes: int
    snapshot_seconds: float  # until a snapshot is on disk
    blocked_seconds: float  # that training waits for a snapshot
    memory_bytes: int  # of the largest worker, at its peak
    gpu_memory_bytes: int
    log_bytes: float  # per iteration
    average_bytes: int = 0  # of the network of an ensemble that averages weights


def speeds_of(schedule: Schedule, figures: Figures, workers: int) -> dict[str, Speed]:
    """Return the speeds, by name, of the stages whose kind was rehearsed."""
    costs = {cost.key: cost for cost in figures.costs}
    pairs = ((stage, costs.get(cost_key(schedule, stage))) for stage in schedule.stages)
    return {stage.name: _speed(stage, cost, figures, workers) for stage, cost in pairs if cost is not None}


def _speed(stage: Stage, cost: Cost, figures: Figures, workers: int) -> Speed:
    solver = stage.solver
    # Averaged weights are evaluated in addition to the trained ones.
    batch = cost.test_seconds * solver.test_batch_size / cost.test_batch_size * (1 if solver.ema_decay is None else 2)
    passes = [math.ceil(val.images / solver.test_batch_size) for val in stage.data.val]
    whole = sum(math.ceil(number / workers) * batch for number in passes)
    inside = sum(math.ceil(min(number, solver.test_iter or number) / workers) * batch for number in passes)
    # A rehearsal with another device batch: assume that time is proportional to the images.
    one_pass = cost.pass_seconds * solver.device_batch_size / cost.device_batch_size
    iteration = passes_of(solver, workers) * one_pass + cost.update_seconds
    if solver.asynchronous:  # the rehearsal measured the time from one push to the next, of all its workers
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
    """Return the forward passes of the busiest worker per iteration; one worker computes all of a push."""
    return solver.logical_workers if solver.asynchronous else math.ceil(solver.logical_workers / workers)


def doubts(plan: Plan, figures: Figures) -> Iterator[str]:
    """Yield the reasons why the estimate is rough, one sentence each."""
    batches = {s.name: s.stage.solver.device_batch_size for s in plan.stages}
    other = [c for c in figures.costs for s in c.stages if batches.get(s) != c.device_batch_size]
    if other:
        batch = f"the device batch was {other[0].device_batch_size}"
        yield f"{batch}: time is assumed proportional to the images, and memory is for the smaller batch"
    growing = [s.stage for s in plan.stages if s.iterations_left and s.stage.solver.transform.crop_size_ramp]
    if growing:
        stages = ", ".join(f"`{s.name}` ({largest_crop_size(s.solver.transform)} pixels)" for s in growing)
        yield f"timed at their largest images, and faster where they are smaller: {stages}"


# -- disk


def snapshots_on_disk(schedule: Schedule) -> int:
    """Return the most snapshots on disk at one time: each stage's newest ones, its branch points and its end, and one being written."""
    most = 1
    for stage in (stage for stage in schedule.stages if stage.enabled):
        due = times(0, stage.solver.max_iter, stage.solver.snapshot)
        most += min(schedule.keep_snapshots, 1 + due) + len(schedule.branch_points(stage.name)) + 1
        most += 1 if schedule.best_of(stage.name) else 0
    return most


def averages_on_disk(schedule: Schedule) -> int:
    """Return the number of networks in OUT/averages: one per ensemble that averages weights, if all its members are enabled."""
    off = {stage.name for stage in schedule.stages if not stage.enabled}
    return sum(e.averages and off.isdisjoint(stage for stage, _ in e.points) for e in schedule.ensembles)
