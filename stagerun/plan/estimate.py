"""Estimates a schedule's time, disk and memory from what a rehearsal measured. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from stagerun.base.recipe import Schedule, Solver, Stage
from stagerun.base.text import between, columns, count, duration, size
from stagerun.plan.hours import Speed, Spent, stage_left, times
from stagerun.plan.plan import Plan, PlannedStage
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime(Spent):
    """Seconds of what is left of one stage. `passes`: forward passes of the busiest worker per iteration."""

    stage: str
    iterations: int
    passes: int
    iteration: float
    images_per_second: float


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
    kinds = {stage.name: costs.get(cost_key(schedule, stage)) for stage in schedule.stages}
    return {
        stage.name: _speed(stage, cost, figures, workers)
        for stage in schedule.stages
        if (cost := kinds[stage.name]) is not None
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
    iteration = passes_of(solver, workers) * _one_pass(solver, cost) + cost.update_seconds
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


def _one_pass(solver: Solver, cost: Cost) -> float:
    # A rehearsal with another device batch: as if time went with the images.
    return cost.pass_seconds * solver.device_batch_size / cost.device_batch_size


def passes_of(solver: Solver, workers: int) -> int:
    """Forward passes of the busiest worker per iteration; one worker computes all of a push."""
    return solver.logical_workers if solver.asynchronous else math.ceil(solver.logical_workers / workers)


def _stage(schedule: Schedule, planned: PlannedStage, speed: Speed | None, workers: int) -> StageTime | None:
    if speed is None:
        return None
    time, solver = stage_left(schedule, planned, speed), planned.stage.solver
    return StageTime(
        stage=planned.label,
        iterations=planned.iterations_left,
        passes=passes_of(solver, workers),
        iteration=speed.iteration,
        **asdict(time),
        images_per_second=solver.batch_size / speed.iteration,
    )


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


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


# -- as text

# Fewer timed iterations than this get a remark: the four warm ones of one stage.
FEW = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Bytes there are on this machine; None: not known."""

    out: str
    out_free: int
    memory: int
    gpu_memory: int | None
    scratch: str | None
    scratch_free: int | None
    data_bytes: int | None  # of the LMDBs, where they are
    scratch_reserve: int = 0  # of the scratch disk, stays free


@dataclass(frozen=True, slots=True)
class Need:
    """Something that may run out. `enough` None: can't be known."""

    text: str
    enough: bool | None


def render_times(plan: Plan, times: Mapping[str, StageTime | None]) -> str:
    """The table, one line per stage that is not done, and the total."""
    rows: list[Sequence[str]] = [
        ("stage", "iterations", "passes", "iteration", "images/s", "training", "evaluation", "snapshots", "in all")
    ]
    known = [time for time in times.values() if time is not None]
    iterations = {p.label: between(p.least_left, p.iterations_left) for p in plan.work}
    for name, time in times.items():
        if time is None:
            rows.append((name, *["?"] * 8))
            continue
        rows.append(
            (
                name,
                iterations.get(name, str(time.iterations)),
                str(time.passes),
                duration(time.iteration, ".3g"),
                f"{time.images_per_second:.3g}" if time.images_per_second < 100 else f"{time.images_per_second:.0f}",
                duration(time.training),
                duration(time.tests),
                duration(time.snapshots),
                duration(time.total),
            )
        )
    rows.append(
        (
            "total",
            between(plan.least_left, plan.iterations_left),
            "",
            "",
            "",
            duration(sum(t.training for t in known)),
            duration(sum(t.tests for t in known)),
            duration(sum(t.snapshots for t in known)),
            duration(sum(t.total for t in known)),
        )
    )
    return "\n".join(columns(rows))


def needs(plan: Plan, figures: Figures, room: Room) -> list[Need]:
    """What of disk and memory the schedule takes, against what there is."""
    schedule = plan.schedule
    most, averages = snapshots_on_disk(schedule), averages_on_disk(schedule)
    disk = most * figures.snapshot_bytes + averages * figures.average_bytes + plan.iterations * figures.log_bytes
    more = f"{count(averages, 'average')} of {size(figures.average_bytes)}, " if averages else ""
    found = [
        Need(
            f"disk: {size(disk)} in {room.out} ({most} snapshots of {size(figures.snapshot_bytes)} at most, {more}log "
            f"{size(plan.iterations * figures.log_bytes)}), {size(room.out_free)} free",
            disk <= room.out_free,
        ),
        Need(
            f"memory: {size(figures.memory_bytes)} per worker at its peak, {size(figures.local_workers * figures.memory_bytes)}"
            f" for {figures.local_workers} on this machine, which has {size(room.memory)}",
            figures.local_workers * figures.memory_bytes <= room.memory,
        ),
    ]
    if room.gpu_memory is not None:
        text = f"GPU memory: {size(figures.gpu_memory_bytes)} of {size(room.gpu_memory)}"
        found.append(Need(text, figures.gpu_memory_bytes <= room.gpu_memory))
    if room.scratch is not None:
        known = room.data_bytes is not None and room.scratch_free is not None
        data = size(room.data_bytes) if room.data_bytes is not None else "not on this machine"
        free = f"{size(room.scratch_free)} free" if room.scratch_free is not None else "no such folder here"
        enough = (room.data_bytes or 0) + room.scratch_reserve <= (room.scratch_free or 0) if known else None
        keep = f", of which {size(room.scratch_reserve)} stay so" if room.scratch_reserve else ""
        text = (
            f"scratch: the images ({data}) go to {room.scratch} of each node, {free}{keep}; copying was not rehearsed"
        )
        found.append(Need(text, enough))
    return found


def render_needs(found: Sequence[Need]) -> str:
    """One line each; those that don't suffice say so first."""
    mark = {True: "", False: "WOULD RUN OUT: ", None: "not known: "}
    return "\n".join(mark[need.enough] + need.text for need in found)


def caveats(plan: Plan, figures: Figures, workers: int) -> list[str]:
    """What the estimate leaves out or takes for granted, one sentence each."""
    found = []
    if any(s.stage.solver.logical_workers > workers for s in plan.stages):
        found.append(
            "one device batch per worker and iteration was run; the other passes of an iteration are extrapolated from it, "
            "with their memory the same"
        )
    found += doubts(plan, figures)
    if workers != figures.workers:
        found.append(
            f"{workers} workers are taken to be as fast as the {figures.workers} of the rehearsal; traffic between more "
            "machines is not in it"
        )
    if figures.synthetic:
        found.append(
            f"the images were synthetic ({figures.synthetic}) and lay in memory: of another size or kind, or on a slow disk, they "
            "take another time"
        )
    found.append(
        "a few iterations, at learning rates that are scaled down where the batch is smaller: that says nothing about accuracy"
    )
    return found


def doubts(plan: Plan, figures: Figures) -> list[str]:
    """What makes the estimate a rough one, one sentence each."""
    found = []
    fewest = min(cost.iterations for cost in figures.costs)
    if fewest < FEW:
        found.append(
            f"the times are means of {count(fewest, 'iteration')} only, of some stages: without --iters it takes more of them"
        )
    other = [c for c in figures.costs for s in c.stages if _device_batch(plan, s) != c.device_batch_size]
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


def _device_batch(plan: Plan, stage: str) -> int | None:
    return next((s.stage.solver.device_batch_size for s in plan.stages if s.stage.name == stage), None)
