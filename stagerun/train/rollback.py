"""`on_nan: ROLLBACK`: from an iteration that failed back to a snapshot, and on with other images; and which images those were.

What is known at the iteration that failed (how often it came to that, which images are left out) is in no snapshot before the
next one. A run that is killed in between does the iterations before it once more, fails there once more, and comes to the same.

Where the snapshot to go back to is damaged or gone, the run goes back to the one before it, and is EQUIVALENT only.
"""

from collections import deque
from collections.abc import Generator
from dataclasses import replace
from typing import Any

from stagerun import store
from stagerun.base.errors import Diverged
from stagerun.base.events import Event, Note, NotFinite
from stagerun.base.snapshots import SnapshotRef
from stagerun.data.lmdb_offsets import printable
from stagerun.data.sampling import order_of
from stagerun.plan import State
from stagerun.plan.counting import place, targets
from stagerun.system.pulse import Section
from stagerun.train.agreement import rank0
from stagerun.train.stage_start import parent_id
from stagerun.train.stored import most_for
from stagerun.train.worker import LOSS_WINDOW, StageRun


def keys_of(run: StageRun, failed: NotFinite) -> tuple[str, ...]:
    """The keys of the iteration's images, over all ranks, in the order of their positions; on rank 0, which alone reports them."""
    if run.worker.comm.rank != 0:
        return ()
    records = run.worker.images.training(run.stage)
    indices = order_of(records, run.worker.schedule, run.stage).at(failed.position, failed.images)
    return tuple(printable(records.key(int(i))) for i in indices)


def gone_back(run: StageRun, failed: NotFinite) -> Generator[Event, None, StageRun]:
    """The stage's run as it goes on after `failed`. Collective; no snapshot may be under way. Diverged if there is nothing to go back to
    since the snapshot that the stage started from is gone or damaged."""
    worker, planned, solver = run.worker, run.planned, run.stage.solver
    worker.comm.pulse.enter(Section.START)  # for the others: rank 0 reads and verifies
    ref: SnapshotRef | None = None  # and its verified files: on rank 0, None there for the seed
    files: dict[str, bytes] | None = None
    notes: list[Note] = []

    def choose() -> list[Any]:
        nonlocal ref, files
        ref, files, own = _choose(run, failed.iter, failed.what, notes)
        return [own, ref.iter if ref is not None and own else run.stage.begins]

    own, back_to = rank0(worker.comm, choose)
    yield from notes
    start = ref.name if ref is not None else f"seed {solver.random_seed}"
    wanted = max(run.stage.begins, place(failed.iter, solver.snapshot, worker.schedule.branch_points(run.stage.name)))
    if back_to != wanted:
        text = (
            f"{run.stage.name}: {failed.what} at iteration {failed.iter}; the snapshot to go back to, of {wanted}, is damaged or gone: "
            f"what follows from {back_to} is EQUIVALENT, not BIT-EXACT, to a run in which it is there"
        )
        yield Note(text=text, warning=True)
    yield replace(failed, keys=keys_of(run, failed), back_to=back_to, snapshot=start, until=planned.until)
    return replace(
        run,
        planned=replace(
            planned,
            state=State.RESUME if own else State.FRESH,
            iter=back_to,
            start=ref,
            skipped=planned.skipped + (failed.iter + 1 - back_to) * solver.batch_size,
            # The ids of a stage that was renamed go on with its first name, also from its start.
            like=planned.like or (planned.start if planned.state is State.RESUME else None),
        ),
        files=files,
        iterations_left=run.iterations_left + planned.iter - back_to,
        losses=deque(maxlen=LOSS_WINDOW),
        seconds=0.0,
        # It is on disk, and under its name there can be no other of this life.
        saved=back_to if own else -1,
        rollbacks=failed.number,
    )


def _choose(
    run: StageRun, iter: int, what: str, notes: list[Note]
) -> tuple[SnapshotRef | None, dict[str, bytes] | None, bool]:
    """Rank 0's: the snapshot (None: the seed), its verified files, and whether it is one of the stage itself."""
    keeper, planned, stage = run.worker.keeper, run.planned, run.stage
    assert keeper is not None
    branches, parent = run.worker.schedule.branch_points(stage.name), parent_id(planned)
    for name in keeper.inventory().damaged:
        parsed = store.parse_name(name)
        # Training may come by there once more, and need the name.
        if parsed is not None and parsed.stage == stage.name and keeper.is_harmed(stage.name, name):
            keeper.require_held()
            notes.append(aside(name, store.set_aside(keeper.disk, keeper.out, name)))
    while True:
        known = keeper.inventory()
        own = targets(known, stage, branches, parent, planned.skipped, iter)
        start = next((ref for ref in known.snapshots if ref.id == parent), None)
        if not own and parent and start is None:
            raise Diverged(
                f"in stage `{stage.name}` {what} at iteration {iter}, and there is nothing to go back to: the "
                "snapshot that the stage started from is gone",
                "train the stage before it again, or write `on_nan: SKIP`",
            )
        ref = own[0] if own else start
        going_on = replace(planned, state=State.RESUME if own else State.FRESH)
        files = keeper.read(ref, most_for(run.worker.schedule, going_on)) if ref is not None else None
        if ref is None or files is not None:
            return ref, files, bool(own)
        notes.append(aside(ref.name, f".bad-{ref.name}"))


def aside(name: str, now: str) -> Note:
    """The warning about a snapshot that is called `now` from here on."""
    return Note(text=f"snapshot {name} is damaged and was set aside as {now}", warning=True)
