"""Stretches of a stage that are trained once more, for a snapshot that others start from; lost snapshots. Pure.

A stage saves what its children start from on its way. Where a child was thought of later, or the snapshot is gone, the stage
has passed that place already: then it is trained again from the newest of its snapshots before that, or from its start, up to
there and no further. Its other snapshots and its end stay as they are.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from stagerun.base.snapshots import SnapshotRef, how_far
from stagerun.plan.counting import Source
from stagerun.plan.planned import Lost, PlannedStage, State


def pieces(
    planned: Mapping[str, PlannedStage],
    usable: Mapping[str, tuple[SnapshotRef, ...]],
    sources: Mapping[str, Source | None],
    missing: Iterable[tuple[str, str, int]] = (),
) -> tuple[PlannedStage, ...]:
    """In running order. `planned` has all stages, in that order; `usable` and `sources` are by stage. `missing`: ensemble, stage and
    iteration of each snapshot that an ensemble lacks."""
    wanted: dict[str, dict[int, list[str]]] = {}  # by stage and iteration, who starts there
    for ensemble, above, iter in missing:
        if has_passed(planned[above], iter):
            wanted.setdefault(above, {}).setdefault(iter, []).append(ensemble)
    found: list[PlannedStage] = []
    # Children first: a piece from a stage's start may need a piece of the stage above.
    for stage in reversed(list(planned.values())):
        name = stage.stage.name
        begins = stage.state is State.FRESH
        if name in wanted:
            made = _of(stage, wanted[name], usable[name], sources[name])
            begins = begins or made[0].state is State.FRESH
            found = [*made, *found]
        parent, leaves, source = stage.stage.parent, stage.stage.parent_iter, sources[name]
        waits = begins and source is not None and not source.at
        if waits and parent is not None and leaves is not None and has_passed(planned[parent], leaves):
            wanted.setdefault(parent, {}).setdefault(leaves, []).insert(0, name)
    return tuple(found)


def has_passed(parent: PlannedStage, iter: int) -> bool:
    """Whether the stage has that iteration behind it, so that it doesn't come by there any more."""
    return parent.state in (State.DONE, State.RESUME, State.NOT_CHOSEN) and parent.iter >= iter


def _of(
    stage: PlannedStage, points: Mapping[int, list[str]], usable: tuple[SnapshotRef, ...], source: Source | None
) -> list[PlannedStage]:
    made: list[PlannedStage] = []
    for point in sorted(points):
        before = [ref for ref in usable if ref.iter < point]
        newest = max(before, key=how_far, default=None)
        children = tuple(points[point])
        if made and made[-1].until is not None and (newest.iter if newest else 0) <= made[-1].until:
            made[-1] = replace(made[-1], until=point, children=made[-1].children + children)
            continue
        made.append(
            PlannedStage(
                stage=stage.stage,
                state=State.FRESH if newest is None else State.RESUME,
                iter=newest.iter if newest else 0,
                position=stage.position,
                at_most=stage.at_most,
                skipped=newest.skipped if newest else stage.skipped_before,
                skipped_before=stage.skipped_before,
                start=newest or (source.start if source else None),
                until=point,
                children=children,
                like=_first_behind(point, usable),
                teacher=stage.teacher,
                averaged=stage.averaged,
            )
        )
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


def lost_points(
    planned: Mapping[str, PlannedStage],
    pieces: Iterable[PlannedStage],
    usable: Mapping[str, tuple[SnapshotRef, ...]],
    sources: Mapping[str, Source | None],
    named: Collection[str],
    lacking: Mapping[str, Sequence[tuple[str, int | None]]],
) -> tuple[Lost, ...]:
    """Those that this plan trains again, on a stage's own way or in a piece of it. `planned` has all stages, in running order;
    `usable` and `sources` are by stage, and so is `lacking`: what is gone of the snapshots that it is averaged from."""
    children: dict[tuple[str, int | None], list[str]] = {}
    for name, child in planned.items():
        source = sources[name]
        parent = source.parent if source is not None and not (source.at or source.alike) else None
        comes = parent is not None and (child.stage.parent_iter is not None or parent.comes_to_the_same_end)
        gone = [(parent.stage.name, child.stage.parent_iter)] if parent is not None and comes else []
        if usable[name] and child.state is not State.DISABLED:
            for place in dict.fromkeys([*gone, *lacking[name]]):
                children.setdefault(place, []).append(name)
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
