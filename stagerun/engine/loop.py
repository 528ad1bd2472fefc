"""The training loop of one stage: a generator of events that one reads from top to bottom."""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from stagerun.comm import Reducer
from stagerun.engine.images import Batch
from stagerun.engine.state import TrainState
from stagerun.engine.update import Arithmetic, Outcome, update
from stagerun.errors import Diverged
from stagerun.events import Iterated, Note, SnapshotDue, Stopped, TestDue
from stagerun.knobs import Knobs
from stagerun.recipe import Solver
from stagerun.schedule.plateau import PlateauState, follow


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLoop:
    """What one rank needs to know to train a stage."""

    stage: str
    max_iter: int
    batch_size: int
    epoch_images: int
    start_position: int  # images consumed before the stage, along the path of ancestors
    run: range  # this rank's logical workers
    knobs: Callable[..., Knobs]
    snapshot: int
    test_interval: int
    arithmetic: Arithmetic
    branch_points: frozenset[int] = frozenset()  # iterations that other stages start from
    plateau: Solver | None = None  # of lr_policy `plateau`: `knobs` then takes the drops that the loss has brought, too


def due(iter: int, every: int, last: int) -> bool:
    """Whether something with an interval is due after `iter` updates; never at `last`, where the stage's end sees to it."""
    return every > 0 and iter % every == 0 and iter != last


def train(
    loop: StageLoop, state: TrainState, batches: Iterator[Batch], reducer: Reducer, stop: Callable[[], bool]
) -> Iterator[Iterated | SnapshotDue | TestDue | Stopped | Note]:
    """Takes `state` from `state.iter` to `loop.max_iter` updates. Collective; every rank yields the same events.

    `batches` are the device batches of this rank, from the present position on. `stop` is asked on each rank once per
    iteration; the answers travel with the gradients, so that all ranks stop after the same update.
    Diverged, on every rank, when the loss is not finite: the weights are then those before the update.
    """
    while state.iter < loop.max_iter:
        begun, before = time.monotonic(), state.plateau
        pieces = ((worker, next(batches), worker == loop.run[-1]) for worker in loop.run)
        outcome, knobs = _update(loop, state, pieces, reducer, stop)
        if not math.isfinite(outcome.loss):
            raise Diverged(
                f"the loss of stage `{loop.stage}` is {outcome.loss} at iteration {state.iter}, learning rate {knobs.lr:g}",
                "lower base_lr, lengthen the warm-up or set clip_gradients; the last snapshot is unharmed",
            )
        if state.plateau.drops > before.drops:
            yield Note(text=_drop(loop, before, state.plateau.drops, state.iter - 1))
        yield Iterated(
            stage=loop.stage,
            iter=state.iter,
            epoch=(loop.start_position + state.iter * loop.batch_size) / loop.epoch_images,
            lr=knobs.lr,
            momentum=knobs.momentum,
            weight_decay=knobs.weight_decay,
            loss=outcome.loss,
            images=loop.batch_size,
            seconds=time.monotonic() - begun,
            update_seconds=outcome.seconds,
        )
        if outcome.stop:
            yield Stopped(stage=loop.stage, iter=state.iter, reason="asked to stop")
            return
        # The snapshot first, which is then written behind the evaluation: a kill in there loses a line of the log, not training.
        branch = state.iter in loop.branch_points and state.iter != loop.max_iter
        if branch or due(state.iter, loop.snapshot, loop.max_iter):
            yield SnapshotDue(stage=loop.stage, iter=state.iter)
        if due(state.iter, loop.test_interval, loop.max_iter):
            yield TestDue(stage=loop.stage, iter=state.iter)


def _update(
    loop: StageLoop,
    state: TrainState,
    pieces: Iterable[tuple[int, Batch, bool]],
    reducer: Reducer,
    stop: Callable[[], bool],
) -> tuple[Outcome, Knobs]:
    """One update, and what it was done with, or would have been."""
    solver, iter, now = loop.plateau, state.iter, state.plateau
    if solver is None:
        knobs = loop.knobs(iter)
        return update(state, pieces, knobs, reducer, loop.arithmetic, stop), knobs

    def following(loss: float) -> Knobs:
        nonlocal now
        now = follow(state.plateau, solver, iter, loss)
        return loop.knobs(iter, now.drops)

    outcome = update(state, pieces, following, reducer, loop.arithmetic, stop)
    # With the weights, and not before: a snapshot after an update that failed holds the one before it.
    state.plateau = now
    return outcome, loop.knobs(iter, now.drops)


def _drop(loop: StageLoop, before: PlateauState, drops: int, iter: int) -> str:
    old, new = loop.knobs(iter, before.drops).lr, loop.knobs(iter, drops).lr
    return (
        f"loss has not fallen below {before.lowest:.4g} for {iter - before.since} iterations: LR {old:.4g} -> {new:.4g} at "
        f"iteration {iter}"
    )
