"""Schedule + inventory -> for each stage what will be done, and why. Pure.

A stage's snapshot counts if the stage has the same identity now as when it was trained, and started from the snapshot that
its parent ends in now. So a changed stage makes itself and its descendants stale, and never its ancestors.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from stagerun.base.errors import Problems, RecipeError, ResumeRefused
from stagerun.base.recipe import AVERAGE_OF, FILES, TEACHER, WEIGHTS_DIGEST, Schedule, Stage
from stagerun.base.snapshots import Inventory, SnapshotRef, how_far
from stagerun.plan.choice import Choice, choice, require_starts
from stagerun.plan.counting import (
    IMAGES,
    MAX_ITER,
    Decision,
    Place,
    change_of,
    end_of,
    found_for,
    goes_beyond,
    length_before,
    place_of,
    usable_snapshots,
    why_stale,
)
from stagerun.plan.planned import Lost, Plan, PlannedStage, State, label, options, points_averaged

# By stage: its snapshots, the very decisions about the stages that it depends on (equal ones may stand for others), its decision.
Memory = dict[str, tuple[Sequence[SnapshotRef], list[Decision], Decision]]


def make_plan(
    schedule: Schedule,
    inventory: Inventory,
    redo: Collection[str] = (),
    only: Collection[str] = (),
    until: str | None = None,
    memory: Memory | None = None,
) -> Plan:
    """Return what is left to do.

    `redo` names stale stages to train again, with their stale descendants; others stay, so that a command with it can be repeated. `only`
    names the stages that may be trained, `until` the last one that may. RecipeError when they name no stage, UsageError when a stage would
    start from what is left out and not on disk, or be taught by it. `memory` of earlier plans spares what hasn't changed since.
    """
    asked = choice(schedule, redo, only, until)
    _require_later(schedule)
    names, decided = {stage.name for stage in schedule.stages}, dict[str, Decision]()
    strangers = [name for name in inventory.by_stage if name not in names]
    memory = {} if memory is None else memory
    for stage in schedule.stages:
        needed = (stage.parent, stage.solver.teacher, *(of for of, _ in points_averaged(schedule, stage)))
        own, above = inventory.of(stage.name), [decided[name] for name in needed if name is not None]
        known = memory.pop(stage.name, None)
        if strangers or known is None or known[0] != own or list(map(id, known[1])) != list(map(id, above)):
            decision, inventory = _decide(schedule, stage, decided, inventory, strangers, asked)
        else:
            decision = known[2]
        decided[stage.name] = decision
        if own == inventory.of(stage.name) and _lasts(decision, bool(own)):
            memory[stage.name] = (own, above, decision)
    wanted = {(name, iter) for ensemble in schedule.ensembles for name, iter in ensemble.points if iter is not None}
    points = {at: ref for at in wanted if (ref := place_of(decided[at[0]], at[1], inventory).ref) is not None}
    pieces = _pieces(schedule, decided, points, asked.chosen)
    stages = tuple(one.shown for one in decided.values())
    plan = Plan(schedule, stages, pieces, tuple(_lost(decided, pieces)), inventory, points)
    require_starts(plan, asked.chosen)
    return plan


def _decide(
    schedule: Schedule,
    stage: Stage,
    decided: Mapping[str, Decision],
    inventory: Inventory,
    strangers: Collection[str],
    asked: Choice,
) -> tuple[Decision, Inventory]:
    """What to do about a stage, and the inventory with the snapshots that turned out to be the stage's under its name. `decided`: about
    the stages before it; `strangers`: names that no stage has."""
    name, own = stage.name, inventory.of(stage.name)
    source = None if stage.parent is None else place_of(decided[stage.parent], stage.parent_iter, inventory)
    members = tuple(place_of(decided[of], iter, inventory) for of, iter in points_averaged(schedule, stage))
    teacher = None if stage.solver.teacher is None else end_of(decided[stage.solver.teacher])
    before, facts = own[-1].identity if own else {}, dict(stage.identity)
    if teacher is not None:
        facts[TEACHER] = teacher.id(before.get(TEACHER, ""), inventory)
    if members:
        recorded = before.get(AVERAGE_OF, "").split()
        recorded = recorded if len(recorded) == len(members) else [""] * len(members)
        ids = [one.id(id, inventory) for one, id in zip(members, recorded, strict=True)]
        facts[AVERAGE_OF] = " ".join(ids) if all(ids) else ""
    stage = replace(stage, identity=facts)
    inventory = found_for(stage, source, inventory, strangers)
    needs = [one.decision for one in (source, teacher, *members) if one is not None]
    redo = name in asked.redo or any(one.redo for one in needs)
    usable = usable_snapshots(stage, source, inventory, schedule)
    planned = _fresh(stage, source, members, teacher)
    if usable:
        # An end is an end, even if a stretch was trained once more elsewhere and left out images there.
        ends = [ref for ref in usable if ref.ends(stage.solver.max_iter)]
        planned = _gone_on(planned, max(ends or usable, key=how_far))
    elif inventory.of(name):
        why, changes = why_stale(schedule, stage, source, inventory)
        # Below a stage that `redo` names but that is up to date again (the same command, typed a second time) only what is
        # stale because of it follows; a change of its own must be named, which other images are not.
        if name not in asked.redo and any(change.field != IMAGES for change in changes):
            redo = redo and any(one.planned.again for one in needs)
        # Below a stale stage there is nothing to start from, or to learn from.
        redo = redo and not any(one.planned.state is State.STALE for one in needs)
        state, why = (State.FRESH, f"trained again: {why}") if redo else (State.STALE, why)
        planned = replace(planned, state=state, changes=changes, again=redo, why=why)
    shown = _left_out(planned, name in asked.chosen, source)
    return Decision(source, members, usable, planned, shown, redo), inventory


def _lasts(decision: Decision, begun: bool) -> bool:
    """Whether the decision holds as long as the stage's snapshots and the decisions it was made from do. Where something is gone, or to
    explain why a stage is stale, other snapshots were looked at."""
    source, planned, solver = decision.source, decision.planned, decision.planned.stage.solver
    complete = (
        (source is None or bool(source.refs))
        and (solver.teacher is None or planned.teacher is not None)
        and all(member.ref is not None for member in decision.members)
    )
    return not begun or (complete and planned.state is not State.STALE and not planned.again)


def _fresh(stage: Stage, source: Place | None, members: Collection[Place], teacher: Place | None) -> PlannedStage:
    """The stage from its start. As long as a snapshot that it is averaged from is missing, it has nothing to start from."""
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


def _left_off(stage: Stage, source: Place | None) -> tuple[int, int, bool]:
    """Where the stage goes on in its training set: the images of it that the last stage with that set consumed up to where the path leaves it,
    and those that rollbacks have left out there, or so far; and whether `early_stop` may yet end a stage before."""
    while source is not None and not source.planned.stage.data.train.same(stage.data.train):
        source = source.decision.source
    if source is None or not stage.solver.carry_data:
        return 0, 0, False
    parent = source.planned
    length = parent.stage.solver.max_iter if parent.end is None else parent.end.iter  # `early_stop` may have ended it
    consumed = parent.position + (length if source.iter is None else source.iter) * parent.stage.solver.batch_size
    open_end = source.iter is None and parent.end is None and parent.stage.solver.earliest_end < length
    skipped = source.ref.skipped if source.ref is not None else parent.skipped
    return consumed, skipped, parent.at_most or open_end


def _gone_on(planned: PlannedStage, newest: SnapshotRef) -> PlannedStage:
    """The stage where its newest snapshot is where training has come to."""
    stage, length = planned.stage, planned.stage.solver.max_iter
    done = newest.ends(length)
    why = [f"goes on from iteration {newest.iter} to {length}"] if goes_beyond(newest, stage) else []
    why += [] if done else [f"from {newest.name}"]
    why += [f"trained as `{newest.trained_as}`"] if newest.trained_as else []
    gone = (FILES & stage.origins.keys() & newest.identity.keys()) - stage.identity.keys()
    # It has its weights from there.
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


def _left_out(planned: PlannedStage, chosen: bool, source: Place | None) -> PlannedStage:
    """The same stage, marked as disabled or not chosen if this plan leaves it out."""
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
    """RecipeError for what lies before the iteration at which a stage with a .solverstate begins: its end, where other stages start from it,
    and members of ensembles."""
    problems = Problems(schedule.files)
    starts = [(f"stage `{s.name}` starts from", s.span, s.parent, s.parent_iter) for s in schedule.stages if s.parent]
    points = [(f"ensemble `{e.name}` has", e.span, *point) for e in schedule.ensembles for point in e.points]
    for what, span, name, iter in (*points, *starts):
        begins = schedule.stage(name).begins
        if iter is not None and iter <= begins:
            text = f"{what} `{label(name, iter)}`, and `{name}` begins at {begins}"
            problems.add(span, text, f"write an iteration above {begins}: that is where its `solverstate` was written")
    for stage in schedule.stages:
        solver = stage.solver
        if stage.enabled and stage.begins >= solver.max_iter and stage.begins:
            text = f"{solver.solverstate} is of iteration {stage.begins}, and stage `{stage.name}` ends at {solver.max_iter}"
            hint = f"write a `max_iter` above {stage.begins}: it counts from Caffe's iteration 0"
            problems.add(stage.written("solver.solverstate") or stage.span, text, hint)
    if problems:
        raise RecipeError(problems.all())


def require_fresh(plan: Plan) -> None:
    """ResumeRefused naming each stale stage, what changed in it, and how to go on."""
    if not plan.stale:
        return
    lines = []
    for planned in plan.stale:
        lines.append(f"stage `{planned.name}` is stale: {planned.why}")
        lines += [f"  {change}" for change in planned.changes]
    # Those that are not stale just because of their parent or teacher.
    stale = {s.name for s in plan.stale}
    own = [s.stage for s in plan.stale if s.changes or stale.isdisjoint((s.stage.parent, s.stage.solver.teacher))]
    redo = options("--redo", plan.schedule, own)
    it = "them" if len(redo) > 1 else "it"
    raise ResumeRefused(
        "\n".join(lines),
        f"`{' '.join(redo)}` trains {it} and what follows from {it} again; or undo the change; if this is another schedule, give it "
        "a `name:` of its own or another --out",
    )


# -- stretches of a stage that are trained once more
#
# A stage saves what its children start from on its way. Where a child was thought of later, or the snapshot is gone, the stage
# has passed that place already: then it is trained again from the newest of its snapshots before that, or from its start, up to
# there and no further. Its other snapshots and its end stay as they are.


def _pieces(
    schedule: Schedule,
    decided: dict[str, Decision],
    points: Mapping[tuple[str, int], SnapshotRef],
    chosen: Collection[str],
) -> tuple[PlannedStage, ...]:
    """In running order, as the decisions are. `points`: the snapshots that ensembles are made from, as far as they are there."""
    wanted = defaultdict[str, defaultdict[int, list[str]]](lambda: defaultdict(list))  # who starts there
    # Ensembles that can be evaluated, or that a stage is to start from.
    started = {one.planned.stage.average for one in decided.values() if one.shown.state is State.FRESH}
    for ensemble in schedule.ensembles:
        can = all(decided[name].planned.stage.enabled and name in chosen for name, _ in ensemble.points)
        for above, iter in ensemble.points if can or ensemble.name in started else ():
            if iter is not None and (above, iter) not in points and _has_passed(decided[above].shown, iter):
                wanted[above][iter].append(ensemble.name)
    found: list[PlannedStage] = []
    # Children first: a piece from a stage's start may need a piece of the stage above.
    for name, decision in reversed(decided.items()):
        made = _pieces_of(decision, wanted[name])
        found = [*made, *found]
        source = decision.source
        if source is None or source.iter is None or source.refs or not _has_passed(source.decision.shown, source.iter):
            continue
        if any(one.state is State.FRESH for one in (decision.shown, *made[:1])):
            wanted[source.planned.name][source.iter].insert(0, name)
    return tuple(found)


def _has_passed(parent: PlannedStage, iter: int) -> bool:
    """Return whether the stage is past that iteration, so that going on doesn't reach it any more."""
    return parent.state in (State.DONE, State.RESUME, State.NOT_CHOSEN) and parent.iter >= iter


def _pieces_of(decision: Decision, points: Mapping[int, list[str]]) -> list[PlannedStage]:
    source, usable = decision.source, decision.usable
    # The nearest of these behind a point shows in what environment the stage was trained there, even if another life went on after
    # the one before it. What came in a life after that of the last is of other pieces.
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


# -- snapshots that are gone, and from which stages came that still count
#
# Such a stage counts because its parent, unchanged, comes to the same bits again (`counting.counts`), in the same environment.
# In another one it comes to others, and the stage is stale from then on. So `run` says that, and asks, before it trains anything.


def _lost(decided: Mapping[str, Decision], pieces: Iterable[PlannedStage]) -> Iterator[Lost]:
    """The lost snapshots that this plan reproduces, by training a stage or a piece of one. The decisions are in running order."""
    children = defaultdict[tuple[str, int | None], list[str]](list)
    for name, child in decided.items():
        if not child.usable or child.shown.state is State.DISABLED:
            continue
        source = child.source
        gone = [one for one in child.members if one.is_gone]
        if source is not None and source.is_gone and (source.iter is not None or source.comes_again):
            gone.insert(0, source)
        for place in dict.fromkeys((one.planned.name, one.iter) for one in gone):
            children[place].append(name)
    work = [w for w in (*pieces, *(one.shown for one in decided.values())) if w.iterations_left]
    for (name, at), names in children.items():
        iter = decided[name].shown.stage.solver.max_iter if at is None else at
        again = next((w for w in work if w.name == name and w.iter < iter <= w.last), None)
        if again is not None:
            asked = tuple(n for n in names if decided[n].redo)
            like = _like(again, (ref for n in names for ref in decided[n].usable))
            yield Lost(name, iter, at is None, tuple(names), asked, like)


def _like(again: PlannedStage, below: Iterable[SnapshotRef]) -> SnapshotRef | None:
    """The snapshot that shows in what environment the stage was trained before. If nothing of the stage is left, it may be one of a stage that
    came from it (`below`), of the life in which the stage was started; the first life of a folder had attempt 1 alone, without serials."""
    if again.until is not None:
        return again.like
    if again.state is State.RESUME:
        return again.start
    life = again.start and again.start.attempt
    return next((r for r in below if r.attempt == life or r.began_empty or (r.attempt == 1 and not r.serial)), None)
