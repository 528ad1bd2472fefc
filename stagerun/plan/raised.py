"""Stages whose `max_iter` was changed: whether what was trained before is the beginning of what the stage trains now. Pure."""

from collections.abc import Iterator
from dataclasses import replace

from stagerun.base.recipe import OnNan, Solver, Stage
from stagerun.base.snapshots import SnapshotRef
from stagerun.schedule import learning_rate

MAX_ITER = "solver.max_iter"


def length_before(ref: SnapshotRef, stage: Stage) -> int | None:
    """The `max_iter` that a snapshot was made with, where the stage has another now."""
    text = ref.identity.get(MAX_ITER, "")
    known = text.isascii() and text.isdigit() and len(text) <= 18
    return int(text) if known and int(text) != stage.solver.max_iter else None


def goes_beyond(ref: SnapshotRef, stage: Stage) -> bool:
    """Return whether the snapshot was the final one of an earlier, shorter version of the stage."""
    return not ref.ended and ref.iter == length_before(ref, stage) and ref.iter < stage.solver.max_iter


def on_the_way(ref: SnapshotRef, stage: Stage) -> bool:
    """Return whether training the stage now reproduces a snapshot that differs from it in `max_iter` alone."""
    return length_before(ref, stage) is not None and not what_differs(ref, stage)


def what_differs(ref: SnapshotRef, stage: Stage) -> str:
    """Say why training the stage now does not reproduce such a snapshot of a shorter or longer version; '' if it does."""
    before, now = length_before(ref, stage), stage.solver.max_iter
    if before is None:
        return ""
    if before > now and (ref.iter >= now or ref.ended):
        return f"it was trained to iteration {ref.iter}, and would end at {now}"  # which does more than a snapshot in its midst
    ended = _done_by_end(stage.solver, before) if goes_beyond(ref, stage) else ""
    # In the midst, too: it may have gone back from the end, and not be there again.
    if stage.solver.on_nan is OnNan.ROLLBACK and ref.skipped and not ended:
        ended = f"`on_nan: ROLLBACK` has left out images, and does so in another way at the end, iteration {min(before, now)}"
    return next(_readers(stage.solver, before), ended)


def what_end_differs(solver: Solver, before: int) -> str:
    """The same of the end of a stage that was trained to `before`, and is otherwise as it is."""
    return next(_readers(solver, before), _done_by_end(solver, before))


def _readers(solver: Solver, before: int) -> Iterator[str]:
    """What is another function of the iteration with `max_iter` as it is than with `before`, in words. Policies are values: equal ones
    have equal settings."""
    old = replace(solver, max_iter=before)
    if learning_rate(old) != learning_rate(solver):
        yield f"lr_policy `{solver.lr_policy}` reads max_iter"


def _done_by_end(solver: Solver, before: int) -> str:
    """What the end of a stage did to its state, that an iteration in its midst doesn't do, in words. An evaluation there that
    `early_stop` goes by comes when the stage goes on."""
    if solver.sync is not None:
        return f"its replicas became one at its end, iteration {before}"
    return ""
