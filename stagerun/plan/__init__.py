"""The plan: what a schedule will train, and why, from the snapshots in an inventory; its hours and disk. Pure: no torch, no disk, no clock.

A stage's snapshot counts if the stage still has the identity it was trained with, and started from its parent's current end. So a changed
stage makes itself and its descendants stale, and never its ancestors. `counting` decides which snapshots count, `choice` reads a command's
options, `hours` estimates, `render` prints.

`stagerun.plan("solvers/x")` calls the library's function: the module is callable, since importing the folder hides a function of that name.
"""

import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from types import ModuleType
from typing import Any

from stagerun.base.errors import Problems, RecipeError, ResumeRefused
from stagerun.base.recipe import AVERAGE_OF, BEST, FILES, TEACHER, WEIGHTS_DIGEST, Schedule, Stage
from stagerun.base.snapshots import Inventory, SnapshotRef, how_far
from stagerun.plan.choice import Choice, choice, require_starts
from stagerun.plan.counting import (
    IMAGES,
    MAX_ITER,
    Decision,
    Source,
    best_of,
    change_of,
    changed_fields,
    claim_strangers,
    end_of,
    goes_beyond,
    length_before,
    source_at,
    start_of,
    under,
    usable_snapshots,
    why_stale,
)
from stagerun.plan.planned import Lost, Plan, PlannedStage, State, label, options, points_averaged

__all__ = ["Plan", "PlannedStage", "State", "changed_fields", "make_plan", "require_fresh", "under"]


def make_plan(
    schedule: Schedule,
    inventory: Inventory,
    redo: Collection[str] = (),
    only: Collection[str] = (),
    until: str | None = None,
) -> Plan:
    """Return the plan for the rest of a schedule. `redo`: stale stages to retrain, with their stale descendants; other
    stages stay, so that the command can be repeated. `only`: the stages that may be trained, `until`: the last one.
    RecipeError for unknown names, UsageError if a stage's start or teacher is left out and not on disk."""
    chosen = choice(schedule, redo, only, until)
    _require_later(schedule)
    names, decided = {stage.name for stage in schedule.stages}, dict[str, Decision]()
    strangers = [name for name in inventory.by_stage if name not in names]
    for stage in schedule.stages:
        decided[stage.name], inventory = _decide(schedule, stage, decided, inventory, strangers, chosen)
    wanted = {(name, iter) for ensemble in schedule.ensembles for name, iter in ensemble.points if iter is not None}
    points = {at: ref for at in wanted if (ref := source_at(decided[at[0]], at[1], inventory).ref) is not None}
    pieces = _pieces(schedule, decided, points, chosen.chosen)
    stages = tuple(one.shown for one in decided.values())
    plan = Plan(schedule, stages, pieces, tuple(_lost(decided, pieces)), inventory, points)
    require_starts(plan, chosen.chosen)
    return plan


def _decide(
    schedule: Schedule,
    stage: Stage,
    decided: Mapping[str, Decision],
    inventory: Inventory,
    strangers: Collection[str],
    chosen: Choice,
) -> tuple[Decision, Inventory]:
    """Decide about a stage; return also the inventory with the snapshots that belong to the stage under its name. `decided`: the decisions
    about earlier stages; `strangers`: names of snapshots that no stage has."""
    name, refs = stage.name, inventory.of(stage.name)
    if stage.parent is not None and stage.parent_at == BEST:
        stage = replace(stage, parent_iter=best_of(decided[stage.parent]))
    source = None if stage.parent is None else start_of(decided[stage.parent], stage, inventory)
    members = tuple(source_at(decided[of], iter, inventory) for of, iter in points_averaged(schedule, stage))
    teacher = None if stage.solver.teacher is None else end_of(decided[stage.solver.teacher])
    before, facts = refs[-1].identity if refs else {}, dict(stage.identity)
    if teacher is not None:
        facts[TEACHER] = teacher.id(before.get(TEACHER, ""), inventory)
    if members:
        recorded = before.get(AVERAGE_OF, "").split()
        recorded = recorded if len(recorded) == len(members) else [""] * len(members)
        ids = [one.id(id, inventory) for one, id in zip(members, recorded, strict=True)]
        facts[AVERAGE_OF] = " ".join(ids) if all(ids) else ""
    stage = replace(stage, identity=facts)
    inventory = claim_strangers(stage, source, inventory, strangers)
    needs = [one.decision for one in (source, teacher, *members) if one is not None]
    redo = name in chosen.redo or any(one.redo for one in needs)
    usable = usable_snapshots(stage, source, inventory, schedule)
    planned = _fresh(stage, source, members, teacher)
    if usable:
        # An end counts first, even if a piece was retrained and left out images.
        ends = [ref for ref in usable if ref.ends(stage.solver.max_iter)]
        planned = _resumed(planned, max(ends or usable, key=how_far))
    elif inventory.of(name):
        why, changes = why_stale(schedule, stage, source, inventory)
        # Below a stage of `redo` that is up to date again (the same command, repeated), retrain only stages that are stale because of it;
        # a stage that changed itself must be named, unless only its images changed.
        if name not in chosen.redo and any(change.field != IMAGES for change in changes):
            redo = redo and any(one.planned.again for one in needs)
        # Below a stale stage, the start or the teacher is missing.
        redo = redo and not any(one.planned.state is State.STALE for one in needs)
        state, why = (State.FRESH, f"trained again: {why}") if redo else (State.STALE, why)
        planned = replace(planned, state=state, changes=changes, again=redo, why=why)
    shown = _left_out(planned, name in chosen.chosen, source)
    return Decision(source, members, usable, planned, shown, redo), inventory


def _fresh(stage: Stage, source: Source | None, members: Collection[Source], teacher: Source | None) -> PlannedStage:
    """Plan the stage from its start; without `start` while a snapshot of its average is missing."""
    position, skipped, at_most = _left_off(stage, source)
    averaged = tuple(one.ref for one in members if one.ref is not None)
    complete = len(averaged) == len(members)
    return PlannedStage(
        stage=stage,
        state=State.FRESH,
        iter=stage.begins,
        position=position - stage.begins * stage.solver.batch_size,
        start=source.ref if source is not None and complete else None,
        at_most=at_most,
        skipped=skipped,
        skipped_before=skipped,
        teacher=teacher and teacher.ref,
        averaged=averaged if complete else (),
    )


def _left_off(stage: Stage, source: Source | None) -> tuple[int, int, bool]:
    """Return the stage's start in its training set: the images that the last ancestor with that set consumed, and the images that rollbacks left
    out so far; and whether an ancestor may still be left earlier, by `early_stop` or `@best`."""
    below = stage
    while source is not None and not source.planned.stage.data.train.same(stage.data.train):
        below, source = source.planned.stage, source.decision.source
    if source is None or not stage.solver.carry_data:
        return 0, 0, False
    parent = source.planned
    length = parent.stage.solver.max_iter if parent.end is None else parent.end.iter  # `early_stop` may have ended it
    consumed = parent.position + (length if source.iter is None else source.iter) * parent.stage.solver.batch_size
    early = below.parent_at == BEST or parent.stage.solver.earliest_end < length
    open_end = source.iter is None and parent.end is None and early
    skipped = source.ref.skipped if source.ref is not None else parent.skipped
    return consumed, skipped, parent.at_most or open_end


def _resumed(planned: PlannedStage, newest: SnapshotRef) -> PlannedStage:
    """Plan the stage from its newest snapshot."""
    stage, length = planned.stage, planned.stage.solver.max_iter
    done = newest.ends(length)
    why = [f"continues from iteration {newest.iter} to {length}"] if goes_beyond(newest, stage) else []
    why += [] if done else [f"from {newest.name}"]
    why += [f"trained as `{newest.trained_as}`"] if newest.trained_as else []
    gone = (FILES & stage.origins.keys() & newest.identity.keys()) - stage.identity.keys()
    # The snapshot has the contents of missing files.
    stage = replace(stage, identity={**stage.identity, **{key: newest.identity[key] for key in gone}})
    if WEIGHTS_DIGEST in gone:
        planned = replace(planned, position=planned.position - stage.begins * stage.solver.batch_size)
    return replace(
        planned,
        stage=stage,
        state=State.DONE if done else State.RESUME,
        iter=newest.iter,
        skipped=newest.skipped,
        start=None if done else newest,
        end=newest if done else None,
        why=", ".join(why),
        changes=(change_of(MAX_ITER, newest, stage),) if not done and length_before(newest, stage) is not None else (),
    )


def _left_out(planned: PlannedStage, chosen: bool, source: Source | None) -> PlannedStage:
    """Mark the stage as disabled or not chosen if this plan leaves it out."""
    if not planned.stage.enabled:
        off = source is not None and not source.planned.stage.enabled
        why = f"its parent `{planned.stage.parent}` is disabled" if off else ""
        return PlannedStage(
            stage=planned.stage,
            state=State.DISABLED,
            iter=0,
            position=planned.position,
            at_most=planned.at_most,
            why=why,
        )
    if chosen or planned.state is State.DONE:
        return planned
    why = f"stale: {planned.why}" if planned.state is State.STALE else planned.why
    return replace(planned, state=State.NOT_CHOSEN, start=None, why=why)


def _require_later(schedule: Schedule) -> None:
    """Raise RecipeError for iterations before the beginning of a stage with a .solverstate: its end, branch points, members of ensembles."""
    problems = Problems(schedule.files)
    starts = [(f"stage `{s.name}` starts from", s.span, s.parent, s.parent_iter) for s in schedule.stages if s.parent]
    points = [(f"ensemble `{e.name}` has", e.span, *point) for e in schedule.ensembles for point in e.points]
    for what, span, name, iter in (*points, *starts):
        begins = schedule.stage(name).begins
        if iter is not None and iter <= begins:
            text = f"{what} `{label(name, iter)}`, and `{name}` begins at {begins}"
            problems.add(span, text, f"write an iteration above {begins}, the iteration of its `solverstate`")
    for stage in schedule.stages:
        solver, begins = stage.solver, stage.begins
        if stage.enabled and begins >= solver.max_iter and begins:
            text = f"{solver.solverstate} has iteration {begins}, and stage `{stage.name}` ends at {solver.max_iter}"
            hint = f"write a `max_iter` above {begins}: it counts from Caffe's iteration 0"
            problems.add(stage.written("solver.solverstate") or stage.span, text, hint)
    if problems:
        raise RecipeError(problems.all())


def require_fresh(plan: Plan) -> None:
    """Raise ResumeRefused with each stale stage, its changes, and what to do, if there are any."""
    if not plan.stale:
        return
    lines = []
    for planned in plan.stale:
        lines.append(f"stage `{planned.name}` is stale: {planned.why}")
        lines += [f"  {change}" for change in planned.changes]
    # Stages that are stale for another reason than their parent or teacher.
    stale = {s.name for s in plan.stale}
    changed = [s.stage for s in plan.stale if s.changes or stale.isdisjoint((s.stage.parent, s.stage.solver.teacher))]
    redo = options("--redo", plan.schedule, changed)
    it = "them" if len(redo) > 1 else "it"
    hint = (
        f"`{' '.join(redo)}` retrains {it} and the stages below {it}; or undo the change; if this is another schedule, "
    )
    raise ResumeRefused("\n".join(lines), f"{hint}give it another `name:` or another --out")


# -- pieces: stretches of a stage to retrain
#
# A stage saves the snapshots that its children start from. If a child was added later, or the snapshot is gone, the stage may be past that
# iteration: then it is retrained from its newest earlier snapshot, or from its start, up to that iteration and no further. Its other
# snapshots and its end stay as they are.


def _pieces(
    schedule: Schedule,
    decided: dict[str, Decision],
    points: Mapping[tuple[str, int], SnapshotRef],
    chosen: Collection[str],
) -> tuple[PlannedStage, ...]:
    """Return the pieces in running order, as the decisions are. `points`: the existing snapshots that ensembles use."""
    wanted = defaultdict[str, defaultdict[int, list[str]]](lambda: defaultdict(list))  # users by stage and iteration
    # Ensembles that can be evaluated, or that a stage will start from.
    started = {one.planned.stage.average for one in decided.values() if one.shown.state is State.FRESH}
    for ensemble in schedule.ensembles:
        can = all(decided[name].planned.stage.enabled and name in chosen for name, _ in ensemble.points)
        for above, iter in ensemble.points if can or ensemble.name in started else ():
            if iter is not None and (above, iter) not in points and _has_passed(decided[above].shown, iter):
                wanted[above][iter].append(ensemble.name)
    pieces: list[PlannedStage] = []
    # Children first: a piece from a stage's start may need a piece of the stage above.
    for name, decision in reversed(decided.items()):
        made = _pieces_of(decision, wanted[name])
        pieces = [*made, *pieces]
        source = decision.source
        if source is None or source.iter is None or source.refs or not _has_passed(source.decision.shown, source.iter):
            continue
        if any(one.state is State.FRESH for one in (decision.shown, *made[:1])):
            wanted[source.planned.name][source.iter].insert(0, name)
    return tuple(pieces)


def _has_passed(parent: PlannedStage, iter: int) -> bool:
    """Return whether the stage is past that iteration, so that resuming doesn't reach it any more."""
    return parent.state in (State.DONE, State.RESUME, State.NOT_CHOSEN) and parent.iter >= iter


def _pieces_of(decision: Decision, points: Mapping[int, list[str]]) -> list[PlannedStage]:
    source, usable = decision.source, decision.usable
    # The nearest of these snapshots after a point shows the environment of the training at that point, even if another process life resumed from
    # the snapshot before it. Snapshots of a life after the last one's belong to other pieces.
    refs = sorted(usable, key=lambda ref: (ref.iter, ref.attempt))
    course = [ref for ref in refs if ref.attempt <= refs[-1].attempt]
    stage = replace(decision.shown, end=None, why="", changes=(), again=False)
    made: list[PlannedStage] = []
    for point in sorted(points):
        newest = max((ref for ref in usable if ref.iter < point), key=how_far, default=None)
        begins, children = newest.iter if newest else 0, tuple(points[point])
        if made and begins <= made[-1].last:
            made[-1] = replace(made[-1], until=point, children=made[-1].children + children)
            continue
        made.append(
            replace(
                stage,
                state=State.FRESH if newest is None else State.RESUME,
                iter=begins,
                skipped=newest.skipped if newest else stage.skipped_before,
                start=newest or (source.ref if source else None),
                until=point,
                children=children,
                like=next((ref for ref in course if ref.iter >= point), None),
            )
        )
    return made


# -- lost snapshots whose children still count
#
# Such a child counts because its unchanged parent reproduces the same bits (`counting.counts`) in the same environment. In another
# environment the bits differ, and the child becomes stale. So `run` reports that, and asks, before it trains anything.


def _lost(decided: Mapping[str, Decision], pieces: Iterable[PlannedStage]) -> Iterator[Lost]:
    """Yield the lost snapshots that this plan reproduces, by training a stage or a piece. The decisions are in running order."""
    children = defaultdict[tuple[str, int | None], list[str]](list)
    for name, child in decided.items():
        if not child.usable or child.shown.state is State.DISABLED:
            continue
        source = child.source
        gone = [one for one in child.members if one.is_gone]
        if source is not None and source.is_gone and (source.iter is not None or source.reproducible):
            gone.insert(0, source)
        for point in dict.fromkeys((one.planned.name, one.iter) for one in gone):
            children[point].append(name)
    work = [w for w in (*pieces, *(one.shown for one in decided.values())) if w.iterations_left]
    for (name, at), names in children.items():
        iter = decided[name].shown.stage.solver.max_iter if at is None else at
        again = next((w for w in work if w.name == name and w.iter < iter <= w.last), None)
        if again is not None:
            redone = tuple(n for n in names if decided[n].redo)
            like = _like(again, (ref for n in names for ref in decided[n].usable))
            yield Lost(name, iter, at is None, tuple(names), redone, like)


def _like(again: PlannedStage, below: Iterable[SnapshotRef]) -> SnapshotRef | None:
    """Return the snapshot that shows the environment of the stage's earlier training. If the stage has none left, it may be a snapshot of a stage
    `below`, from the life that started the stage; a folder's first life had only attempt 1, without serials."""
    if again.until is not None:
        return again.like
    if again.state is State.RESUME:
        return again.start
    life = again.start and again.start.attempt
    return next((r for r in below if r.attempt == life or r.began_empty or (r.attempt == 1 and not r.serial)), None)


# -- the callable module


class _Folder(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Any:
        return import_module("stagerun.tools.library").plan(*args, **options)


sys.modules[__name__].__class__ = _Folder
