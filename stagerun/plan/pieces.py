"""Stretches of a stage that are trained once more, for a snapshot that others start from; lost snapshots. Pure.

A stage saves what its children start from on its way. Where a child was thought of later, or the snapshot is gone, the stage
has passed that place already: then it is trained again from the newest of its snapshots before that, or from its start, up to
there and no further. Its other snapshots and its end stay as they are.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from stagerun.base.snapshots import SnapshotRef, how_far
from stagerun.plan.counting import Decision
from stagerun.plan.planned import Lost, PlannedStage, State


def pieces(decided: Mapping[str, Decision], missing: Iterable[tuple[str, str, int]]) -> tuple[PlannedStage, ...]:
    """In running order, as the decisions are. `missing`: ensemble, stage and iteration of each snapshot that an ensemble lacks."""
    wanted: dict[str, dict[int, list[str]]] = {}  # by stage and iteration, who starts there
    for ensemble, above, iter in missing:
        if has_passed(decided[above].shown, iter):
            wanted.setdefault(above, {}).setdefault(iter, []).append(ensemble)
    found: list[PlannedStage] = []
    # Children first: a piece from a stage's start may need a piece of the stage above.
    for decision in reversed(list(decided.values())):
        name, begins = decision.shown.stage.name, decision.shown.state is State.FRESH
        if name in wanted:
            made = _of(decision, wanted[name])
            begins = begins or made[0].state is State.FRESH
            found = [*made, *found]
        source, leaves = decision.source, decision.shown.stage.parent_iter
        if begins and leaves is not None and source is not None and not source.at:
            parent = source.parent.stage.name
            if has_passed(decided[parent].shown, leaves):
                wanted.setdefault(parent, {}).setdefault(leaves, []).insert(0, name)
    return tuple(found)


def has_passed(parent: PlannedStage, iter: int) -> bool:
    """Return whether the stage is past that iteration, so that going on doesn't reach it any more."""
    return parent.state in (State.DONE, State.RESUME, State.NOT_CHOSEN) and parent.iter >= iter


def _of(decision: Decision, points: Mapping[int, list[str]]) -> list[PlannedStage]:
    stage, source, usable = decision.shown, decision.source, decision.usable
    made: list[PlannedStage] = []
    for point in sorted(points):
        before = [ref for ref in usable if ref.iter < point]
        newest = max(before, key=how_far, default=None)
        children = tuple(points[point])
        if made and made[-1].until is not None and (newest.iter if newest else 0) <= made[-1].until:
            made[-1] = replace(made[-1], until=point, children=made[-1].children + children)
            continue
        again = replace(
            stage,
            state=State.FRESH if newest is None else State.RESUME,
            iter=newest.iter if newest else 0,
            skipped=newest.skipped if newest else stage.skipped_before,
            start=newest or (source.start if source else None),
            until=point,
            children=children,
            like=_first_behind(point, usable),
        )
        made.append(replace(again, end=None, why="", changes=(), again=False))
    return made


def _first_behind(point: int, usable: tuple[SnapshotRef, ...]) -> SnapshotRef | None:
    """The snapshot on the stage's own way that is nearest behind `point`, where there is none: it shows in what environment the stage was
    trained there, which the one before it does not where another life went on. What came in a life after the newest is of
    other pieces."""
    newest = max(usable, key=lambda ref: (ref.iter, ref.attempt), default=None)
    behind = [ref for ref in usable if newest is not None and ref.iter >= point and ref.attempt <= newest.attempt]
    return min(behind, key=lambda ref: (ref.iter, ref.attempt), default=None)


# -- snapshots that are gone, and from which stages came that still count
#
# Such a stage counts because its parent, unchanged, comes to the same bits again (`counting.counts`), in the same environment.
# In another one it comes to others, and the stage is stale from then on. So `run` says that, and asks, before it trains anything.


def lost_points(decided: Mapping[str, Decision], pieces: Iterable[PlannedStage]) -> tuple[Lost, ...]:
    """Return the lost snapshots that this plan reproduces, by training a stage or a piece of one. The decisions are in running order."""
    children: dict[tuple[str, int | None], list[str]] = {}
    for name, child in decided.items():
        if not child.usable or child.shown.state is State.DISABLED:
            continue
        source, at = child.source, child.shown.stage.parent_iter
        gone = list(child.lacking)
        nowhere = source is not None and not (source.at or source.alike)
        if source is not None and nowhere and (at is not None or source.parent.comes_to_the_same_end):
            gone.insert(0, (source.parent.stage.name, at))
        for place in dict.fromkeys(gone):
            children.setdefault(place, []).append(name)
    if not children:
        return ()
    work = [w for w in (*pieces, *(one.shown for one in decided.values())) if w.iterations_left]
    found: list[Lost] = []
    for (name, parent_iter), names in children.items():
        iter = decided[name].shown.stage.solver.max_iter if parent_iter is None else parent_iter
        again = next((w for w in work if w.stage.name == name and w.iter < iter <= w.last), None)
        if again is not None:
            asked = tuple(n for n in names if decided[n].redo)
            like = _like(again, [ref for n in names for ref in decided[n].usable])
            found.append(Lost(name, iter, parent_iter is None, tuple(names), asked, like))
    return tuple(found)


def _like(again: PlannedStage, below: Iterable[SnapshotRef]) -> SnapshotRef | None:
    """The snapshot that shows in what environment the stage was trained before. If nothing of the stage is left, it may be
    one of a stage that came from it (`below`): if that was trained in the life in which the stage was started, so was all between."""
    if again.until is not None:
        return again.like
    if again.state is State.RESUME:
        return again.start
    life = None if again.start is None else again.start.attempt
    return next((ref for ref in below if ref.attempt == life or _first_life(ref)), None)


def _first_life(ref: SnapshotRef) -> bool:
    """Whether the life that wrote it has trained all that it came from. Before snapshots were numbered in each life, those of the
    first life of a folder had attempt 1, as they alone; since then every life has a number, be it without a snapshot."""
    return ref.began_empty or (ref.attempt == 1 and not ref.serial)
