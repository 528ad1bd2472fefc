"""Runs the whole schedule with a handful of iterations, through the code of a real run: does it work, and what will it cost?"""

import json
import math
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch

from stagerun.base.events import (
    EnsembleTested,
    Event,
    Iterated,
    RunStarted,
    SnapshotWritten,
    StageFinished,
    StageStarted,
    Stopped,
    Tested,
)
from stagerun.base.recipe import Schedule
from stagerun.comm import Comm, gather_json
from stagerun.plan.hours import cost_key
from stagerun.plan.rehearsal import Cost, Figures, passes_of
from stagerun.store import LocalDisk, inventory
from stagerun.store.layout import averages_folder
from stagerun.system.host import host_name
from stagerun.system.world import World
from stagerun.tools.rehearse.schedule import rehearsal
from stagerun.tools.rehearse.synthetic import make_images, synthetic_images, with_synthetic
from stagerun.train.agreement import everyone, rank0
from stagerun.train.context import Context
from stagerun.train.keeper import Keeper
from stagerun.train.run import run

# Where the number of iterations isn't given: at least this many, and as many as take this long for each stage. Short
# iterations vary much, and the first few are fed by batches made ahead.
LEAST_ITERS, MOST_ITERS, STAGE_SECONDS = 5, 400, 5.0
# Iterations of the first stage before it is stopped and resumed.
BEFORE_STOP = 3


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What was asked for. `iters` None: LEAST_ITERS, or more where they are short."""

    iters: int | None
    device_batch: int | None
    synthetic: bool


@dataclass(slots=True)
class Measured:
    """What the events of a stage's rehearsal say. The first iteration after each start counts separately: it is slow."""

    warm: list[Iterated] = field(default_factory=list)
    cold: list[Iterated] = field(default_factory=list)
    tests: list[Tested] = field(default_factory=list)  # those at the stage's end; one in the middle went before
    snapshots: list[SnapshotWritten] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)  # seconds from the stage's beginning to the end of that iteration


class Observer:
    """Takes the events of a run, on each rank alike."""

    def __init__(self) -> None:
        self.stages: dict[str, Measured] = {}
        self.since = time.monotonic()
        self.cold = True
        self.max_iter = 0
        self.iterated = 0
        self.stopped: Stopped | None = None

    def __call__(self, event: Event) -> None:
        match event:
            case RunStarted():
                self.since, self.stopped = time.monotonic(), None
            case StageStarted():
                self.stages.setdefault(event.stage, Measured())
                self.cold, self.max_iter = True, event.max_iter
            case Iterated():
                self._iterated(self.stages[event.stage], event)
            case Tested() if event.iter == self.max_iter:
                self.stages[event.stage].tests.append(event)
            case SnapshotWritten():
                self.stages[event.stage].snapshots.append(event)
            case StageFinished() | EnsembleTested():
                self.since = time.monotonic()
            case Stopped():
                self.stopped = event

    def _iterated(self, stage: Measured, event: Iterated) -> None:
        self.iterated += 1
        if self.cold:
            stage.cold.append(event)
            stage.starts.append(time.monotonic() - self.since)
            self.cold = False
        else:
            stage.warm.append(event)


@contextmanager
def made_up_images(schedule: Schedule, synthetic: bool, comm: Comm, world: World) -> Iterator[Schedule]:
    """The schedule with synthetic images, made in a temporary folder of each node and removed at the end; or as it is."""
    if not synthetic:
        yield schedule
        return
    # The same name on every node, which no other rehearsal has.
    name = rank0(comm, lambda: f"stagerun-rehearsal-{os.getuid()}-{os.urandom(8).hex()}")
    folder = Path(tempfile.gettempdir()) / name
    try:
        everyone(comm, lambda: make_images(schedule, folder) if world.local_rank == 0 else None)
        yield with_synthetic(schedule, folder)
    finally:
        if world.local_rank == 0:
            shutil.rmtree(folder, ignore_errors=True)  # processes that have it open keep what they opened


def rehearse(
    schedule: Schedule,
    asked: Rehearsal,
    folder: Path,
    comm: Comm,
    world: World,
    device: torch.device,
    stop: Callable[[], bool],
    watch: Callable[[Event], None],
) -> Figures | None:
    """Rehearses in `folder`, which is emptied. Collective; the Figures on every rank, None if asked to stop.

    It runs some iterations of the first stage, stops as a signal would stop it, and resumes from the snapshot; then come
    the rest and the other stages. `watch` sees the events, on rank 0.
    """
    with made_up_images(schedule, asked.synthetic, comm, world) as source:
        observer = Observer()
        begins = next(stage for stage in schedule.stages if stage.enabled)
        first, whole = first_life(asked.iters, begins.solver.max_iter)

        def live(iters: int, test_iter: int, stop: Callable[[], bool], test_inside: bool = True) -> None:
            short = rehearsal(source, iters, comm.size, asked.device_batch, test_inside)
            keeper = _open(short, folder, comm)
            try:
                context = Context(short, str(folder), comm, world, device, keeper, stop, final_test_iter=test_iter)
                for event in run(context):
                    observer(event)
                    if comm.rank == 0:
                        watch(event)
            finally:
                if keeper is not None:
                    keeper.close()

        # A worker asks `stop` before its own iteration is counted; all count alike, so all stop at the same one. No evaluation
        # inside, which asks, too.
        if first:
            ahead = 0 if begins.solver.asynchronous else 1  # pushes are counted before it asks
            live(whole, comm.size, lambda: stop() or observer.iterated + ahead >= first, test_inside=False)
            if observer.stopped is None or observer.stopped.iter < first:  # beyond it, pushes were under way (`ASYNC`)
                return None
        iters = asked.iters or rank0(comm, lambda: _enough(observer))
        live(iters, comm.size * max(2, iters // 10), stop)
        if observer.stopped is not None:
            return None
        average = rank0(comm, lambda: _average_bytes(source, folder))
        figures = _figures(schedule, asked, observer, comm, world, device)
        return replace(figures, average_bytes=average)


def _average_bytes(schedule: Schedule, folder: Path) -> int:
    """The bytes of the largest network that an ensemble has left in OUT/averages."""
    roots = (averages_folder(folder) / ensemble.name for ensemble in schedule.ensembles)
    return max((ref.bytes for root in roots for ref in inventory(LocalDisk(), root).snapshots), default=0)


def first_life(iters: int | None, max_iter: int) -> tuple[int, int]:
    """(iterations of the first stage before it is stopped, `iters` of the schedule as it is cut for that), the stage having
    `max_iter`. 0: it is too short to be stopped inside.

    What starts from its midst starts at the same place in both lives, or the second has that before it: else it would train a
    piece of the first again.
    """
    if iters is not None:
        return min(iters // 2, max_iter - 1), iters
    # The second life has LEAST_ITERS or more: its place is that of the first, or no nearer to the start than the stop.
    return min(BEFORE_STOP, max_iter - 1), LEAST_ITERS


def _open(schedule: Schedule, folder: Path, comm: Comm) -> Keeper | None:
    keeper = Keeper(schedule, folder) if comm.rank == 0 else None
    rank0(comm, lambda: keeper.open() if keeper is not None else None)
    return keeper


def _enough(observer: Observer) -> int:
    """Iterations that fill STAGE_SECONDS, from those done so far."""
    done = next(iter(observer.stages.values()), None)
    if done is None:
        return LEAST_ITERS
    seconds = mean([i.seconds for i in done.warm or done.cold])
    return min(MOST_ITERS, max(LEAST_ITERS, round(STAGE_SECONDS / max(seconds, 1e-6))))


def _figures(
    schedule: Schedule, asked: Rehearsal, observer: Observer, comm: Comm, world: World, device: torch.device
) -> Figures:
    memory = _memory(comm, device)
    stages = observer.stages.values()
    written = [snapshot for stage in stages for snapshot in stage.snapshots]
    iterated = next((event for stage in stages for event in stage.cold), None)  # none where others made all pushes
    line = {"time": round(time.time(), 3), "event": "Iterated", **(asdict(iterated) if iterated else {})}
    return Figures(
        schedule=schedule.name,
        date=time.strftime("%Y-%m-%d %H:%M"),
        host=host_name(),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        torch=torch.__version__,
        workers=comm.size,
        local_workers=world.local_size,
        threads=torch.get_num_threads(),
        synthetic=str(synthetic_images(schedule)) if asked.synthetic else "",
        costs=tuple(costs(schedule, asked, observer, comm.size)),
        snapshot_bytes=max((s.bytes for s in written), default=0),
        snapshot_seconds=mean([s.seconds for s in written]),
        blocked_seconds=mean([s.blocked_seconds for s in written]),
        memory_bytes=memory[0],
        gpu_memory_bytes=memory[1],
        log_bytes=len(json.dumps(line)) + 1,
    )


def _memory(comm: Comm, device: torch.device) -> tuple[int, int]:
    """Bytes of main and of GPU memory that the largest worker had at its peak. Collective."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # kilobytes on Linux
    gpu = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0
    all_peaks = gather_json(comm, [peak, gpu])
    return max(p[0] for p in all_peaks), max(p[1] for p in all_peaks)


def costs(schedule: Schedule, asked: Rehearsal, observer: Observer, workers: int) -> Iterator[Cost]:
    """One Cost for each kind of stage, the mean over the stages of that kind."""
    short = rehearsal(schedule, LEAST_ITERS, workers, asked.device_batch)  # its batches are those that were run
    kinds: dict[str, list[str]] = {}
    for stage in (s for s in schedule.stages if s.enabled):
        kinds.setdefault(cost_key(schedule, stage), []).append(stage.name)
    for key, names in kinds.items():
        measured = [observer.stages[name] for name in names]
        timed = [i for m in measured for i in m.warm] or [i for m in measured for i in m.cold]
        solver = short.stage(names[0]).solver

        def one_test(tested: Tested, test_size: int = solver.test_batch_size) -> float:
            batches = math.ceil(tested.images / test_size)
            return tested.seconds / math.ceil(batches / workers)

        yield Cost(
            key=key,
            stages=tuple(names),
            iterations=len(timed),
            device_batch_size=solver.device_batch_size,
            pass_seconds=mean([i.seconds - i.update_seconds for i in timed]) / passes_of(solver, workers),
            update_seconds=mean([i.update_seconds for i in timed]),
            test_batch_size=solver.test_batch_size,
            test_seconds=mean([one_test(t) for m in measured for t in m.tests]),
            start_seconds=mean([s for m in measured for s in m.starts]),
        )


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
