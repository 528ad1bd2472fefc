"""The features of a stage: each is an object that sees the stage's events in turn (`stage.hooks_of` lists them). The small ones are here.

The engine's loop yields what happened or is due: Iterated, SnapshotDue, TestDue, Stopped and so on. A hook passes an event on, adds events
before or after it, or replaces it. The next hook sees what this one yields; what the last one yields is written to the log.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from stagerun.base.events import Event, Iterated, Note, NotFinite, Proof, Retraced, Synchronised, chained
from stagerun.base.recipe import Metric, OnNan
from stagerun.base.snapshots import SnapshotRef
from stagerun.data.index import printable
from stagerun.data.loaders import order_of
from stagerun.engine import codec
from stagerun.engine.evaluate import Score
from stagerun.engine.loop import StageLoop, due, saves
from stagerun.engine.state import TrainState, counters, digests_on_device, together
from stagerun.plan import State
from stagerun.schedule.improvement import FRESH, NOTHING_YET, follow_tests
from stagerun.system.pulse import Section
from stagerun.train.progress import AVERAGE, MOMENTUM, STATE, WEIGHTS, progress_of

if TYPE_CHECKING:
    from stagerun.train.context import StageRun


@dataclass(frozen=True, slots=True)
class SetScore:
    """The score of one validation set; `ema`: of the averaged weights."""

    val: str
    score: Score
    ema: bool


@dataclass(frozen=True, slots=True)
class Evaluated:
    """An evaluation inside the stage is complete. Every rank has the same scores, the first set first. Only hooks see this event; the
    log has a Tested for each score."""

    iter: int
    scores: tuple[SetScore, ...]


Seen = Event | Evaluated


class Hook(Protocol):
    def on(self, event: Seen) -> Iterator[Seen]:
        """Yield the event, and what follows from it. Called on every rank.

        SnapshotDue, TestDue, Evaluated and Stopped come on all ranks alike; so do Iterated and NotFinite, except with `method: ASYNC`. Only
        at these may a hook call something collective. SnapshotWritten and others come on rank 0 only."""


def pass_through(hooks: Sequence[Hook], event: Seen) -> Iterator[Event]:
    """Send an event through the hooks; yield what comes out."""
    if hooks:
        for seen in hooks[0].on(event):
            yield from pass_through(hooks[1:], seen)
    elif not isinstance(event, Evaluated):
        yield event


class Counted:
    """Adds up the losses and seconds of the stage, and sends the monitor a heartbeat. Yields the monitor's messages to the user."""

    def __init__(self, run: "StageRun") -> None:
        self.run = run

    def on(self, event: Seen) -> Iterator[Seen]:
        if isinstance(event, Iterated):
            self.run.losses.append(event.loss)
            yield from self._count(event.iter, event.seconds)
        elif isinstance(event, NotFinite) and event.done == OnNan.SKIP.value:
            yield from self._count(event.iter + 1, event.seconds)
        yield event

    def _count(self, iter: int, seconds: float) -> Iterator[Note]:
        pulse = self.run.worker.comm.pulse
        self.run.seconds += seconds
        pulse.iterated(iter, seconds)
        while pulse.news:
            yield Note(text=pulse.news.popleft(), warning=True)


class EarlyStop:
    """`early_stop` and `@best`: follows the evaluations of the trained weights in `state.best`, and marks there the end of the stage, for the
    loop. All ranks have the same scores."""

    def __init__(self, run: "StageRun", state: TrainState) -> None:
        self.stage, self.state, self.rule = run.stage, state, run.worker.schedule.followed(run.stage)

    def on(self, event: Seen) -> Iterator[Seen]:
        yield event
        rule = self.rule
        if rule is None or not isinstance(event, Evaluated):
            return
        score = event.scores[0].score
        value = score.loss if rule.metric is Metric.LOSS else 100 * score.top1
        if rule.metric is Metric.MAP:
            value = math.nan if score.mean_ap is None else 100 * score.mean_ap
        best = self.state.best = follow_tests(self.state.best, rule, event.iter, value)
        if best.ended:
            first = f"{best.best:.4g} at iteration {best.at}" if best.best is not None else "no number so far"
            length = f"{event.iter} of {self.stage.solver.max_iter} iterations"
            text = f"early_stop: the last best {rule.metric.value} is {first}; stage `{self.stage.name}` ends after {length}"
            yield Note(text=text)


class Reported:
    """Turns the events into log events."""

    def __init__(self, run: "StageRun") -> None:
        self.run = run

    def on(self, event: Seen) -> Iterator[Seen]:
        until = self.run.planned.until
        match event:
            case Iterated() if until is not None:
                same = ("stage", "iter", "lr", "loss", "images", "seconds", "sent_bytes")
                yield Retraced(until=until, **{name: getattr(event, name) for name in same})
            case Synchronised() if until is not None:
                pass
            case NotFinite():
                yield replace(event, keys=keys_of(self.run, event), until=until)
            case _:
                yield event


def keys_of(run: "StageRun", failed: NotFinite) -> tuple[str, ...]:
    """Return the keys of the iteration's images over all ranks, in the order of their positions; on rank 0, which alone reports them."""
    if run.worker.comm.rank != 0:
        return ()
    records = run.worker.images.training(run.stage)
    indices = order_of(records, run.worker.schedule, run.stage).at(failed.position, failed.images)
    return tuple(printable(records.key(int(i))) for i in indices)


class Proofs:
    """`audit_param { proof_iter }`: digests of the stage's state in the log, each chained to the one before. Every rank has this hook; rank 0
    digests and yields. `newest`: the newest link, on rank 0."""

    def __init__(self, run: "StageRun", state: TrainState, loop: StageLoop) -> None:
        self.run, self.state, self.loop = run, state, loop
        files, audit = run.files, run.stage.solver.audit
        self.every = audit.proof_iter if audit is not None else 0
        continues = (
            self.every and run.stage.average is None
        )  # a stage without proofs starts no chain, and continues none
        self.newest = progress_of(files).proof if continues and files is not None and STATE in files else ""

    def at_start(self) -> Iterator[Proof]:
        """Yield the proof of the state that the stage starts with."""
        if self.every and self.run.planned.state is State.FRESH:
            yield from self._proof()

    def on(self, event: Seen) -> Iterator[Seen]:
        if isinstance(event, NotFinite) and event.done == OnNan.SKIP.value:
            yield from self._if_due()
        yield event
        if isinstance(event, Iterated):
            yield from self._if_due()

    def _if_due(self) -> Iterator[Proof]:
        iter, loop = self.state.iter, self.loop
        if not self.every:
            return
        due_here = due(iter, self.every, 0)
        if self.run.is_piece:
            # The links that the stage had: a snapshot that others now start from is not among them.
            due_here |= due(iter, loop.snapshot, 0) or (loop.tests_first and due(iter, loop.test_interval, 0))
        else:
            due_here |= saves(loop, iter)
        if due_here:
            with self.run.worker.comm.pulse.section(Section.SAVE):
                yield from self._proof()

    def _proof(self) -> Iterator[Proof]:
        now = self.state
        if self.run.worker.comm.rank != 0:
            return
        # As before any evaluation: the evaluation that `early_stop` uses comes between this and the snapshot.
        counted = counters(now.iter, now.plateau, NOTHING_YET, now.skips, now.skips_in_all, now.rollbacks)
        state = f"{codec.combined({**digests_on_device(now), **counted}):016x}"
        self.newest = chained(self.newest, now.iter, state)
        if not self.run.is_piece:
            yield Proof(stage=self.loop.stage, iter=now.iter, state=state, chain=self.newest)


def proven(ref: SnapshotRef, files: Mapping[str, bytes]) -> tuple[str, str, int]:
    """Return a snapshot's proof: the digest of its state, the chain up to it, and how often its stage had rolled back. KeyError, ValueError
    for files that no run writes."""
    progress, (tensors, digests) = progress_of(files), stored_state(ref, files)
    digest = codec.digest if ref.environment.get("device") == "cpu" else codec.mixed
    digests |= {name: digest(tensor) for name, tensor in tensors.items()}
    return f"{codec.combined(digests):016x}", progress.proof, progress.rollbacks


def stored_state(ref: SnapshotRef, files: Mapping[str, bytes]) -> tuple[codec.Tensors, codec.Digests]:
    """Return the tensors of a snapshot's state by unique names, and the digest of its counters. Raises as `proven` does."""
    progress = progress_of(files)
    weights, momentum = (codec.decode(files[file]) for file in (WEIGHTS, MOMENTUM))
    average = codec.decode(files[AVERAGE]) if AVERAGE in files else {}
    plateau = progress.plateau or FRESH
    counted = counters(ref.iter, plateau, NOTHING_YET, progress.skips, progress.skips_in_all, progress.rollbacks)
    return together(weights, momentum, average), counted
