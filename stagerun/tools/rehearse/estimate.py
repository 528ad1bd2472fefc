"""What a rehearsal says of the whole run: the time of each stage, and what it takes of disk and memory. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from stagerun.base.recipe import Schedule
from stagerun.base.text import between, columns, count, duration, size
from stagerun.plan import Plan, PlannedStage
from stagerun.plan.hours import Speed, Spent, stage_left
from stagerun.plan.rehearsal import Figures, averages_on_disk, doubts, passes_of, snapshots_on_disk, speeds_of


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
    iterations = {p.label: between(p.least_left, p.iterations_left) for p in plan.work}
    for name, time in times.items():
        if time is None:
            rows.append((name, *["?"] * 8))
            continue
        rate = f"{time.images_per_second:{'.3g' if time.images_per_second < 100 else '.0f'}}"
        how_fast = str(time.passes), duration(time.iteration, ".3g"), rate
        rows.append((name, iterations.get(name, str(time.iterations)), *how_fast, *_durations(time)))
    whole = sum(filter(None, times.values()), Spent())
    rows.append(("total", between(plan.least_left, plan.iterations_left), "", "", "", *_durations(whole)))
    return "\n".join(columns(rows))


def _durations(time: Spent) -> list[str]:
    return [duration(seconds) for seconds in (time.training, time.tests, time.snapshots, time.total)]


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
