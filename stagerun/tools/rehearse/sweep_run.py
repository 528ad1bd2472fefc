"""The sweep in the workers: the stage's own updates from its own start, at rates that grow."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from stagerun import store
from stagerun.base.events import Iterated, NotFinite, Stopped
from stagerun.base.recipe import OnNan, Schedule
from stagerun.engine.loop import train
from stagerun.plan import PlannedStage, State
from stagerun.schedule import Knobs, make_knobs
from stagerun.tools.rehearse.sweep import Point, Smoothing
from stagerun.train.agreement import rank0
from stagerun.train.context import Context, StageRun
from stagerun.train.exchange import exchange_of, requests
from stagerun.train.resident import training_batches
from stagerun.train.restore import restored
from stagerun.train.snapshot_sizes import most_for
from stagerun.train.stage_loop import make_loop


def sweep(
    schedule: Schedule,
    context: Context,
    plan: Callable[[], PlannedStage],
    rates: Callable[[int], float],
    watch: Callable[[int, float, float], None],
) -> tuple[list[Point], str, str]:
    """Return the points, what the sweep started from, and why it ended early ('' where it didn't). Collective.

    The schedule of `context` is `swept`. Rank 0 alone asks `plan`, and calls `watch` with number, rate and smoothed loss. `rates` takes the
    iteration, which counts from 0, also where a `solverstate` gives weights, history and the place among the images."""
    found: list[tuple[PlannedStage, dict[str, bytes] | None]] = []

    def begin() -> list[int]:
        there = plan()
        found.append((there, _files(schedule, there, Path(context.out))))
        return [there.begins_at, there.stage.begins]

    comm, (stage,) = context.comm, context.schedule.stages
    begins_at, begins = rank0(comm, begin)
    start, files = (found[0][0].start, found[0][1]) if found else (None, None)
    planned = PlannedStage(stage=stage, state=State.FRESH, iter=0, position=begins_at, start=start)
    with context.open_images() as images:
        for _ in images.open(comm, context.world, context.stop):
            pass
        images.preflight(comm)
        run = StageRun(context, planned, files=files)
        smoothing = Smoothing()
        first = make_knobs(schedule.stage(stage.name).solver)(begins)
        ended = _sweep(run, lambda iter, drops=0: replace(first, lr=rates(iter)), smoothing, watch)
    return smoothing.points, _began(planned, begins), ended


def _began(planned: PlannedStage, begins: int) -> str:
    """What it started from, in words."""
    solver = planned.stage.solver
    if planned.start is not None:
        return planned.start.name
    if solver.solverstate is not None:
        return f"{solver.solverstate}: weights, history and images of iteration {begins}"
    return solver.start.file if solver.start is not None else f"seed {solver.random_seed}"


def _files(schedule: Schedule, planned: PlannedStage, out: Path) -> dict[str, bytes] | None:
    """The verified files of the snapshot that the stage starts from; None from the seed."""
    return (
        store.read(store.LocalDisk(), out, planned.start, most_for(schedule, planned))
        if planned.start is not None
        else None
    )


def _sweep(
    run: StageRun, knobs: Callable[..., Knobs], smoothing: Smoothing, watch: Callable[[int, float, float], None]
) -> str:
    """Why it ended early. All ranks have the same losses, and so end at the same iteration."""
    worker, solver = run.worker, run.stage.solver
    state = restored(run)
    exchange = exchange_of(state, solver, worker.schedule.determinism, worker.comm)
    loop = replace(make_loop(run), knobs=knobs, plateau=None, on_nan=OnNan.STOP, max_nan=0)
    asked_for = requests(loop, 0, solver.device_batch_size)
    with training_batches(run, None, asked_for) as fed:
        for event in train(loop, state, fed, exchange.make_reducer(), worker.stop):
            if isinstance(event, Stopped):
                return "it was interrupted"
            if isinstance(event, NotFinite):
                return f"{event.what} at a rate of {event.lr:.3g}"
            if isinstance(event, Iterated):
                diverged = smoothing.add(event.lr, event.loss)
                watch(event.iter, event.lr, smoothing.points[-1].smoothed)
                if diverged:
                    return f"the smoothed loss was 4 times its lowest at a rate of {event.lr:.3g}"
                if event.iter == solver.max_iter - 1:  # as `swept` says
                    break
    return ""
