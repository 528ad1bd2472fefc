"""The start of a stage: its state, its loop, its exchange of gradients, and the events that report them."""

from collections.abc import Generator
from dataclasses import dataclass

from stagerun.base.events import Event, Note, PieceStarted, StageStarted
from stagerun.base.recipe import EMA
from stagerun.engine.codec import decode, encode
from stagerun.engine.loop import StageLoop
from stagerun.engine.state import TrainState
from stagerun.plan import State
from stagerun.plan.render import carried_over, weights_name
from stagerun.train.averaging import averaged_start
from stagerun.train.context import StageRun
from stagerun.train.environment import promise
from stagerun.train.exchange import Exchange, exchange_of
from stagerun.train.network_trial import look_at
from stagerun.train.objective import objective
from stagerun.train.progress import AVERAGE, WEIGHTS
from stagerun.train.restore import restored
from stagerun.train.stage_loop import make_loop


@dataclass(frozen=True, slots=True)
class Started:
    """`bits`: the environment that the bits of the stage depend on."""

    state: TrainState
    loop: StageLoop
    exchange: Exchange
    bits: dict[str, str]


def start_stage(run: StageRun) -> Generator[Event, None, Started | None]:
    """Start the stage. Collective. None after a Stopped."""
    worker, stage = run.worker, run.stage
    for text in look_at(run):
        yield Note(text=text)
    if stage.average is not None and run.planned.state is State.FRESH:
        files = yield from averaged_start(run)
        if files is None:
            return None
        run.files = files or None
    elif stage.parent_at == EMA and run.planned.state is State.FRESH and run.files is not None:
        averaged = encode(
            decode(run.files[WEIGHTS]) | decode(run.files[AVERAGE])
        )  # counts of iterations have no average
        run.files = {**run.files, WEIGHTS: averaged}
    state, bits = restored(run), worker.environment(stage)
    exchange = exchange_of(state, stage.solver, worker.schedule.determinism, worker.comm)
    yield _started(run, exchange)
    if run.weights_table:
        yield Note(text=run.weights_table)
    loop = make_loop(run, objective(run))
    if not (yield from exchange.begin(run, loop)):
        return None
    same = promise(worker.schedule, run.planned, bits, run.replays)
    if same and (same.warning or run.rollbacks is None):
        yield same
    return Started(state, loop, exchange, bits)


def _started(run: StageRun, exchange: Exchange) -> StageStarted | PieceStarted:
    stage, solver, planned = run.stage, run.stage.solver, run.planned
    start = planned.start.name if planned.start else f"seed {solver.random_seed}"
    if planned.until is not None:
        return PieceStarted(
            stage=stage.name,
            iter=planned.iter,
            until=planned.until,
            start=start,
            children=planned.children,
            iterations_left=run.iterations_left,
        )
    weights = "" if planned.start or stage.parent else weights_name(stage)
    if planned.state is State.FRESH and stage.average is not None:
        weights = stage.average
    return StageStarted(
        stage=stage.name,
        number=run.number,
        iter=planned.iter,
        max_iter=solver.max_iter,
        start=start,
        batch_size=solver.batch_size,
        device_batch_size=solver.device_batch_size,
        carried_over=carried_over(planned) if stage.parent else "",
        iterations_left=run.iterations_left,
        train_seconds=run.seconds,
        dense_bytes=exchange.dense_bytes,
        gradients=exchange.words(stage.data.train.images),
        begins=stage.begins,
        weights=weights,
        display=solver.display,
    )
