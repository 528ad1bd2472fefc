"""`on_nan: ROLLBACK`: from an iteration that failed back to a snapshot, and on with other images.

What is known at the iteration that failed (how often it came to that, which images are left out) is in no snapshot before the
next one. A run that is killed in between does the iterations before it once more, fails there once more, and comes to the same.

Where the snapshot to go back to is damaged or gone, the run goes back to the one before it, and is EQUIVALENT only.
"""

from collections import deque
from collections.abc import Generator
from dataclasses import replace
from typing import Any, NamedTuple

from stagerun import store
from stagerun.base.errors import Diverged
from stagerun.base.events import Event, Note, NotFinite
from stagerun.base.snapshots import SnapshotRef
from stagerun.plan import State
from stagerun.plan.counting import place, targets
from stagerun.system.pulse import Section
from stagerun.train.agreement import rank0
from stagerun.train.context import LOSS_WINDOW, StageRun
from stagerun.train.hooks.report import keys_of
from stagerun.train.snapshot_sizes import most_for


class _Target(NamedTuple):
    """The snapshot to go back to, None for the seed, with its verified files, and whether it is one of the stage itself; rank 0's."""

    ref: SnapshotRef | None = None
    files: dict[str, bytes] | None = None
    own: bool = False


def go_back(run: StageRun, failed: NotFinite) -> Generator[Event, None, StageRun]:
    """Return the stage's run as it goes on after `failed`. Collective; no snapshot may be under way, and the state that failed is gone: the
    snapshot is read again. Diverged if that which the stage started from is gone or damaged, and there is no other."""
    worker, planned, solver = run.worker, run.planned, run.stage.solver
    worker.comm.pulse.enter(Section.START)  # for the others: rank 0 reads and verifies
    target, notes = _Target(), list[Note]()

    def choose() -> list[Any]:
        nonlocal target
        target = _choose(run, failed, notes)
        return [target.own, target.ref.iter if target.ref is not None and target.own else run.stage.begins]

    own, back_to = rank0(worker.comm, choose)
    yield from notes
    wanted = max(run.stage.begins, place(failed.iter, solver.snapshot, worker.schedule.branch_points(run.stage.name)))
    if back_to != wanted:
        text = (
            f"{run.stage.name}: {failed.what} at iteration {failed.iter}; the snapshot to go back to, of {wanted}, is damaged or gone: "
            f"what follows from {back_to} is EQUIVALENT, not BIT-EXACT, to a run in which it is there"
        )
        yield Note(text=text, warning=True)
    start = target.ref.name if target.ref is not None else f"seed {solver.random_seed}"
    yield replace(failed, keys=keys_of(run, failed), back_to=back_to, snapshot=start, until=planned.until)
    return replace(
        run,
        planned=replace(
            planned,
            state=State.RESUME if own else State.FRESH,
            iter=back_to,
            start=target.ref,
            skipped=planned.skipped + (failed.iter + 1 - back_to) * solver.batch_size,
            # The ids of a stage that was renamed go on with its first name, also from its start.
            like=planned.like or (planned.start if planned.state is State.RESUME else None),
        ),
        files=target.files,
        iterations_left=run.iterations_left + planned.iter - back_to,
        losses=deque(maxlen=LOSS_WINDOW),
        seconds=0.0,
        rollbacks=failed.number,
    )


def _choose(run: StageRun, failed: NotFinite, notes: list[Note]) -> _Target:
    """Rank 0's. What is damaged is set aside, and noted."""
    keeper, planned, stage = run.worker.keeper, run.planned, run.stage
    assert keeper is not None
    branches, parent = run.worker.schedule.branch_points(stage.name), run.parent_id
    for name in keeper.inventory().damaged:
        parsed = store.parse_name(name)
        # Training may come by there once more, and need the name.
        if parsed is not None and parsed.stage == stage.name and keeper.is_harmed(stage.name, name):
            keeper.require_held()
            notes.append(was_set_aside(name, store.set_aside(keeper.disk, keeper.out, name)))
    while True:
        known = keeper.inventory()
        own = targets(known, stage, branches, parent, planned.skipped, failed.iter)
        start = next((ref for ref in known.snapshots if ref.id == parent), None)
        if not own and parent and start is None:
            raise Diverged(
                f"in stage `{stage.name}` {failed.what} at iteration {failed.iter}, and there is nothing to go back to: the "
                "snapshot that the stage started from is gone",
                "train the stage before it again, or write `on_nan: SKIP`",
            )
        ref = own[0] if own else start
        going_on = replace(planned, state=State.RESUME if own else State.FRESH)
        files = keeper.read(ref, most_for(run.worker.schedule, going_on)) if ref is not None else None
        if ref is None or files is not None:
            return _Target(ref, files, bool(own))
        notes.append(was_set_aside(ref.name))


def was_set_aside(name: str, now: str = "") -> Note:
    """The warning about a damaged snapshot that is called `now` from here on."""
    return Note(text=f"snapshot {name} is damaged and was set aside as {now or f'.bad-{name}'}", warning=True)
