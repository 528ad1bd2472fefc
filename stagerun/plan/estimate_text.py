"""A rehearsal's figures and what follows from them, as text. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stagerun.plan.estimate import Figures, StageTime, snapshots_on_disk
from stagerun.plan.plan import Plan
from stagerun.schedule.image_size import largest_crop_size
from stagerun.text import columns, count, duration, size

# Fewer timed iterations than this are worth a word: the four warm ones of one stage.
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


def seconds(value: float) -> str:
    """`0.0123 s`, `12.3 s`: three digits below a minute."""
    return f"{value:.3g} s" if value < 60 else duration(value)


def render_times(plan: Plan, times: Mapping[str, StageTime | None]) -> str:
    """The table, one line per stage that is not done, and the total."""
    rows: list[Sequence[str]] = [
        ("stage", "iterations", "passes", "iteration", "images/s", "training", "evaluation", "snapshots", "in all")
    ]
    known = [time for time in times.values() if time is not None]
    for name, time in times.items():
        if time is None:
            rows.append((name, *["?"] * 8))
            continue
        rows.append(
            (
                name,
                str(time.iterations),
                str(time.passes),
                seconds(time.iteration),
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
            str(plan.iterations_left),
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
    most = snapshots_on_disk(schedule)
    disk = most * figures.snapshot_bytes + plan.iterations * figures.log_bytes
    found = [
        Need(
            f"disk: {size(disk)} in {room.out} ({most} snapshots of {size(figures.snapshot_bytes)} at most, log "
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
