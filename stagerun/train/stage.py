"""A stage on one worker.

    start       the state comes from a snapshot, or the seed (`start_stage`)
    train       for event in the engine's loop: update done, snapshot or evaluation due, stop requested
                    each hook sees the event in turn (`hooks_of`); each hook is one feature of a stage
    save        the last snapshot is on disk before the stage is evaluated
    evaluate    the result is written to OUT/results (`finish_stage`)

All workers do this together, and yield the same events except the events of rank 0 alone. Every rank has every hook; only rank 0 writes
to disk. If another worker is killed, rank 0 notices (PeerError), saves the state after the last update, and the run ends; if rank 0 is killed,
the training after the newest snapshot is lost. The next run resumes from that snapshot; after the last one, it only evaluates.

To do something at each iteration, or each evaluation inside a stage, write a hook: a class whose `on` looks for Iterated or Evaluated
(`hooks.Hook`). Put it into the list of `hooks_of`, after the hook whose events it wants to see. The evaluation at the end of a stage passes
no hook: what concerns each evaluation belongs in `hooks.evaluations.evaluate_state`, which makes them all.
"""

from collections.abc import Generator, Iterator
from contextlib import closing
from functools import partial

from stagerun.base.errors import DataError, PeerError, PermissionDenied, StorageError, UsageError
from stagerun.base.events import Event, NotFinite, Stopped
from stagerun.base.recipe import OnNan
from stagerun.system.pulse import Section
from stagerun.train.context import StageRun
from stagerun.train.finish import finish_stage
from stagerun.train.hooks import Counted, EarlyStop, Hook, Proofs, Reported, pass_through
from stagerun.train.hooks.evaluations import Evaluations
from stagerun.train.hooks.snapshots import Snapshots
from stagerun.train.next_step import go_back
from stagerun.train.resident import images_on_device, training_batches
from stagerun.train.stage_start import Started, start_stage


def train_stage(run: StageRun) -> Iterator[Event]:
    """Train the rest of the stage, and evaluate it; a piece (a stretch that is retrained) is not evaluated. Collective; ends early
    after a Stopped."""
    while (failed := (yield from _train(run))) is not None:
        run.worker.comm.pulse.enter(Section.START)  # for the other ranks: rank 0 reads and verifies
        run = yield from go_back(run, failed)  # `on_nan: ROLLBACK`


def hooks_of(run: StageRun, started: Started, proofs: Proofs, snapshots: Snapshots) -> list[Hook]:
    """Return the hooks, in the order in which they see an event."""
    state, profile = started.state, run.worker.profile
    hooks: list[Hook] = [
        Counted(run),  # losses and seconds; a heartbeat for the monitor
        proofs,
        Evaluations(run, state),
        EarlyStop(run, state),  # decides on evaluations
        snapshots,  # after evaluations: one may end the stage, or be interrupted
        Reported(run),  # turns events into those of the log
    ]
    if profile is not None and not run.stage.solver.asynchronous:
        hooks.insert(0, profile)
    return hooks


def _train(run: StageRun) -> Generator[Event, None, NotFinite | None]:
    """Train to the stage's end. Return the failure that asks for a rollback, otherwise None (also after a Stopped)."""
    comm, images = run.worker.comm, run.worker.images
    comm.pulse.enter(Section.START)
    started = yield from start_stage(run)
    if started is None:
        return None
    state, exchange = started.state, started.exchange
    proofs = Proofs(run, state, started.loop)
    snapshots = Snapshots(run, started, proofs)
    hooks = hooks_of(run, started, proofs, snapshots)
    run.files = None  # the state was made from them
    try:
        resident = yield from images_on_device(run)
        comm.pulse.stage(run.stage.name, state.iter, run.stage.solver.compile)
        yield from proofs.at_start()
        with closing(exchange.train(run.worker, partial(training_batches, run, resident))) as events:
            for event in events:
                if isinstance(event, NotFinite) and event.done == OnNan.ROLLBACK.value:
                    yield from snapshots.wait()
                    return event
                for seen in pass_through(hooks, event):
                    yield seen
                    if isinstance(seen, Stopped):  # everything is saved
                        return None
                yield from images.copied(comm)
        last_snapshot = yield from snapshots.save()
    except (DataError, StorageError, PermissionDenied, PeerError, UsageError):  # UsageError: out of memory
        yield from snapshots.rescue()
        raise
    finally:
        for _ in snapshots.wait():  # after an error nobody reads the events
            pass
        state.exchange = None  # a cycle, which would keep the memory of a GPU
    yield from images.copied(comm, all_nodes=True)
    if not run.is_piece and run.last == run.planned.last:
        yield from finish_stage(run, state, last_snapshot)
    return None
