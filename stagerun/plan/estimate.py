"""How fast a schedule's stages go, by what a rehearsal measured, and how much it keeps on disk. Pure."""

import math
from dataclasses import dataclass

from stagerun.base.recipe import Schedule, Solver, Stage
from stagerun.base.text import count
from stagerun.plan.hours import Speed, times
from stagerun.plan.planned import Plan
from stagerun.plan.rehearsal import cost_key
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
    return {
        stage.name: _speed(stage, cost, figures, workers)
        for stage in schedule.stages
        if (cost := costs.get(cost_key(schedule, stage))) is not None
    }


def _speed(stage: Stage, cost: Cost, figures: Figures, workers: int) -> Speed:
    solver = stage.solver
    whole = one_test = 0.0
    for val in stage.data.val:
        # Averaged weights are evaluated beside the trained ones.
        batch = cost.test_seconds * solver.test_batch_size / cost.test_batch_size
        batch *= 1 if solver.ema_decay is None else 2
        passes = math.ceil(val.images / solver.test_batch_size)
        whole += math.ceil(passes / workers) * batch
        one_test += math.ceil(min(passes, solver.test_iter or passes) / workers) * batch
    # A rehearsal with another device batch: as if time went with the images.
    one_pass = cost.pass_seconds * solver.device_batch_size / cost.device_batch_size
    iteration = passes_of(solver, workers) * one_pass + cost.update_seconds
    if solver.asynchronous:  # what was measured is the time from one push to the next, of all who were there
        iteration *= figures.workers / workers
    return Speed(
        iteration=iteration,
        start=cost.start_seconds,
        test=whole,
        inner_test=min(one_test, whole),
        blocked=figures.blocked_seconds,
        written=figures.snapshot_seconds,
    )


def passes_of(solver: Solver, workers: int) -> int:
    """Forward passes of the busiest worker per iteration; one worker computes all of a push."""
    return solver.logical_workers if solver.asynchronous else math.ceil(solver.logical_workers / workers)


def snapshots_on_disk(schedule: Schedule) -> int:
    """Most snapshots there are at one time: of each stage the newest, those that others start from and its end, and one that is being
    written."""

    def kept(stage: Stage) -> int:
        solver, branches = stage.solver, len(schedule.branch_points(stage.name))
        return min(schedule.keep_snapshots, 1 + times(0, solver.max_iter, solver.snapshot)) + branches + 1

    return sum(kept(s) for s in schedule.stages if s.enabled) + 1


def averages_on_disk(schedule: Schedule) -> int:
    """The networks in OUT/averages: of each ensemble that makes one of its members' weights, and whose members are all trained."""
    off = {stage.name for stage in schedule.stages if not stage.enabled}
    return sum(e.rule.averages and off.isdisjoint(stage for stage, _ in e.points) for e in schedule.ensembles)


# Fewer timed iterations than this get a remark: the four warm ones of one stage.
FEW = 4


def doubts(plan: Plan, figures: Figures) -> list[str]:
    """What makes the estimate a rough one, one sentence each."""
    found = []
    fewest = min(cost.iterations for cost in figures.costs)
    if fewest < FEW:
        found.append(
            f"the times are means of {count(fewest, 'iteration')} only, of some stages: without --iters it takes more of them"
        )
    batches = {s.stage.name: s.stage.solver.device_batch_size for s in plan.stages}
    other = [c for c in figures.costs for s in c.stages if batches.get(s) != c.device_batch_size]
    if other:
        found.append(
            f"the device batch was {other[0].device_batch_size}: time is taken to go with the images, and memory is that of "
            "the smaller one"
        )
    growing = [s.stage for s in plan.stages if s.iterations_left and s.stage.solver.transform.crop_size_ramp]
    if growing:
        stages = ", ".join(f"`{s.name}` ({largest_crop_size(s.solver.transform)} pixels)" for s in growing)
        found.append(f"timed at their largest images, and faster where they are smaller: {stages}")
    return found
