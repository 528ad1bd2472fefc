"""Snapshots that are gone, that stages came from which still count, and that are trained once more. Pure.

Such a stage counts since its parent, unchanged, comes to the same bits again (`counting.counts`): in the same environment. In
another one it comes to others, and the stage is stale from then on. So that is said, and asked, before anything is trained.
"""

from collections.abc import Collection, Iterable, Mapping

from stagerun.plan.counting import Source
from stagerun.plan.planned import Lost, PlannedStage, State
from stagerun.snapshots import SnapshotRef


def lost_points(
    planned: Mapping[str, PlannedStage],
    pieces: Iterable[PlannedStage],
    usable: Mapping[str, tuple[SnapshotRef, ...]],
    sources: Mapping[str, Source | None],
    named: Collection[str],
) -> tuple[Lost, ...]:
    """Those that this plan trains again, on a stage's own way or in a piece of it. `planned` has all stages, in running order;
    `usable` and `sources` are by stage."""
    children: dict[tuple[str, int | None], list[str]] = {}
    for name, child in planned.items():
        source = sources[name]
        if source is not None and not source.at and usable[name] and child.state is not State.DISABLED:
            children.setdefault((source.parent.stage.name, child.stage.parent_iter), []).append(name)
    work = [w for w in (*pieces, *planned.values()) if w.iterations_left]
    found: list[Lost] = []
    for (name, parent_iter), names in children.items():
        parent = planned[name]
        iter = parent.stage.solver.max_iter if parent_iter is None else parent_iter
        again = next((w for w in work if w.stage.name == name and w.iter < iter <= w.last), None)
        if again is not None:
            asked = tuple(n for n in names if n in named)
            like = _like(again, [ref for n in names for ref in usable[n]])
            found.append(Lost(name, iter, parent_iter is None, tuple(names), asked, like))
    return tuple(found)


def _like(again: PlannedStage, below: Iterable[SnapshotRef]) -> SnapshotRef | None:
    """The snapshot that tells in what environment the stage was trained before. Of a stage of which nothing is left it may be
    one of what came from it (`below`): if that was trained in the life in which the stage was started, so was all between."""
    if again.until is not None:
        return again.like
    if again.state is State.RESUME:
        return again.start
    begun = None if again.start is None else again.start.attempt
    return next((ref for ref in below if ref.attempt == begun or _first_life(ref)), None)


def _first_life(ref: SnapshotRef) -> bool:
    """Whether the life that wrote it has trained all that it came from. Before snapshots were numbered in each life, those of the
    first life of a folder had attempt 1, as they alone; since then every life has a number, be it without a snapshot."""
    return ref.began_empty or (ref.attempt == 1 and not ref.serial)
