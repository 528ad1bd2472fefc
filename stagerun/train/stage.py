"""One stage on one rank: the loop of the engine with images, snapshots and evaluations around it."""

import math
from collections.abc import Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial

from stagerun.base.errors import (
    DataError,
    ExitCode,
    PeerError,
    PermissionDenied,
    StagerunError,
    StorageError,
    UsageError,
)
from stagerun.base.events import (
    Compressed,
    Event,
    Iterated,
    Note,
    NotFinite,
    PieceStarted,
    Retraced,
    SnapshotDue,
    StageStarted,
    Stopped,
    Synchronised,
    TestDue,
)
from stagerun.base.recipe import Method, Metric, OnNan
from stagerun.base.text import count
from stagerun.comm import Reducer, runs_of
from stagerun.comm.group import Traffic
from stagerun.comm.kept import Kept
from stagerun.engine.asynchronous.training import Asynchronous, Read
from stagerun.engine.compression import dense_bytes_of, reducer_of
from stagerun.engine.evaluate import Score
from stagerun.engine.images import Batch
from stagerun.engine.loop import StageLoop, train
from stagerun.engine.losses import Loss
from stagerun.engine.state import TrainState, digests, digests_common, finite
from stagerun.plan import State
from stagerun.plan.gradients import sending
from stagerun.plan.render import carried_over, weights_name
from stagerun.schedule import make_knobs, parting
from stagerun.schedule.early_stop import follow
from stagerun.system.pulse import Section, beating
from stagerun.train.agreement import ToldByAnother, rank0
from stagerun.train.choosing import resolved
from stagerun.train.ensembling import averaged_start
from stagerun.train.environment import environment_of, promise
from stagerun.train.finish import finish_stage, test
from stagerun.train.foreign import look_at
from stagerun.train.keeper import Lineage
from stagerun.train.objective import objective
from stagerun.train.progress import Progress
from stagerun.train.proofs import Proofs, agree
from stagerun.train.resident import keep, training_batches
from stagerun.train.rollback import gone_back, keys_of
from stagerun.train.snapshotter import Snapshotter
from stagerun.train.stage_start import arithmetic_of, asynchronous, parent_id, restored, take_up_residual
from stagerun.train.worker import StageRun


def train_stage(run: StageRun) -> Iterator[Event]:
    """Train what is left of the stage, and evaluate it; of a piece, the stretch that is asked for, and no evaluation.
    Collective; ends early after a Stopped."""
    while (failed := (yield from _Training(run).train())) is not None:
        run = yield from gone_back(run, failed)  # `on_nan: ROLLBACK`


class _Training:
    """The stage up to its end, or to the iteration from which it is to go back."""

    state: TrainState
    loop: StageLoop
    way: Reducer | Asynchronous  # how gradients come together
    snapshotter: Snapshotter | None  # rank 0's
    proofs: Proofs | None

    def __init__(self, run: StageRun) -> None:
        self.run, self.worker, self.solver = run, run.worker, run.stage.solver
        self.comm, self.images = run.worker.comm, run.worker.images
        self.kept = Kept(self.solver.display if self.comm.rank == 0 else 0)

    def train(self) -> Generator[Event, None, NotFinite | None]:
        """None at the end, and after a Stopped."""
        run, solver = self.run, self.solver
        self.comm.pulse.enter(Section.START)
        for text in look_at(run):
            yield Note(text=text)
        if run.stage.average is not None and run.planned.state is State.FRESH:
            files = yield from averaged_start(run)
            if files is None:
                return None
            run.files = files or None
        self.state = state = restored(run)
        bits = environment_of(self.worker.schedule, run.stage, self.worker.device, self.comm.size, self.worker.others)
        yield _started(run, dense_bytes_of(self.worker.schedule.determinism, state, solver, self.comm))
        if run.weights_table:
            yield Note(text=run.weights_table)
        self.loop = make_loop(run, objective(run))
        every = solver.audit.proof_iter if solver.audit is not None else 0
        self.proofs = Proofs(run, state, self.loop, every) if every else None
        way = asynchronous(run, self.loop, state) if solver.asynchronous else (yield from self._reducer())
        if way is None:
            return None  # asked to stop
        self.way = way
        yield from self._promised(bits)
        if run.planned.state is State.RESUME:
            run.saved = state.iter  # a stop before the first update has nothing to write
        self.snapshotter = self._make_snapshotter(bits)
        try:
            ended = yield from self._iterate()
            if ended is not None:
                return ended if isinstance(ended, NotFinite) else None
            yield from self._save()
        except (
            DataError,
            StorageError,
            PermissionDenied,
            PeerError,
            UsageError,
        ):  # the last is a memory that is too small
            yield from self._save_what_is_trained()
            raise
        finally:
            for _ in self._written():
                pass
        yield from self.images.copied(self.comm, all_nodes=True)
        if not run.is_piece and run.last == run.planned.last:
            yield from finish_stage(run, state)
        return None

    def _reducer(self) -> Generator[Event, None, Reducer | None]:
        """None if asked to stop while it is chosen."""
        run, state = self.run, self.state
        compress = yield from resolved(run, state)
        if compress is not None and compress.method is Method.AUTO:
            return None
        resolving = replace(self.solver, compress=compress)
        take_up_residual(run, state, resolving)
        if (
            compress is not None
            and compress.method is Method.POWER_SGD
            and (state.residual is None or not state.residual.bases)
        ):
            text = (
                f"POWER_SGD of rank {compress.rank} makes no layer of `{run.stage.model.name}` smaller: stage `{run.stage.name}` sends "
                "gradients as they are; make `rank` smaller"
            )
            yield Note(text=text, warning=True)
        return reducer_of(self.worker.schedule.determinism, state, resolving, self.comm, self.kept)

    def _promised(self, bits: dict[str, str]) -> Iterator[Event]:
        """What the bits of this life have to do with those before."""
        run, residual = self.run, self.state.residual
        if residual is not None and (before := residual.shared_from):
            text = f"the residuals of {count(before, 'sender')} are shared out evenly over {residual.senders}"
            yield Note(text=text)
        same = promise(self.worker.schedule, run.planned, bits, run.replays)
        if same and (same.warning or run.rollbacks is None):
            yield same
        if self.solver.asynchronous and self.worker.profile is not None:
            text = f"no profile of stage `{run.stage.name}`: iterations of `method: ASYNC` overlap"
            yield Note(text=text, warning=True)

    def _make_snapshotter(self, bits: dict[str, str]) -> Snapshotter | None:
        if self.worker.keeper is None:
            return None
        planned = self.run.planned
        lineage = Lineage(self.run.stage, parent_id(planned), bits, planned.id_stage, planned.skipped)
        snapshotter = Snapshotter(self.worker.keeper, lineage, self.state, self.run.is_piece)
        self.worker.stopping.expect(sum(part.nbytes for part in snapshotter.capture.files() if part is not None))
        if self.run.saved == self.state.iter:
            snapshotter.newest = planned.start
        return snapshotter

    # -- the iterations

    def _iterate(self) -> Generator[Event, None, Event | None]:
        """What ended it before the end: an event at which the run stops, or a NotFinite from which it is to go back."""
        run, solver, size = self.run, self.solver, self.solver.device_batch_size
        pushing = self.way if isinstance(self.way, Asynchronous) else None
        asked = requests(self.loop, self.state.iter, size) if pushing is None else ()
        resident = yield from keep(run)
        self.comm.pulse.stage(run.stage.name, self.state.iter, solver.compile)
        read = partial(training_batches, run, resident)
        if self.proofs is not None:
            yield from self.proofs.at_start()
        alone = parting(solver) if solver.sync is not None and pushing is None else 0
        with read(asked) as fed:
            events = _events(run, self.loop, self.state, self.way, beating(fed, self.comm.pulse), read)
            for event in _counting(events, self.comm.traffic, alone):
                stopped = yield from self._handle(event)
                if isinstance(event, Iterated) and (items := self.kept.take()):
                    yield Compressed(stage=event.stage, iter=event.iter, items=items)
                if stopped:
                    return event
                if isinstance(event, NotFinite) and event.done == OnNan.ROLLBACK.value:
                    yield from self._written()
                    return event
                yield from self.images.copied(self.comm)
        return None

    def _handle(self, event: Event) -> Generator[Event, None, bool]:
        """What is done about an event of the loop. True when the run stops here, with everything saved."""
        run, state = self.run, self.state
        reason = event.reason if isinstance(event, Stopped) else ""
        match event:
            case Iterated():
                run.losses.append(event.loss)
                yield from self._counted(event.iter, event.seconds)
                yield event if run.planned.until is None else _retraced(event, run.planned.until)
                yield from self.proofs.after_iteration() if self.proofs is not None else ()
                if self.snapshotter is not None:
                    yield from self.snapshotter.finished()
                    stopping = self.worker.stopping
                    stopping.snapshot_s = max(stopping.snapshot_s, self.snapshotter.slowest)
                    self.snapshotter.keeper.require_not_lost()  # the others then find rank 0 gone
            case NotFinite():
                if event.done == OnNan.SKIP.value:
                    yield from self._counted(state.iter, event.seconds)
                    yield from self.proofs.after_iteration() if self.proofs is not None else ()
                    if self.snapshotter is not None:
                        self.snapshotter.keeper.require_not_lost()
                if event.done != OnNan.ROLLBACK.value:  # then it is reported with what it goes back to
                    yield replace(event, keys=keys_of(run, event), until=run.planned.until)
            case Note():
                yield event
            case Synchronised():
                if not run.is_piece:
                    yield event
            case SnapshotDue():
                yield event
                yield from self._begin_snapshot()
            case TestDue():
                yield event
                scores = yield from test(run, state, self.solver.test_iter)
                if scores is None:
                    reason = "asked to stop; its evaluation comes first when the run goes on"
                else:
                    state.tested = state.iter
                    yield from _decide(run, state, scores[0][1])
        if not reason:
            return False
        yield from self._stop(reason)
        return True

    def _stop(self, reason: str) -> Iterator[Event]:
        """Save what there is."""
        run, iter = self.run, self.state.iter
        if self.solver.on_nan is OnNan.ROLLBACK and not finite(self.state):
            # The update overflowed, and no loss has shown it yet. Don't save: the next process retrains this stretch from the snapshot
            # before, and rolls back too.
            iter = max(run.saved, run.planned.iter)
            reason = f"{reason}; what came after it has overflowed, and is not kept"
            yield from self._written()
            if self.snapshotter is not None:
                iter = self.snapshotter.newest.iter if self.snapshotter.newest is not None else run.planned.iter
        elif iter:
            yield from self._save()
        yield Stopped(stage=run.stage.name, iter=iter, reason=reason)

    def _counted(self, iter: int, seconds: float) -> Iterator[Note]:
        """Count an iteration; yield what the monitor wants the user to know."""
        self.run.seconds += seconds
        self.comm.pulse.iterated(iter, seconds)
        while self.comm.pulse.news:
            yield Note(text=self.comm.pulse.news.popleft(), warning=True)

    # -- snapshots

    def _written(self) -> Iterator[Event]:
        """Wait for the snapshot under way; what became of it."""
        if self.snapshotter is not None:
            with self.comm.pulse.section(Section.SAVE):
                yield from self.snapshotter.wait()

    def _begin_snapshot(self, alone: bool = False) -> Iterator[Event]:
        """Collective, unless `alone`: then the other ranks may be gone, and nothing is compared with theirs."""
        run, state, shots, notes = self.run, self.state, self.snapshotter, list[Note]()
        replicas, where = state.replicas, state.iter
        with self.comm.pulse.section(Section.SAVE):
            if replicas is not None:
                replicas.show()
            if shots is None:
                if state.residual is not None:
                    state.residual.gather(self.comm, None)
                if replicas is not None and replicas.differ(where):
                    replicas.gather(None)
                found, good = digests(state)
                if not agree(run, where, notes, {**found, **_common(state)}, good):
                    raise ToldByAnother(ExitCode.DIVERGED)
            else:
                capture = shots.capture

                def agreeing(found: Mapping[str, int]) -> bool:
                    # What the others look at is what rank 0 has, unless their states may differ.
                    good = not self.worker.others or capture.finite()
                    return agree(run, where, notes, {**found, **_common(state)}, good)

                def gather() -> None:
                    if state.residual is not None:
                        capture.take_residual(state.residual, self.comm)
                    if replicas is not None:
                        capture.take_replicas(replicas, where)

                try:
                    compared = None if alone or self.comm.size == 1 else agreeing
                    yield from shots.start(where, self._progress(), compared, gather)
                except StagerunError:
                    yield from shots.wait()
                    raise
        run.said_ended = state.best.ended
        run.saved = state.iter  # not before: what a peer's death keeps from being compared is still to be saved
        yield from notes

    def _progress(self) -> Progress:
        run, state, solver = self.run, self.state, self.solver
        return Progress(
            run.planned.position + run.planned.skipped + state.iter * solver.batch_size,
            run.seconds,
            list(run.losses),
            plateau=state.plateau if solver.lr_policy == "plateau" else None,
            skips=state.skips,
            skips_in_all=state.skips_in_all,
            rollbacks=state.rollbacks,
            choice=dict(run.choice),
            weights=run.weights,
            best=state.best if solver.early_stop is not None else None,
            proof=run.proof,
            tested=state.tested,
        )

    def _save(self) -> Iterator[Event]:
        """Returns when the snapshot of the present iteration is on disk. Collective; StorageError on rank 0 if it can't be."""
        run, state, shots = self.run, self.state, self.snapshotter
        # A snapshot written by a stop lacks the stage-ended flag; rewrite it.
        unsaid = state.best.ended and not run.said_ended
        if unsaid and shots is not None:
            shots.newest = None
        if unsaid or run.saved != state.iter:
            yield from self._begin_snapshot()
        yield from self._written()
        rank0(self.comm, lambda: shots.require(state.iter).name if shots is not None else "")

    def _save_what_is_trained(self) -> Iterator[Event]:
        """On rank 0, after images that can't be used, a disk that fails, or a peer that is gone, perhaps because it met such.

        The state is that of the last whole update: the images of an update, and the sum of all gradients, come before anything of it
        is applied. No rank waits for another here; what keeps the snapshot from being written is less than what went wrong before.

        Not where residuals or replicas belong to the snapshot, which the others have: without them training would go on to other bits
        than from the snapshot before. RuntimeError is torch's, of a GPU.
        """
        run, state = self.run, self.state
        if self.snapshotter is None or state.iter in (run.saved, run.planned.iter):
            return
        if self.solver.asynchronous:  # between two boundaries there is no one state
            return
        parted = state.replicas is not None and state.replicas.parted
        if (state.residual is not None or parted) and self.comm.size > 1:
            at = max(run.saved, run.planned.iter)
            text = (
                f"what was trained since iteration {at} is not saved: it needs the residuals or replicas of all workers"
            )
            yield Note(text=text, warning=True)
            return
        with suppress(StagerunError, RuntimeError):
            yield from self._begin_snapshot(alone=True)
            yield from self._written()


def _decide(run: StageRun, state: TrainState, score: Score) -> Iterator[Note]:
    """Take an evaluation of the trained weights into account (`early_stop`); say where the stage ends by it. All ranks have the same score."""
    how = run.stage.solver.early_stop
    if how is None:
        return
    value = score.loss if how.metric is Metric.LOSS else 100 * score.top1
    if how.metric is Metric.MAP:
        value = math.nan if score.mean_ap is None else 100 * score.mean_ap
    best = state.best = follow(state.best, how, state.iter, value)
    if best.ended:
        first = f"{best.best:.4g} at iteration {best.at}" if best.best is not None else "no number so far"
        length = f"{state.iter} of {run.stage.solver.max_iter} iterations"
        text = f"early_stop: the last best {how.metric.value} is {first}; stage `{run.stage.name}` ends after {length}"
        yield Note(text=text)


def _common(state: TrainState) -> dict[str, int]:
    """Digests of what is equal on all ranks besides the state itself."""
    parted = state.replicas is not None and state.replicas.differ(state.iter)
    return digests_common(state) | (state.replicas.digests if parted and state.replicas is not None else {})


def _events(
    run: StageRun,
    loop: StageLoop,
    state: TrainState,
    way: Reducer | Asynchronous,
    batches: Iterator[Batch],
    read: Read,
) -> Iterator[Event]:
    worker, stop = run.worker, run.worker.stop
    if isinstance(way, Asynchronous):
        return way.train(read, stop)
    if worker.profile is None:
        return train(loop, state, batches, way, stop, worker.stopping.left)
    return worker.profile.train(loop, state, batches, way, stop, worker.stopping.left, worker.device)


def _counting(events: Iterator[Event], traffic: Traffic, parting: int = 0) -> Iterator[Event]:
    """The events of a loop, each Iterated with what was sent for it, and each Synchronised with what was sent since the one before, or since
    the replicas went apart, after `parting` iterations. What is sent between two events is not counted."""
    sent, before = 0, traffic.sent
    iterations = since = 0  # and what was sent in them
    for event in events:
        sent += traffic.sent - before
        if isinstance(event, Iterated):
            event = replace(event, sent_bytes=sent) if sent else event
            iterations, since = (iterations + 1, since + sent) if event.iter > parting else (0, 0)
        elif isinstance(event, Synchronised):
            event = replace(event, iterations=iterations, sent_bytes=since)
            iterations = since = 0
        if isinstance(event, Iterated | NotFinite):
            sent = 0
        yield event
        before = traffic.sent


def _started(run: StageRun, dense: int) -> StageStarted | PieceStarted:
    solver, planned = run.stage.solver, run.planned
    start = planned.start.name if planned.start else f"seed {solver.random_seed}"
    if planned.until is not None:
        return PieceStarted(
            stage=run.stage.name,
            iter=planned.iter,
            until=planned.until,
            start=start,
            children=planned.children,
            iterations_left=run.iterations_left,
        )
    weights = "" if planned.start or run.stage.parent else weights_name(run.stage)
    if planned.state is State.FRESH and run.stage.average is not None:
        weights = run.stage.average
    return StageStarted(
        stage=run.stage.name,
        number=run.number,
        iter=planned.iter,
        max_iter=solver.max_iter,
        start=start,
        batch_size=solver.batch_size,
        device_batch_size=solver.device_batch_size,
        carried_over=carried_over(planned) if run.stage.parent else "",
        iterations_left=run.iterations_left,
        train_seconds=run.seconds,
        dense_bytes=dense,
        gradients=sending(solver, run.stage.data.train.images),
        begins=run.stage.begins,
        weights=weights,
        display=solver.display,
    )


def _retraced(event: Iterated, until: int) -> Retraced:
    same = ("stage", "iter", "lr", "loss", "images", "seconds", "sent_bytes")
    return Retraced(until=until, **{name: getattr(event, name) for name in same})


def make_loop(run: StageRun, loss: Loss | None = None) -> StageLoop:
    """The constants of the stage's loop on this rank."""
    solver = run.stage.solver
    return StageLoop(
        stage=run.stage.name,
        max_iter=run.last,
        batch_size=solver.batch_size,
        epoch_images=run.stage.data.train.images,
        start_position=run.planned.position + run.planned.skipped,
        run=range(solver.logical_workers)
        if solver.asynchronous
        else runs_of(solver.logical_workers, run.worker.comm.size)[run.worker.comm.rank],
        knobs=make_knobs(solver),
        snapshot=solver.snapshot,
        # A piece is not tested, but where that decides something, which the stage may go on from there with.
        test_interval=0 if run.is_piece and solver.early_stop is None else solver.test_interval,
        branch_points=frozenset(run.worker.schedule.branch_points(run.stage.name)),
        is_piece=run.is_piece,
        on_nan=solver.on_nan,
        max_nan=solver.max_nan,
        plateau=solver if solver.lr_policy == "plateau" else None,
        arithmetic=arithmetic_of(
            run.stage.model,
            solver,
            run.worker.device,
            loss,
            run.worker.schedule.teacher_model(run.stage),
            run.stage.identity,
        ),
        tests_first=solver.early_stop is not None,
    )


def requests(loop: StageLoop, iter: int, device_batch_size: int) -> Iterator[tuple[int, int]]:
    """Yield (position, count) of each device batch of this rank, from iteration `iter` of the stage on."""
    for i in range(iter, loop.max_iter):
        for worker in loop.run:
            yield loop.start_position + i * loop.batch_size + worker * device_batch_size, device_batch_size
