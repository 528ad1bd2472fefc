"""Schedule + inventory -> for each stage what will be done, and why. Pure.

A stage's snapshot counts if the stage has the same identity now as when it was trained, and started from the snapshot that
its parent ends in now. So a changed stage makes itself and its descendants stale, and never its ancestors. What it is called does
not matter (`counting.found_for`).
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from stagerun.base.errors import Problem, Problems, RecipeError, ResumeRefused, Span, UsageError, listing, nearest
from stagerun.base.recipe import FILES, WEIGHTS_DIGEST, Schedule, Stage
from stagerun.base.snapshots import Inventory, SnapshotRef, how_far
from stagerun.language.stages import some
from stagerun.plan.counting import (
    IMAGES,
    Source,
    at,
    averaged_from,
    changed_fields,
    counts,
    found_for,
    left_off,
    of_these_images,
    points_averaged,
    points_of,
    raised,
    same_weights,
    source_of,
    taught_by,
    unless_over,
    why_stale,
)
from stagerun.plan.pieces import lost_points, pieces
from stagerun.plan.planned import Change, Lost, Plan, PlannedStage, State, label
from stagerun.plan.raised import goes_beyond


@dataclass(frozen=True, slots=True)
class Choice:
    """Names of stages, groups resolved. `chosen` are those that may be trained."""

    redo: frozenset[str]
    chosen: frozenset[str]


def choice(schedule: Schedule, redo: Collection[str], only: Collection[str], until: str | None) -> Choice:
    """Raises RecipeError with every name that no stage has, and every contradiction. The name of a stage that makes several
    stands for all of them."""
    members = _members(schedule)
    problems = []
    asked = (("--redo", redo), ("--only", only), ("--until", [until] if until is not None else []))
    for option, names in asked:
        for name in names:
            wrong = _wrong(schedule, members, option, name)
            if wrong:
                problems.append(Problem(wrong[0], Span(option, 1, 1, len(name)), name, wrong[1]))
    if only and until is not None:
        span = Span("--until", 1, 1, len(until))
        problems.append(
            Problem(
                "--only and --until say different things", span, until, "leave one of them out; --only is repeatable"
            )
        )
    if problems:
        raise RecipeError(problems)
    everything = [stage.name for stage in schedule.stages]
    chosen = _resolved(members, only) if only else frozenset(everything)
    if until is not None:
        chosen = frozenset(everything[: 1 + max(everything.index(name) for name in members[until])])
    return Choice(_resolved(members, redo), chosen)


def require_starts(plan: Plan, chosen: Collection[str]) -> None:
    """UsageError for a stage that is to be trained, and starts from what is neither on disk nor to be trained."""
    by_name = {s.stage.name: s for s in plan.stages}
    missing: dict[str, None] = {}  # in running order
    for planned in (*plan.pieces, *plan.stages):
        stage, above = planned.stage, planned.stage.parent
        if planned.until is not None and stage.name not in chosen:
            missing[stage.name] = None
        if planned.state is not State.FRESH or planned.start is not None or above is None:
            continue
        if stage.average is not None:
            missing |= dict.fromkeys(_not_averaged(plan, planned, by_name))
            continue
        if not any(piece.stage.name == above for piece in plan.pieces):
            missing |= dict.fromkeys(_not_chosen(by_name, above))
    fresh = [s for s in plan.stages if s.state is State.FRESH and s.start is None]
    waiting = [s.stage for s in fresh if missing and _above(by_name, s) & missing.keys()]
    names = {stage.name for stage in waiting}
    if waiting:
        first, alone = waiting[0], {s.group for s in plan.schedule.stages if s.enabled and s.name not in names}
        asked = dict.fromkeys(s.name if s.group in alone else s.group or s.name for s in waiting)
        words = " ".join(f"--only {name}" for name in (*missing, *asked))
        raise UsageError(
            f"stage `{first.name}` starts from `{label(first.parent or '', first.parent_iter)}`, where there is no snapshot "
            "that counts, and which is left out",
            f"`{words}` trains that first",
        )


def _not_averaged(plan: Plan, planned: PlannedStage, by_name: Mapping[str, PlannedStage]) -> Iterator[str]:
    """The stages to be chosen for the snapshots that a stage is averaged from, as far as these are missing."""
    stage = planned.stage
    for name, iter in points_averaged(plan.schedule, stage):
        member, piece = by_name[name], any(piece.stage.name == name for piece in plan.pieces)
        if (name, iter) in plan.points or (iter is None and member.end is not None) or piece:
            continue
        if member.state is State.NOT_CHOSEN:
            yield from _not_chosen(by_name, name)


def require_teachers(plan: Plan) -> None:
    """UsageError for a stage that is to be trained, and whose teacher is neither on disk nor to be trained."""
    by_name = {s.stage.name: s for s in plan.stages}
    for planned in plan.work:
        name, teacher = planned.stage.name, planned.stage.solver.teacher
        if teacher is not None and by_name[teacher].state is State.NOT_CHOSEN:
            raise UsageError(
                f"stage `{name}` is taught by `{teacher}`, which is not trained yet, and which is left out",
                f"`--only {teacher} --only {name}` trains that first",
            )


def _not_chosen(by_name: Mapping[str, PlannedStage], name: str) -> list[str]:
    """The stage and its ancestors up to one that is on disk or to be trained, the uppermost first."""
    found: list[str] = []
    above: str | None = name
    while above is not None and by_name[above].state is State.NOT_CHOSEN:
        found.insert(0, above)
        above = by_name[above].stage.parent
    return found


def _above(by_name: Mapping[str, PlannedStage], planned: PlannedStage) -> set[str]:
    found: set[str] = set()
    name = planned.stage.parent
    while name is not None:
        found.add(name)
        name = by_name[name].stage.parent
    return found


def _members(schedule: Schedule) -> dict[str, list[str]]:
    """What each name stands for, in running order."""
    members: dict[str, list[str]] = {stage.name: [stage.name] for stage in schedule.stages}
    names = frozenset(members)
    for stage in schedule.stages:
        if stage.group is not None and stage.group not in names:
            members.setdefault(stage.group, []).append(stage.name)
    return members


def _resolved(members: Mapping[str, list[str]], names: Collection[str]) -> frozenset[str]:
    return frozenset(member for name in names for member in members.get(name, ()))


def _wrong(schedule: Schedule, members: Mapping[str, list[str]], option: str, name: str) -> tuple[str, str] | None:
    if name not in members:
        known = list(members)
        if name in {one.name for one in schedule.ensembles}:
            those = list(dict.fromkeys(stage for stage, _ in schedule.ensemble(name).points))
            return f"`{name}` is an ensemble, not a stage", f"{option} takes stages: its members are of {some(those)}"
        return f"no stage is named `{name}`", nearest(name, known) or f"the stages are {listing(known)}"
    if option in ("--only", "--until") and not any(schedule.stage(member).enabled for member in members[name]):
        hint = "write `enabled: true` in schedule.prototxt, at the stages it starts from as well"
        return f"stage `{name}` is not enabled", hint
    return None


__all__ = ["Change", "Lost", "Plan", "PlannedStage", "State", "changed_fields", "make_plan", "require_fresh"]


def make_plan(
    schedule: Schedule,
    inventory: Inventory,
    redo: Collection[str] = (),
    only: Collection[str] = (),
    until: str | None = None,
) -> Plan:
    """What is left to do.

    `redo` names stale stages to train again, with their stale descendants. On a stage that is not stale it does nothing,
    so that a command with it can be repeated. `only` names
    the stages that may be trained, `until` the last one that may, in running order; without them all may.
    RecipeError when they name no stage, UsageError when a stage would start from what is left out and not on disk, or be taught by it.
    """
    asked = choice(schedule, redo, only, until)
    planned: dict[str, PlannedStage] = {}
    usable: dict[str, tuple[SnapshotRef, ...]] = {}
    sources: dict[str, Source | None] = {}
    lacking: dict[str, list[tuple[str, int | None]]] = {}
    known = {stage.name for stage in schedule.stages}
    below = set(asked.redo)  # the stages named by `redo`, and what follows from them
    _require_rest(schedule)
    for stage in schedule.stages:
        name, above = stage.name, stage.parent
        starts = {*points_averaged(schedule, stage), *([(above, stage.parent_iter)] if above is not None else [])}
        alike = {(of, iter): same_weights(planned[of].stage, iter, sources[of], inventory) for of, iter in starts}
        source = None
        if above is not None:
            source = source_of(stage, planned[above], usable[above], alike[above, stage.parent_iter])
            _require_later(schedule, stage, planned[above].stage)
        teacher = planned[stage.solver.teacher] if stage.solver.teacher is not None else None
        averaged = [
            (planned[of], iter, at(iter, planned[of], usable[of])) for of, iter in points_averaged(schedule, stage)
        ]
        needs = tuple({id(one): one for one in (teacher, *(one for one, *_ in averaged)) if one is not None}.values())
        if not below.isdisjoint((above, *(one.stage.name for one in needs))):
            below.add(name)
        if teacher is not None:
            stage = taught_by(stage, teacher, inventory)
        if averaged:
            stage = averaged_from(stage, averaged, alike, inventory)
        sources[name] = source
        inventory = found_for(stage, source, inventory, known)
        usable[name], found = _plan_stage(schedule, stage, sources, needs, inventory, name in below, asked)
        planned[name] = _with_average(found, [ref for *_, ref in averaged], teacher)
        lacking[name] = [
            (one.stage.name, iter) for one, iter, ref in averaged if ref is None and not alike[one.stage.name, iter]
        ]
    planned = {name: _left_out(stage, name in asked.chosen, planned) for name, stage in planned.items()}
    points = points_of(schedule, usable)
    again = pieces(planned, usable, sources, _missing(schedule, points, asked.chosen, planned))
    lost = lost_points(planned, again, usable, sources, below, lacking)
    plan = Plan(schedule, tuple(planned.values()), again, lost, inventory, points)
    require_starts(plan, asked.chosen)
    require_teachers(plan)
    return plan


def _require_later(schedule: Schedule, stage: Stage, parent: Stage) -> None:
    """RecipeError for a stage that would start where its parent, which begins with a .solverstate, has not been yet."""
    if stage.parent_iter is None or stage.parent_iter > parent.begins:
        return
    problems = Problems(schedule.files)
    text = f"stage `{stage.name}` starts from `{label(parent.name, stage.parent_iter)}`, and `{parent.name}` begins at {parent.begins}"
    problems.add(
        stage.span, text, f"write an iteration above {parent.begins}: that is where its `solverstate` was written"
    )
    raise RecipeError(problems.all())


def _missing(
    schedule: Schedule,
    points: Mapping[tuple[str, int], SnapshotRef],
    chosen: Collection[str],
    planned: Mapping[str, PlannedStage],
) -> Iterator[tuple[str, str, int]]:
    """Ensemble, stage and iteration of each snapshot before a stage's end that isn't there, of ensembles that can be evaluated, or that
    a stage is to start from."""
    enabled = {stage.name for stage in schedule.stages if stage.enabled}
    started = {s.stage.average for s in planned.values() if s.state is State.FRESH}
    for ensemble in schedule.ensembles:
        can = all(stage in enabled and stage in chosen for stage, _ in ensemble.points)
        if can or ensemble.name in started:
            for stage, iter in ensemble.points:
                if iter is not None and (stage, iter) not in points:
                    yield ensemble.name, stage, iter


def _require_rest(schedule: Schedule) -> None:
    """RecipeError for stages that would end before they begin, with a .solverstate from there or later, and for ensembles of what lies
    before that."""
    problems = Problems(schedule.files)
    for ensemble in schedule.ensembles:
        for name, iter in ensemble.points:
            if iter is not None and iter <= (begins := schedule.stage(name).begins):
                text = f"ensemble `{ensemble.name}` has `{label(name, iter)}`, and `{name}` begins at {begins}"
                hint = f"write iterations above {begins}: that is where its `solverstate` was written"
                problems.add(ensemble.span, text, hint)
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
        lines.append(f"stage `{planned.stage.name}` is stale: {planned.why}")
        lines += [f"  {change}" for change in planned.changes]
    own = _changed_themselves(plan)
    redo = " ".join(f"--redo {name}" for name in own)
    it = "them" if len(own) > 1 else "it"
    raise ResumeRefused(
        "\n".join(lines),
        f"`{redo}` trains {it} and what follows from {it} again; or undo the change; if this is another schedule, give it "
        "a `name:` of its own or another --out",
    )


def _changed_themselves(plan: Plan) -> list[str]:
    """The stale stages that are so not just because of their parent or teacher; for all stages of a block, its name."""
    stale = {s.stage.name for s in plan.stale}
    own = [s.stage for s in plan.stale if s.changes or stale.isdisjoint(_needs(s.stage))]
    names = {stage.name for stage in own}
    others = {stage.group for stage in plan.schedule.stages if stage.name not in names}
    return list(dict.fromkeys(s.group if s.group is not None and s.group not in others else s.name for s in own))


def _needs(stage: Stage) -> tuple[str, ...]:
    """The stages that are trained before it."""
    return tuple(name for name in (stage.parent, stage.solver.teacher) if name is not None)


def _with_average(
    planned: PlannedStage, averaged: Sequence[SnapshotRef | None], teacher: PlannedStage | None
) -> PlannedStage:
    """With its teacher's snapshot, and those that it is averaged from: as long as one is missing, it has nothing to start from."""
    planned = replace(planned, teacher=teacher.end if teacher is not None else None)
    there = tuple(ref for ref in averaged if ref is not None)
    if len(there) < len(averaged):
        return replace(planned, start=None) if planned.state is State.FRESH else planned
    return replace(planned, averaged=there)


def _plan_stage(
    schedule: Schedule,
    stage: Stage,
    sources: Mapping[str, Source | None],
    needs: Sequence[PlannedStage],
    inventory: Inventory,
    redo: bool,
    asked: Choice,
) -> tuple[tuple[SnapshotRef, ...], PlannedStage]:
    """The snapshots that count, and what is to be done. `needs`: the stages that come before it, but for its parent. `redo`: the stage is
    named by --redo, or follows from one that is."""
    own, source = inventory.of(stage.name), sources[stage.name]
    usable = tuple(ref for ref in own if counts(ref, stage, source, inventory))
    usable = of_these_images(unless_over(usable, own, stage), stage, schedule)
    position, skipped, at_most = left_off(stage, sources)
    planned = PlannedStage(
        stage=stage,
        state=State.FRESH,
        iter=stage.begins,
        position=position - stage.begins * stage.solver.batch_size,
        at_most=at_most,
        skipped=skipped,
        skipped_before=skipped,
    )
    if usable:
        # An end is an end, even if a stretch was trained once more elsewhere and left out images there.
        ends = [ref for ref in usable if ref.ends(stage.solver.max_iter)]
        newest = max(ends or usable, key=how_far)
        return usable, _gone_on(planned, newest)
    parent = source.parent if source is not None else None
    planned = replace(planned, start=source.start if source is not None else None)
    if not own:
        return (), planned
    why, changes = why_stale(schedule, stage, source, own, inventory)
    # Below a stage that `redo` names but that is up to date again (the same command, typed a second time) only what is
    # stale because of it follows; a change of its own must be named, which other images are not.
    if (
        redo
        and stage.name not in asked.redo
        and any(c.field != IMAGES for c in changes)
        and not any(needed is not None and needed.again for needed in (parent, *needs))
    ):
        redo = False
    if any(needed is not None and needed.state is State.STALE for needed in (parent, *needs)):
        redo = False  # there is nothing to start from, or to learn from
    return (), replace(
        planned,
        state=State.FRESH if redo else State.STALE,
        changes=changes,
        why=f"trained again: {why}" if redo else why,
        again=redo,
    )


def _gone_on(planned: PlannedStage, newest: SnapshotRef) -> PlannedStage:
    """The stage where its newest snapshot is where training has come to."""
    length = planned.stage.solver.max_iter
    done = newest.ended or newest.iter >= length
    why = [] if done else [f"from {newest.name}"]
    if not done and goes_beyond(newest, planned.stage):
        why.insert(0, f"goes on from iteration {newest.iter} to {length}")
    why += [f"trained as `{newest.trained_as}`"] * bool(newest.trained_as)
    stage = planned.stage
    gone = (FILES & stage.origins.keys() & newest.identity.keys()) - stage.identity.keys()
    if gone:
        # The stage has its weights from there.
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
        changes=() if done else raised(newest, stage),
    )


def _left_out(planned: PlannedStage, chosen: bool, everything: Mapping[str, PlannedStage]) -> PlannedStage:
    """The same stage, marked as disabled or not chosen if this plan leaves it out."""
    if not planned.stage.enabled:
        parent = everything[planned.stage.parent].stage if planned.stage.parent is not None else None
        why = f"its parent `{parent.name}` is disabled" if parent is not None and not parent.enabled else ""
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
