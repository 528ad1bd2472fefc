"""One stage on one rank: the loop of the engine with images, snapshots and evaluations around it."""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
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
    SnapshotFailed,
    SnapshotWritten,
    StageStarted,
    Stopped,
    Synchronised,
    TestDue,
)
from stagerun.base.recipe import Compression, Method, OnNan
from stagerun.base.text import count
from stagerun.comm import Reducer, runs_of
from stagerun.comm.group import Traffic
from stagerun.comm.kept import Kept
from stagerun.engine.asynchronous.training import Asynchronous
from stagerun.engine.compression import reducer_of
from stagerun.engine.images import Batch
from stagerun.engine.loop import StageLoop, train
from stagerun.engine.losses import Loss
from stagerun.engine.state import TrainState, digests, digests_common, finite, saved_residual
from stagerun.engine.traffic import dense_bytes_of
from stagerun.plan import State
from stagerun.plan.gradients import sending
from stagerun.plan.render import carried_over, weights_name
from stagerun.schedule import make_knobs, parting
from stagerun.system.pulse import Section, beating
from stagerun.train.agreement import ToldByAnother, rank0
from stagerun.train.choosing import resolved
from stagerun.train.early_stop import decide
from stagerun.train.ensembling import averaged_start
from stagerun.train.environment import environment_of, promise
from stagerun.train.finish import finish_stage, test
from stagerun.train.foreign import look_at
from stagerun.train.keeper import Lineage
from stagerun.train.objective import objective
from stagerun.train.progress import Progress, progress_of
from stagerun.train.proofs import Proofs, agree
from stagerun.train.pushing import asynchronous
from stagerun.train.resident import keep, training_batches
from stagerun.train.rollback import gone_back, keys_of
from stagerun.train.snapshotter import Snapshotter
from stagerun.train.stage_start import arithmetic_of, parent_id, restored, take_up_residual
from stagerun.train.worker import StageRun


def train_stage(run: StageRun) -> Iterator[Event]:
    """Trains what is left of the stage, and evaluates it; of a piece, the stretch that is asked for, and no evaluation.
    Collective; ends early after a Stopped."""
    while True:
        failed = yield from _train(run)
        if failed is None:
            return
        run = yield from gone_back(run, failed)  # `on_nan: ROLLBACK`


def _train(run: StageRun) -> Generator[Event, None, NotFinite | None]:
    """The same up to the iteration from which it is to go back; None at the end, and after a Stopped."""
    solver, comm = run.stage.solver, run.worker.comm
    comm.pulse.enter(Section.START)
    for text in look_at(run):
        yield Note(text=text)
    if run.stage.average is not None and run.planned.state is State.FRESH:
        files = yield from averaged_start(run)
        if files is None:
            return None
        run.step = replace(run.step, files=files or None)
    state = restored(run)
    if run.rollbacks is None:
        _recall(run)
    bits = environment_of(run.worker.schedule, run.stage, run.worker.device, comm.size, run.worker.others)
    yield _started(run, dense_bytes_of(run.worker.schedule.determinism, state, solver, comm))
    if run.weights_table:
        yield Note(text=run.weights_table)
    loop = make_loop(run, objective(run))
    audit = solver.audit
    proofs = Proofs(run, state, loop, audit.proof_iter) if audit is not None and audit.proof_iter else None
    kept = Kept(solver.display if comm.rank == 0 else 0)
    way = asynchronous(run, loop, state) if solver.asynchronous else (yield from _reducer(run, state, kept))
    if way is None:
        return None  # asked to stop
    yield from _promised(run, state, bits)
    if run.planned.state is State.RESUME:
        run.saved = state.iter  # a stop before the first update has nothing to write
    snapshotter = _snapshotter(run, state, bits)
    try:
        ended = yield from _iterate(run, loop, state, way, kept, snapshotter, proofs)
        if ended is not None:
            return ended if isinstance(ended, NotFinite) else None
        yield from _save(run, state, snapshotter)
    except (DataError, StorageError, PermissionDenied, PeerError, UsageError):  # the last is a memory that is too small
        yield from _save_what_is_trained(run, state, snapshotter)
        raise
    finally:
        if snapshotter is not None:
            with comm.pulse.section(Section.SAVE):
                snapshotter.wait()
    if note := run.worker.images.replacing(run.stage).summary():
        yield note
    yield from run.worker.images.copied(comm, all_nodes=True)
    if not run.is_piece and run.last == run.planned.last:
        yield from finish_stage(run, state)
    return None


def _reducer(run: StageRun, state: TrainState, kept: Kept) -> Generator[Event, None, Reducer | None]:
    """None if asked to stop while it is chosen."""
    compress = yield from resolved(run, state)
    if compress is not None and compress.method is Method.AUTO:
        return None
    resolving = replace(run.stage.solver, compress=compress)
    take_up_residual(run, state, resolving)
    if too_large := _rank_too_large(run, state, compress):
        yield too_large
    return reducer_of(run.worker.schedule.determinism, state, resolving, run.worker.comm, kept)


def _promised(run: StageRun, state: TrainState, bits: dict[str, str]) -> Iterator[Event]:
    """What the bits of this life have to do with those before."""
    if state.residual is not None and (before := state.residual.shared_from):
        text = f"the residuals of {count(before, 'sender')} are shared out evenly over {state.residual.senders}"
        yield Note(text=text)
    same = promise(run.worker.schedule, run.planned, bits, run.replays)
    if same and (same.warning or run.rollbacks is None):
        yield same
    if run.stage.solver.asynchronous and run.worker.profile is not None:
        yield Note(text=f"no profile of stage `{run.stage.name}`: iterations of `method: ASYNC` overlap", warning=True)


def _snapshotter(run: StageRun, state: TrainState, bits: dict[str, str]) -> Snapshotter | None:
    """On rank 0."""
    if run.worker.keeper is None:
        return None
    planned = run.planned
    lineage = Lineage(run.stage, parent_id(planned), bits, planned.id_stage, planned.skipped)
    snapshotter = Snapshotter(run.worker.keeper, lineage, state, run.is_piece)
    run.worker.stopping.expect(sum(part.nbytes for part in snapshotter.capture.files() if part is not None))
    if run.saved == state.iter:
        snapshotter.newest = planned.start
    return snapshotter


def _iterate(
    run: StageRun,
    loop: StageLoop,
    state: TrainState,
    way: Reducer | Asynchronous,
    kept: Kept,
    snapshotter: Snapshotter | None,
    proofs: Proofs | None,
) -> Generator[Event, None, Event | None]:
    """What ended it before the end: an event at which the run stops, or a NotFinite from which it is to go back."""
    solver, comm, replacing = run.stage.solver, run.worker.comm, run.worker.images.replacing(run.stage)
    pushing = way if isinstance(way, Asynchronous) else None
    size = solver.device_batch_size
    asked = requests(loop, state.iter, size) if pushing is None else pushing.requests(size)
    resident = yield from keep(run)
    comm.pulse.stage(run.stage.name, state.iter, solver.compile)

    read = partial(training_batches, run, resident)
    if proofs is not None:
        yield from proofs.at_start()
    alone = parting(solver) if solver.sync is not None and pushing is None else 0
    with read(asked) as fed:
        batches = beating(fed, comm.pulse)
        events = _events(run, loop, state, way, batches, read)
        for event in _counting(events, comm.traffic, alone):
            stopped = yield from _handle(run, state, snapshotter, event, pushing, proofs)
            if isinstance(event, Iterated) and (items := kept.take()):
                yield Compressed(stage=event.stage, iter=event.iter, items=items)
            if stopped:
                return event
            if isinstance(event, NotFinite) and event.done == OnNan.ROLLBACK.value:
                if snapshotter is not None:
                    with comm.pulse.section(Section.SAVE):
                        yield from snapshotter.wait()
                return event
            yield from replacing.news()
            yield from run.worker.images.copied(comm)
    return None


def _rank_too_large(run: StageRun, state: TrainState, compress: Compression | None) -> Note | None:
    """Where POWER_SGD has nothing to do: only the network's shapes tell."""
    if (
        compress is None
        or compress.method is not Method.POWER_SGD
        or (state.residual is not None and state.residual.bases)
    ):
        return None
    text = (
        f"POWER_SGD of rank {compress.rank} makes no layer of `{run.stage.model.name}` smaller: stage `{run.stage.name}` sends gradients "
        "as they are; make `rank` smaller"
    )
    return Note(text=text, warning=True)


def _events(
    run: StageRun,
    loop: StageLoop,
    state: TrainState,
    way: Reducer | Asynchronous,
    batches: Iterator[Batch],
    read: Callable[[Iterable[tuple[int, int]]], AbstractContextManager[Iterator[Batch]]],
) -> Iterator[Event]:
    worker, replacing = run.worker, run.worker.images.replacing(run.stage)

    def stop() -> bool:
        return worker.stop() or replacing.too_many()

    if isinstance(way, Asynchronous):

        def batches_of(iteration: int) -> list[Batch]:
            with read(way.places(iteration, run.stage.solver.device_batch_size)) as those:
                return list(those)

        return way.train(batches, batches_of, stop)
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
            iterations_left=run.step.iterations_left,
        )
    return StageStarted(
        stage=run.stage.name,
        number=run.step.number,
        iter=planned.iter,
        max_iter=solver.max_iter,
        start=start,
        batch_size=solver.batch_size,
        device_batch_size=solver.device_batch_size,
        carried_over=carried_over(planned) if run.stage.parent else "",
        iterations_left=run.step.iterations_left,
        train_seconds=run.seconds,
        dense_bytes=dense,
        gradients=sending(solver, run.stage.data.train.images),
        begins=run.stage.begins,
        weights=_weights_from(run),
        display=solver.display,
    )


def _weights_from(run: StageRun) -> str:
    """The ensemble whose averaged weights the stage starts with, or the file; '' of another, and where it goes on."""
    if run.planned.state is State.FRESH and run.stage.average is not None:
        return run.stage.average
    return "" if run.planned.start or run.stage.parent else weights_name(run.stage)


def make_loop(run: StageRun, loss: Loss | None = None) -> StageLoop:
    """The constants of the stage's loop on this rank."""
    solver = run.stage.solver
    return StageLoop(
        stage=run.stage.name,
        max_iter=run.last,
        batch_size=solver.batch_size,
        epoch_images=run.stage.data.train.images,
        start_position=run.planned.position + run.planned.skipped,
        run=_own(run),
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


def _own(run: StageRun) -> range:
    """The logical workers that this rank computes of an iteration."""
    solver = run.stage.solver
    if solver.asynchronous:
        return range(solver.logical_workers)
    return runs_of(solver.logical_workers, run.worker.comm.size)[run.worker.comm.rank]


def requests(loop: StageLoop, iter: int, device_batch_size: int) -> Iterator[tuple[int, int]]:
    """Yield (position, count) of each device batch of this rank, from iteration `iter` of the stage on."""
    for i in range(iter, loop.max_iter):
        for worker in loop.run:
            yield loop.start_position + i * loop.batch_size + worker * device_batch_size, device_batch_size


def _recall(run: StageRun) -> None:
    """The bad records that the snapshot knows of, rank 0's to count from here on. Collective. DataError if they are too many as
    it is: the same command then ends as it did."""
    if run.worker.images.replacing(run.stage).met is None:
        return
    schedule, images = run.worker.schedule, run.worker.images
    if run.step.files:
        progress = progress_of(run.step.files)
        began = run.planned.state is State.FRESH and run.stage.parent is not None
        its = schedule.stage(run.stage.parent) if began and run.stage.parent is not None else run.stage
        images.recall_beside({**progress.bad_beside, its.data.train.path: progress.bad_records})
    known = images.known_of(run.stage.data.train.path)
    images.replacing(run.stage).recall(run.worker.comm, known, images.loader(run.stage).is_bad)


def _handle(
    run: StageRun,
    state: TrainState,
    snapshotter: Snapshotter | None,
    event: Event,
    pushing: Asynchronous | None,
    proofs: Proofs | None,
) -> Generator[Event, None, bool]:
    """What is done about an event of the loop. True when the run stops here, with everything saved."""
    stopped, reason = isinstance(event, Stopped), event.reason if isinstance(event, Stopped) else ""
    iter = state.iter
    match event:
        case Iterated():
            run.losses.append(event.loss)
            yield from _counted(run, event.iter, event.seconds)
            yield _retraced(event, run.planned.until) if run.planned.until is not None else event
            yield from proofs.after_iteration() if proofs is not None else ()
            if snapshotter is not None:
                yield from snapshotter.finished()
                yield from _warned(run, snapshotter, event.seconds, pushing)
                snapshotter.keeper.require_not_lost()  # the others then find rank 0 gone
        case NotFinite():
            if event.done == OnNan.SKIP.value:
                yield from _counted(run, state.iter, event.seconds)
                yield from proofs.after_iteration() if proofs is not None else ()
                if snapshotter is not None:
                    snapshotter.keeper.require_not_lost()
            if event.done != OnNan.ROLLBACK.value:  # then it is reported with what it goes back to
                yield replace(event, keys=keys_of(run, event), until=run.planned.until)
        case Note():
            yield event
        case Synchronised():
            if run.planned.until is None:
                yield event
        case SnapshotDue():
            yield event
            yield from run.worker.images.replacing(run.stage).news_of_all(run.worker.comm)
            yield from _begin_snapshot(run, state, snapshotter)
        case TestDue():
            yield event
            scores = yield from test(run, state, run.stage.solver.test_iter)
            if scores is None:
                stopped, reason = True, "asked to stop; its evaluation comes first when the run goes on"
            else:
                state.tested = iter
                yield from decide(run, state, scores.trained)
    if stopped:
        if run.stage.solver.on_nan is OnNan.ROLLBACK and not finite(state):
            # The update overflowed, and no loss has shown it yet. There is nothing to keep: the next process comes by there once more,
            # from the snapshot before, and goes back as this one would have.
            iter = max(run.saved, run.planned.iter)
            reason = f"{reason}; what came after it has overflowed, and is not kept"
            yield from run.worker.images.replacing(run.stage).news_of_all(run.worker.comm)
            if snapshotter is not None:
                with run.worker.comm.pulse.section(Section.SAVE):
                    yield from snapshotter.wait()
                iter = snapshotter.newest.iter if snapshotter.newest is not None else run.planned.iter
        elif state.iter:
            yield from _save(run, state, snapshotter)
        else:  # the next process starts the stage as this one has
            yield from run.worker.images.replacing(run.stage).news_of_all(run.worker.comm)
        yield Stopped(stage=run.stage.name, iter=iter, reason=reason)
    return stopped


def _counted(run: StageRun, iter: int, seconds: float) -> Iterator[Note]:
    """Counts an iteration; yields what the monitor wants the user to know."""
    pulse = run.worker.comm.pulse
    run.seconds += seconds
    pulse.iterated(iter, seconds)
    while pulse.news:
        yield Note(text=pulse.news.popleft(), warning=True)


def _warned(
    run: StageRun, snapshotter: Snapshotter, iteration_s: float, pushing: Asynchronous | None
) -> Iterator[Note]:
    stopping = run.worker.stopping
    stopping.snapshot_s = max(stopping.snapshot_s, snapshotter.slowest)
    if pushing is None:
        note = stopping.warning(iteration_s / len(_own(run)), "a device batch")
    else:  # what a replica has begun it finishes; events come as often as all of them together have one
        note = stopping.warning(pushing.iteration_s, "an iteration of one replica")
    if note:
        yield note


def _retraced(event: Iterated, until: int) -> Retraced:
    return Retraced(
        stage=event.stage,
        iter=event.iter,
        until=until,
        lr=event.lr,
        loss=event.loss,
        images=event.images,
        seconds=event.seconds,
        sent_bytes=event.sent_bytes,
    )


def _begin_snapshot(
    run: StageRun, state: TrainState, snapshotter: Snapshotter | None, alone: bool = False
) -> Iterator[SnapshotWritten | SnapshotFailed | Note]:
    """Collective, unless `alone`: then the other ranks may be gone, and nothing is compared with theirs."""
    notes: list[Note] = []
    with run.worker.comm.pulse.section(Section.SAVE):
        if state.replicas is not None:
            state.replicas.show()
        if snapshotter is not None:

            def agreeing(found: Mapping[str, int]) -> bool:
                # What the others look at is what rank 0 has, unless their states may differ.
                return agree(
                    run,
                    state.iter,
                    notes,
                    {**found, **_beside(state)},
                    not run.worker.others or snapshotter.capture.finite(),
                )

            def gather() -> None:
                if (residual := saved_residual(state)) is not None:
                    snapshotter.capture.take_residual(residual, run.worker.comm)
                else:
                    snapshotter.capture.residual = None
                if state.replicas is not None:
                    snapshotter.capture.take_replicas(state.replicas, state.iter)

            compared = None if alone or run.worker.comm.size == 1 else agreeing
            try:
                yield from snapshotter.start(state.iter, _progress(run, state), compared, gather)
            except StagerunError:
                yield from snapshotter.wait()
                raise
        else:
            if (residual := saved_residual(state)) is not None:
                residual.gather(run.worker.comm, None)
            if state.replicas is not None and state.replicas.differ(state.iter):
                state.replicas.gather(None)
            found, good = digests(state)
            if not agree(run, state.iter, notes, {**found, **_beside(state)}, good):
                raise ToldByAnother(ExitCode.DIVERGED)
    run.said_ended = state.best.ended
    run.saved = state.iter  # not before: what a peer's death keeps from being compared is still to be saved
    yield from notes


def _beside(state: TrainState) -> dict[str, int]:
    """What is equal on all ranks besides the state itself."""
    parted = state.replicas is not None and state.replicas.differ(state.iter)
    return digests_common(state) | (state.replicas.digests if parted and state.replicas is not None else {})


def _progress(run: StageRun, state: TrainState) -> Progress:
    solver = run.stage.solver
    return Progress(
        run.planned.position + run.planned.skipped + state.iter * solver.batch_size,
        run.seconds,
        list(run.losses),
        run.worker.images.replacing(run.stage).known(),
        state.plateau if solver.lr_policy == "plateau" else None,
        skips=state.skips,
        skips_in_all=state.skips_in_all,
        rollbacks=state.rollbacks,
        choice=dict(run.choice),
        weights=run.weights,
        best=state.best if solver.early_stop is not None else None,
        bad_beside=run.worker.images.bad_beside(run.stage),
        proof=run.proof,
        tested=state.tested,
    )


def _save_what_is_trained(
    run: StageRun, state: TrainState, snapshotter: Snapshotter | None
) -> Iterator[SnapshotWritten | SnapshotFailed | Note]:
    """On rank 0, after images that can't be used, a disk that fails, or a peer that is gone, perhaps because it met such.

    `state` is that of the last whole update: the images of an update, and the sum of all gradients, come before anything of it
    is applied. No rank waits for another here; what keeps the snapshot from being written is less than what went wrong before.

    Not the end of a stage (or a piece) that replaces bad records: that counts as finished, and must not before the ranks have
    heard from each other what they met and found it few enough. Nor where residuals or replicas belong to the snapshot, which the others
    have: without them training would go on to other bits than from the snapshot before. RuntimeError is torch's, of a GPU.
    """
    if run.worker.images.replacing(run.stage).met is not None and (state.iter == run.last or state.best.ended):
        return
    if snapshotter is None or run.saved == state.iter or state.iter == run.planned.iter:
        return
    if run.stage.solver.asynchronous:  # between two boundaries there is no one state
        return
    parted = state.replicas is not None and state.replicas.parted
    if (state.residual is not None or parted) and run.worker.comm.size > 1:
        at = max(run.saved, run.planned.iter)
        text = f"what was trained since iteration {at} is not saved: it needs the residuals or replicas of all workers"
        yield Note(text=text, warning=True)
        return
    with suppress(StagerunError, RuntimeError), run.worker.comm.pulse.section(Section.SAVE):
        yield from _begin_snapshot(run, state, snapshotter, alone=True)
        yield from snapshotter.wait()


def _save(
    run: StageRun, state: TrainState, snapshotter: Snapshotter | None
) -> Iterator[SnapshotWritten | SnapshotFailed | Note]:
    """Returns when the snapshot of the present iteration is on disk. Collective; StorageError on rank 0 if it can't be, and
    DataError, before it is started, if all ranks together have met too many bad records."""
    yield from run.worker.images.replacing(run.stage).news_of_all(run.worker.comm)
    # One that a stop made there doesn't say that the stage ends there.
    unsaid = state.best.ended and not run.said_ended
    if unsaid and snapshotter is not None:
        snapshotter.newest = None
    if unsaid or run.saved != state.iter:
        yield from _begin_snapshot(run, state, snapshotter)
    if snapshotter is not None:
        with run.worker.comm.pulse.section(Section.SAVE):
            yield from snapshotter.wait()

    def name() -> str:
        assert snapshotter is not None
        return snapshotter.require(state.iter).name

    rank0(run.worker.comm, name)
