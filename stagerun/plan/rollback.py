"""Where `on_nan: ROLLBACK` goes back to. Pure."""

from collections.abc import Collection

from stagerun.plan.counting import changed_fields
from stagerun.recipe import Stage
from stagerun.snapshots import Inventory, SnapshotRef, how_far


def scheduled(iter: int, every: int, branches: Collection[int]) -> bool:
    """Whether a run that nothing interrupts has a snapshot of the stage there. One that a stop made at such a place is as good."""
    return iter in branches or (every > 0 and iter > 0 and iter % every == 0)


def place(iter: int, every: int, branches: Collection[int]) -> int:
    """The iteration that a run which fails after `iter` updates goes back to, if nothing is lost; 0: the stage's start.

    Also where it has gone back before: the way that it is on began at such a place, at or before `iter`, and no later one lies
    between them.
    """
    return max([iter - iter % every if every else 0, *(branch for branch in branches if branch <= iter)])


def targets(
    inventory: Inventory,
    stage: Stage,
    branches: Collection[int],
    parent: str,
    skipped: int,
    iter: int,
    like: SnapshotRef | None = None,
) -> tuple[SnapshotRef, ...]:
    """The snapshots that a stage in training at `iter`, with `skipped` images left out so far, may go back to: the first is the one
    to take, the others stand in for it. None: back to the stage's start.

    Snapshots at other places than scheduled ones are passed over: they are there only where somebody stopped the run, and the
    bits must not depend on that. `parent` is the id of what the stage started from. `like`: the one it went on from, of a stage that
    is kept though its definition has changed.
    """

    def its_own(ref: SnapshotRef) -> bool:
        same = not changed_fields(ref, stage) or (like is not None and ref.identity == like.identity)
        return ref.parent == parent and same and (ref.skipped, ref.iter) <= (skipped, iter)

    every = stage.solver.snapshot
    own = [ref for ref in inventory.of(stage.name) if scheduled(ref.iter, every, branches) and its_own(ref)]
    return tuple(sorted(own, key=how_far, reverse=True))
