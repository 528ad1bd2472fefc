"""The training loop of one stage: a generator of events."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from stagerun.base.errors import Diverged
from stagerun.base.events import Event, Iterated, Note, NotFinite, SnapshotDue, Stopped, Synchronised, TestDue
from stagerun.base.recipe import OnNan, Solver
from stagerun.comm import Reducer
from stagerun.comm.reduce import Switch
from stagerun.comm.spans import BACKWARD, DATA, FORWARD, UPDATE, WAIT, Spans
from stagerun.engine.device import synchronize
from stagerun.engine.images import Batch
from stagerun.engine.state import TrainState, finite
from stagerun.engine.update import Arithmetic, Outcome, Pieces, Stop, hopeless, update
from stagerun.schedule import Knobs
from stagerun.schedule.improvement import follow_losses

_OVERFLOWED = "a weight, or what is remembered of its updates, is not finite after the update"
NOT_FINITE_HINT = "lower base_lr, lengthen the warm-up or set clip_gradients; earlier snapshots are unharmed"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLoop:
    """The settings of one rank for training a stage."""

    stage: str
    max_iter: int
    batch_size: int
    epoch_images: int
    start_position: int  # iteration i begins at image start_position + i * batch_size
    logical_workers: range  # this rank's
    knobs: Callable[..., Knobs]
    snapshot: int
    test_interval: int
    arithmetic: Arithmetic
    branch_points: frozenset[int] = frozenset()  # iterations that other stages start from
    is_piece: bool = False  # `max_iter` is not the stage's end; the stage itself continued past it
    on_nan: OnNan = OnNan.STOP
    max_nan: int = 1
    tests_first: bool = False  # an evaluation comes before the snapshot of its iteration, since it may end the stage
    tests_last: bool = False  # the evaluation of the last iteration counts, too: it may be the best
    plateau: Solver | None = None  # of lr_policy `plateau`: `knobs` then also takes the number of drops


def due(iter: int, every: int, last: int) -> bool:
    """Return whether something with an interval is due after `iter` updates; never at `last`, which the end of the stage handles."""
    return every > 0 and iter % every == 0 and iter != last


def train(
    loop: StageLoop,
    state: TrainState,
    batches: Iterator[Batch],
    reducer: Reducer,
    stop: Stop,
    left: Callable[[], float | None] = lambda: None,
) -> Iterator[Iterated | NotFinite | Synchronised | SnapshotDue | TestDue | Stopped | Note]:
    """Train `state` from `state.iter` to `loop.max_iter` updates. Collective; every rank yields the same events.

    `batches` are the device batches of this rank, from the current position. `stop` is asked on each rank once per
    iteration; the answers travel with the gradients, so that all ranks stop after the same update.
    When the loss or a gradient is not finite, NotFinite replaces Iterated on every rank, and the weights are those before the update.
    `on_nan: STOP`, or more than `max_nan` failures, raises Diverged; SKIP counts the iteration; ROLLBACK ends the loop, and the caller
    goes back. With ROLLBACK, NotFinite may also follow Iterated, and `state` is then not finite.

    `left`: seconds in which the current iteration must be done once a stop is asked for; None: no limit. An iteration that would take longer
    is abandoned, and Stopped replaces Iterated."""
    workers = loop.logical_workers
    recent = deque[float](maxlen=5)  # seconds of the last iterations in this process
    yield from overdue(loop, state)
    while state.iter < loop.max_iter and not state.best.ended:
        started, before = time.monotonic(), state.plateau
        pieces = ((worker, next(batches), worker == workers[-1]) for worker in workers)

        def too_late(done: int, started: float = started) -> bool:
            return hopeless(left(), done, len(workers), time.monotonic() - started, max(recent, default=None))

        outcome, knobs = _update(loop, state, pieces, reducer, stop, too_late)
        if outcome.broken_off:
            reason = "asked to stop; the next iteration had started and was broken off"
            yield Stopped(stage=loop.stage, iter=state.iter, reason=reason)
            return
        seconds = time.monotonic() - started
        recent.append(seconds)
        number = {OnNan.SKIP: state.skips + 1, OnNan.ROLLBACK: state.rollbacks + 1}.get(loop.on_nan, 1)
        failed = failure(loop, number, outcome.wrong, knobs, seconds, state.iter) if outcome.wrong else None
        if failed is None:
            state.skips = 0
            if state.plateau.drops > before.drops:
                at, drops = state.iter - 1, state.plateau.drops
                old, new = loop.knobs(at, before.drops).lr, loop.knobs(at, drops).lr
                waited = f"loss has not fallen below {before.lowest:.4g} for {at - before.since} iterations"
                yield Note(text=f"{waited}: LR {old:.4g} -> {new:.4g} at iteration {at}")
            yield iterated(loop, state.iter, outcome, knobs, seconds)
            if outcome.met is not None:
                yield Synchronised(stage=loop.stage, iter=state.iter, bytes=outcome.met, iterations=0, sent_bytes=0)
            # If an evaluation ends the stage, its last snapshot follows.
            ends = saves(loop, state.iter)
            if loop.on_nan is OnNan.ROLLBACK and (ends or outcome.stop) and not finite(state):
                # The update overflowed. If a snapshot is due, fail now. Otherwise do one more iteration, whose loss will show it, and
                # stop after that: the bits then equal an unstopped run's.
                if not ends:
                    continue
                failed = failure(loop, number, _OVERFLOWED, knobs, seconds, state.iter - 1)
        elif failed.done == OnNan.SKIP.value:
            state.iter, state.skips, state.skips_in_all = state.iter + 1, failed.number, state.skips_in_all + 1
        if failed is not None:
            yield failed
            if failed.done == OnNan.STOP.value:
                raise diverged(loop, failed)
            if failed.done == OnNan.ROLLBACK.value:
                return
            if state.iter == loop.max_iter and state.skips_in_all >= state.iter and not loop.is_piece:
                # Checked before a stop, which would save the stage as finished.
                raise all_skipped(loop.stage, state.iter)
        if outcome.stop:
            yield Stopped(stage=loop.stage, iter=state.iter, reason="asked to stop")
            return
        yield from whats_due(loop, state)


def overdue(loop: StageLoop, state: TrainState) -> Iterator[TestDue]:
    """Yield the evaluation that is due where the stage resumes, if the snapshot was written before it."""
    tested = state.best.tested if loop.tests_first else state.tested
    if tested < state.iter and test_due(loop, state.iter):
        yield TestDue(stage=loop.stage, iter=state.iter)


def whats_due(loop: StageLoop, state: TrainState) -> Iterator[SnapshotDue | TestDue]:
    """The snapshot first, which is then written in the background during the evaluation: a kill repeats the evaluation, not training. An
    evaluation that may end the stage comes before: its last snapshot must record that, and each iteration has only one."""
    tests = test_due(loop, state.iter)
    if tests and loop.tests_first:
        yield TestDue(stage=loop.stage, iter=state.iter)
        if state.best.ended:
            return
    if snapshot_due(loop, state.iter) and state.iter != loop.max_iter:
        yield SnapshotDue(stage=loop.stage, iter=state.iter)
    if tests and not loop.tests_first:
        yield TestDue(stage=loop.stage, iter=state.iter)


def all_skipped(stage: str, iterations: int) -> Diverged:
    return Diverged(
        f"all {iterations} iterations of stage `{stage}` were skipped: loss or gradients were not finite",
        "lower base_lr, lengthen the warm-up or set clip_gradients",
    )


def iterated(loop: StageLoop, iter: int, outcome: Outcome, knobs: Knobs, seconds: float) -> Iterated:
    return Iterated(
        stage=loop.stage,
        iter=iter,
        epoch=(loop.start_position + iter * loop.batch_size) / loop.epoch_images,
        lr=knobs.lr,
        momentum=knobs.momentum,
        weight_decay=knobs.weight_decay,
        loss=outcome.loss,
        images=loop.batch_size,
        seconds=seconds,
        update_seconds=outcome.seconds,
    )


def saves(loop: StageLoop, iter: int) -> bool:
    """Return whether a snapshot other than a stop's may be taken after `iter` updates: one is due, or an evaluation may end the stage."""
    return snapshot_due(loop, iter) or (loop.tests_first and test_due(loop, iter))


def test_due(loop: StageLoop, iter: int) -> bool:
    """Return whether an evaluation is due after `iter` updates, inside the stage or with `tests_last` at its end."""
    return due(iter, loop.test_interval, 0 if loop.tests_last else loop.max_iter)


def snapshot_due(loop: StageLoop, iter: int) -> bool:
    """Return whether a snapshot is due after `iter` updates, including the one at the stage's end."""
    return iter in loop.branch_points or iter == loop.max_iter or due(iter, loop.snapshot, loop.max_iter)


def failure(loop: StageLoop, number: int, what: str, knobs: Knobs, seconds: float, iter: int) -> NotFinite:
    """The event for the update after `iter` updates, the `number`-th failure, as `on_nan` counts them."""
    return NotFinite(
        stage=loop.stage,
        iter=iter,
        lr=knobs.lr,
        what=what,
        done=(OnNan.STOP if number > loop.max_nan else loop.on_nan).value,
        number=number,
        most=loop.max_nan,
        position=loop.start_position + iter * loop.batch_size,
        images=loop.batch_size,
        seconds=seconds,
    )


def diverged(loop: StageLoop, failed: NotFinite) -> Diverged:
    where = f"in stage `{loop.stage}` {failed.what} at iteration {failed.iter}, learning rate {failed.lr:g}"
    often = {
        OnNan.SKIP: f"; so it was in the {failed.number - 1} before it, which were skipped, and max_nan is {loop.max_nan}",
        OnNan.ROLLBACK: f"; the stage has gone back {failed.number - 1} times, and max_nan is {loop.max_nan}",
    }.get(loop.on_nan, "")
    return Diverged(where + often, NOT_FINITE_HINT)


def _update(
    loop: StageLoop,
    state: TrainState,
    pieces: Pieces,
    reducer: Reducer,
    stop: Stop,
    too_late: Callable[[int], bool],
) -> tuple[Outcome, Knobs]:
    """Do one update; return its outcome, and the rates that it was, or would have been, done with."""
    solver, iter, now = loop.plateau, state.iter, state.plateau
    move = partial(update, state) if state.exchange is None else state.exchange.update
    if solver is None:
        knobs = loop.knobs(iter)
        return move(pieces, knobs, reducer, loop.arithmetic, stop, too_late), knobs

    def following(loss: float) -> Knobs:
        nonlocal now
        now = follow_losses(state.plateau, solver, iter, loss)
        return loop.knobs(iter, now.drops)

    outcome = move(pieces, following, reducer, loop.arithmetic, stop, too_late)
    # Together with the weights: a snapshot after a failed update holds the state before it.
    if not outcome.wrong:
        state.plateau = now
    return outcome, loop.knobs(iter, now.drops)


def timed_train(
    loop: StageLoop,
    state: TrainState,
    batches: Iterator[Batch],
    reducer: Reducer,
    stop: Stop,
    left: Callable[[], float | None],
    spans: Spans,
) -> Iterator[Event]:
    """Train as `train` does, and put the parts of each iteration into `spans`.

    The clocks are around the loop's inputs and outputs, so that the loop has none. On a GPU each clock waits for the device, so that it
    measures a part's computing and not its queueing: the parts are right, and the iteration is slower than without clocks."""
    clocks = _Clocks(reducer, spans, state)
    spans.stage = loop.stage
    for event in train(loop, state, clocks.batches(batches), clocks, stop, left):
        if isinstance(event, Iterated | NotFinite):
            clocks.part(UPDATE)
        yield event


class _Clocks(Switch):
    """A reducer that notes when a part ends: the forward pass is between a batch and `add`."""

    def __init__(self, reducer: Reducer, spans: Spans, state: TrainState) -> None:
        super().__init__(reducer)
        self.spans, self.state, self.device = spans, state, next(state.model.parameters()).device
        self.last = 0.0

    def time(self) -> float:
        if not self.spans.on:
            return 0.0
        synchronize(self.device)
        return self.spans.clock()

    def part(self, name: str) -> None:
        """Note the part that ends now."""
        started, self.last = self.last, self.time()
        self.spans.add(name, started, self.last)

    def batches(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            self.part(DATA)
            yield batch
            # The time before, the backward pass of another batch or the preparations of the iteration, is noted already.
            self.last = self.time()

    def begin(self, iter: int = 0) -> None:
        self.spans.iter = self.state.iter
        super().begin(iter)
        self.last = self.time()

    def add(self, loss: Tensor, logical_worker: int, tail: Tensor, last: bool) -> None:
        self.part(FORWARD)
        super().add(loss, logical_worker, tail, last)
        self.part(BACKWARD)

    def finish(self) -> Tensor:
        self.last = self.time()
        total = super().finish()
        self.part(WAIT)
        return total
