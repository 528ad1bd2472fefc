"""Every stage for a few iterations: how long the real run takes, and what of disk and memory."""

import json
import math
import resource
import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from stagerun import store
from stagerun.base.events import (
    EnsembleTested,
    Event,
    Iterated,
    Note,
    RunStarted,
    SnapshotWritten,
    StageFinished,
    StageStarted,
    Tested,
)
from stagerun.base.recipe import Schedule, Solver
from stagerun.base.text import count, duration, size
from stagerun.comm import gather_json
from stagerun.plan import Plan
from stagerun.plan.hours import cost_key
from stagerun.plan.rehearsal import Cost, Figures, averages_on_disk, passes_of, snapshots_on_disk
from stagerun.system.host import host_name, whole_memory
from stagerun.tools.forecast import hours_blocks
from stagerun.tools.output import plan_of
from stagerun.tools.rehearse.frame import Answer, Session
from stagerun.tools.rehearse.schedule import part_of, rehearsal, synthetic_images
from stagerun.train.agreement import rank0
from stagerun.train.results import figures_file

# Without --iters: at least this many, and as many as take the first stage this long. Short iterations vary much, and the first few are fed by
# batches made ahead.
LEAST_ITERS, MOST_ITERS, STAGE_SECONDS = 5, 400, 5.0
_NOTES = """
note: one device batch per worker and iteration was run; the other passes of an iteration are extrapolated, with their memory the same
note: a few iterations, at learning rates that are scaled down where the batch is smaller: that says nothing about accuracy"""


@dataclass(slots=True)
class Measured:
    """The events of a run. A stage's first iteration is slow and counts separately; evaluations count at a stage's end alone."""

    warm: list[Iterated] = field(default_factory=list)
    cold: list[Iterated] = field(default_factory=list)
    tests: list[Tested] = field(default_factory=list)
    snapshots: list[SnapshotWritten] = field(default_factory=list)
    starts: list[tuple[str, float]] = field(default_factory=list)  # stage; seconds to the end of its first iteration


def rehearse(session: Session) -> Answer:
    comm, options, (whole, schedule) = session.comm, session.options, session.read()
    first = next(stage for stage in schedule.stages if stage.enabled)
    session.show(f"rehearsing {whole.name}: {count(comm.size, 'worker')} on {session.device}")
    out, iters = session.options.output(whole), options.iters
    with session.images(schedule, options.synthetic) as source, session.folder(comm, out) as folder:

        def trained(of: Schedule, name: str, iters: int) -> Measured:
            short = rehearsal(of, iters, comm.size, options.device_batch)
            tested = comm.size * max(2, iters // 10)
            return measured(session, session.train(short, folder / name, comm, tested=tested))

        if iters is None:
            seen = trained(part_of(source, [first.name]), "first", LEAST_ITERS)
            seconds = rank0(comm, lambda: mean([one.seconds for one in seen.warm or seen.cold]))
            iters = min(MOST_ITERS, max(LEAST_ITERS, round(STAGE_SECONDS / max(seconds, 1e-6))))
        figures = figures_of(session, schedule, trained(source, "all", iters))
    return Answer(*rank0(comm, lambda: _answer(session, whole, figures)))


def measured(session: Session, events: Iterable[Event]) -> Measured:
    """Sort the events as they happen, and show the most important."""
    seen, since, cold, last = Measured(), 0.0, True, 0
    for event in events:
        match event:
            case RunStarted() | StageFinished() | EnsembleTested():
                since = time.monotonic()
            case StageStarted():
                cold, last = True, event.max_iter
                session.show(f"  {event.stage}: iterations {event.iter} to {last}, from {event.start}")
            case Iterated() if cold:
                seen.cold.append(event)
                seen.starts.append((event.stage, time.monotonic() - since))
                cold = False
            case Iterated():
                seen.warm.append(event)
            case Tested() if event.iter == last:
                seen.tests.append(event)
                session.show(f"  {event.stage}: evaluated {event.images} images in {duration(event.seconds)}")
            case SnapshotWritten():
                seen.snapshots.append(event)
            case Note(warning=True):
                session.show(f"  warning: {event.text}")
    return seen


def figures_of(session: Session, schedule: Schedule, seen: Measured) -> Figures:
    """Collective."""
    comm, device, options, written = session.comm, session.device, session.options, seen.snapshots
    cuda = device.type == "cuda"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # kilobytes on Linux
    peaks = gather_json(comm, [peak, torch.cuda.max_memory_reserved(device) if cuda else 0])
    line = {"time": round(time.time(), 3), "event": "Iterated", **(asdict(seen.cold[0]) if seen.cold else {})}
    kinds: dict[str, list[str]] = {}
    for stage in schedule.stages:
        if stage.enabled:
            kinds.setdefault(cost_key(schedule, stage), []).append(stage.name)
    short = rehearsal(schedule, LEAST_ITERS, comm.size, options.device_batch)  # for the sizes of batches
    return Figures(
        schedule=schedule.name,
        date=time.strftime("%Y-%m-%d %H:%M"),
        host=host_name(),
        device=torch.cuda.get_device_name(device) if cuda else "cpu",
        torch=torch.__version__,
        workers=comm.size,
        local_workers=session.world.local_size,
        threads=torch.get_num_threads(),
        synthetic="{} x {}".format(*synthetic_images(schedule)) if options.synthetic else "",
        costs=tuple(_cost(key, names, short.stage(names[0]).solver, seen, comm.size) for key, names in kinds.items()),
        snapshot_bytes=max((one.bytes for one in written), default=0),
        snapshot_seconds=mean([one.seconds for one in written]),
        blocked_seconds=mean([one.blocked_seconds for one in written]),
        memory_bytes=max(memory for memory, _ in peaks),
        gpu_memory_bytes=max(gpu for _, gpu in peaks),
        log_bytes=len(json.dumps(line)) + 1,
    )


def _cost(key: str, names: Sequence[str], solver: Solver, seen: Measured, workers: int) -> Cost:
    """Return the mean over stages of one kind. `solver`: as rehearsed."""
    timed = [one for one in seen.warm if one.stage in names] or [one for one in seen.cold if one.stage in names]
    tests = [one for one in seen.tests if one.stage in names]
    batches = sum(math.ceil(math.ceil(one.images / solver.test_batch_size) / workers) for one in tests)
    update = mean([one.update_seconds for one in timed])
    return Cost(
        key=key,
        stages=tuple(names),
        iterations=len(timed),
        device_batch_size=solver.device_batch_size,
        pass_seconds=(mean([one.seconds for one in timed]) - update) / passes_of(solver, workers),
        update_seconds=update,
        test_batch_size=solver.test_batch_size,
        test_seconds=sum(one.seconds for one in tests) / max(1, batches),
        start_seconds=mean([seconds for stage, seconds in seen.starts if stage in names]),
    )


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _answer(session: Session, whole: Schedule, figures: Figures) -> Answer:
    """Leave the figures for `plan`, and show what `plan` makes of them. StorageError, PermissionDenied."""
    out = session.options.output(whole)
    store.write_atomic(store.LocalDisk(), figures_file(out), json.dumps(asdict(figures)).encode())
    plan = plan_of(whole, out)
    hours, record = hours_blocks(plan, out)
    needed = needs(plan, figures, out)
    lines = [text if enough else f"WOULD RUN OUT: {text}" for text, enough in needed]
    record |= {"figures": asdict(figures), "needs": [{"text": t, "enough": e} for t, e in needed]}
    return Answer(record, "\n".join(["", *filter(None, hours), "", *lines]) + _NOTES)


def needs(plan: Plan, figures: Figures, out: Path) -> list[tuple[str, bool]]:
    """Say what the schedule takes of disk and memory, of how much, and whether that is enough. An average of an ensemble counts as a snapshot."""
    snapshots = snapshots_on_disk(plan.schedule) + averages_on_disk(plan.schedule)
    log, free, memory = plan.iterations * figures.log_bytes, shutil.disk_usage(out).free, whole_memory()
    disk = snapshots * figures.snapshot_bytes + log
    parts = f"{snapshots} snapshots of {size(figures.snapshot_bytes)} at most, log {size(log)}"
    workers = figures.local_workers * figures.memory_bytes
    each = f"memory: {size(figures.memory_bytes)} per worker at its peak, {size(workers)} for {figures.local_workers}"
    rows = [
        (f"disk: {size(disk)} in {out} ({parts}), {size(free)} free", disk <= free),
        (f"{each} on this machine, which has {size(memory)}", workers <= memory),
    ]
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0).total_memory
        rows.append((f"GPU memory: {size(figures.gpu_memory_bytes)} of {size(gpu)}", figures.gpu_memory_bytes <= gpu))
    return rows
