"""Schedule + inventory -> for each stage what will be done, and why. Pure.

A stage's snapshot counts if the stage has the same identity now as when it was trained, and started from the snapshot that
its parent ends in now. So a changed stage makes itself and its descendants stale, and never its ancestors. What it is called does
not matter (`counting.found_for`).
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from stagerun.base.errors import Problems, RecipeError, ResumeRefused
from stagerun.base.recipe import FILES, WEIGHTS_DIGEST, Schedule, Stage
from stagerun.base.snapshots import Inventory, SnapshotRef, how_far
from stagerun.plan.choice import choice, require_starts, require_teachers
from stagerun.plan.counting import (
    Decision,
    Source,
    averaged_from,
    changed_fields,
    counts,
    found_for,
    left_off,
    of_these_images,
    oldest_at,
    points_averaged,
    points_of,
    same_weights,
    source_of,
    taught_by,
    unless_over,
)
from stagerun.plan.pieces import lost_points, pieces
from stagerun.plan.planned import Change, Lost, Plan, PlannedStage, State, label
from stagerun.plan.raised import goes_beyond
from stagerun.plan.stale import IMAGES, raised, why_stale

__all__ = ["Change", "Lost", "Plan", "PlannedStage", "Planner", "State", "changed_fields", "make_plan", "require_fresh"]


def make_plan(
    schedule: Schedule,
    inventory: Inventory,
    redo: Collection[str] = (),
    only: Collection[str] = (),
    until: str | None = None,
) -> Plan:
    """Return what is left to do.

    `redo` names stale stages to train again, with their stale descendants. On a stage that is not stale it does nothing,
    so that a command with it can be repeated. `only` names
    the stages that may be trained, `until` the last one that may, in running order; without them all may.
    RecipeError when they name no stage, UsageError when a stage would start from what is left out and not on disk, or be taught by it.
    """
    return Planner(schedule, redo, only, until).plan(inventory)


class Planner:
    """Plans a schedule again as its snapshots come and go. A stage is decided anew only if its snapshots, or the decision about a stage that
    it depends on, are others than in the plan before: a plan of many stages costs little more than what has changed. Raises as
    `make_plan` does."""

    def __init__(
        self, schedule: Schedule, redo: Collection[str] = (), only: Collection[str] = (), until: str | None = None
    ) -> None:
        self.schedule, self.asked = schedule, choice(schedule, redo, only, until)
        self._needed = {stage.name: _needed(schedule, stage) for stage in schedule.stages}
        self._lasting: dict[str, Decision] = {}
        _require_rest(schedule)

    def plan(self, inventory: Inventory) -> Plan:
        schedule, chosen = self.schedule, self.asked.chosen
        # A snapshot under another name may turn out to be of any stage, which was renamed.
        before = self._lasting if inventory.by_stage.keys() <= self._needed.keys() else {}
        decided: dict[str, Decision] = {}
        for stage in schedule.stages:
            needs = tuple(decided[name] for name in self._needed[stage.name])
            decision = before.get(stage.name)
            if decision is None or (decision.own, decision.needs) != (inventory.of(stage.name), needs):
                decision, inventory = self._decide(stage, needs, decided, inventory)
            decided[stage.name] = decision
        self._lasting = {name: decision for name, decision in decided.items() if decision.lasts}
        points = points_of(schedule, decided)
        again = pieces(decided, _missing(schedule, points, chosen, decided))
        lost = lost_points(decided, again)
        plan = Plan(schedule, tuple(one.shown for one in decided.values()), again, lost, inventory, points)
        if len(chosen) < len(plan.stages):
            require_starts(plan, chosen)
            require_teachers(plan)
        return plan

    def _decide(
        self, stage: Stage, needs: tuple[Decision, ...], decided: Mapping[str, Decision], inventory: Inventory
    ) -> tuple[Decision, Inventory]:
        """What to do about a stage, and the inventory with the snapshots that turned out to be the stage's under its name."""
        above = decided[stage.parent] if stage.parent is not None else None
        teacher = decided[stage.solver.teacher].planned if stage.solver.teacher is not None else None
        members = [(decided[name], iter) for name, iter in points_averaged(self.schedule, stage)]
        averaged = [
            (one, iter, one.planned.end if iter is None else oldest_at(iter, one.usable)) for one, iter in members
        ]
        source = None
        if above is not None:
            source = source_of(stage, above, same_weights(above, stage.parent_iter, inventory))
            _require_later(self.schedule, stage, above.planned.stage)
        if teacher is not None:
            stage = taught_by(stage, teacher, inventory)
        alike = [same_weights(one, iter, inventory) for one, iter in members]
        if averaged:
            stage = averaged_from(stage, averaged, alike, inventory)
        inventory = found_for(stage, source, inventory, self._needed)
        redo = stage.name in self.asked.redo or any(one.redo for one in needs)
        usable, planned = self._planned(stage, source, needs, inventory, redo)
        planned = _with_average(replace(planned, teacher=teacher.end if teacher is not None else None), averaged)
        lacking = tuple(
            (one.planned.stage.name, iter)
            for (one, iter, ref), ids in zip(averaged, alike, strict=True)
            if ref is None and not ids
        )
        parent = above.planned.stage if above is not None else None
        shown = _left_out(planned, stage.name in self.asked.chosen, parent)
        own = inventory.of(stage.name)
        return Decision(own, needs, planned, shown, source, usable, lacking, redo), inventory

    def _planned(
        self, stage: Stage, source: Source | None, needs: Collection[Decision], inventory: Inventory, redo: bool
    ) -> tuple[tuple[SnapshotRef, ...], PlannedStage]:
        """The snapshots that count, and what is to be done. `redo`: the stage is named by --redo, or follows from one that is."""
        own = inventory.of(stage.name)
        usable = tuple(ref for ref in own if counts(ref, stage, source, inventory))
        usable = of_these_images(unless_over(usable, own, stage), stage, self.schedule)
        position, skipped, at_most = left_off(stage, source)
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
            return usable, _gone_on(planned, max(ends or usable, key=how_far))
        planned = replace(planned, start=source.start if source is not None else None)
        if not own:
            return (), planned
        why, changes = why_stale(self.schedule, stage, source, own, inventory)
        # Below a stage that `redo` names but that is up to date again (the same command, typed a second time) only what is
        # stale because of it follows; a change of its own must be named, which other images are not.
        changed_itself = stage.name not in self.asked.redo and any(c.field != IMAGES for c in changes)
        if changed_itself and not any(one.planned.again for one in needs):
            redo = False
        if any(one.planned.state is State.STALE for one in needs):
            redo = False  # there is nothing to start from, or to learn from
        return (), replace(
            planned,
            state=State.FRESH if redo else State.STALE,
            changes=changes,
            why=f"trained again: {why}" if redo else why,
            again=redo,
        )


def _needed(schedule: Schedule, stage: Stage) -> tuple[str, ...]:
    """The stages that a stage starts from, is averaged from, or is taught by."""
    names = (stage.parent, stage.solver.teacher, *(name for name, _ in points_averaged(schedule, stage)))
    return tuple(dict.fromkeys(name for name in names if name is not None))


def _with_average(
    planned: PlannedStage, averaged: Collection[tuple[Decision, int | None, SnapshotRef | None]]
) -> PlannedStage:
    """The stage with the snapshots that it is averaged from. As long as one is missing, it has nothing to start from."""
    there = tuple(ref for *_, ref in averaged if ref is not None)
    if len(there) < len(averaged):
        return replace(planned, start=None) if planned.state is State.FRESH else planned
    return replace(planned, averaged=there)


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
    decided: Mapping[str, Decision],
) -> Iterator[tuple[str, str, int]]:
    """Ensemble, stage and iteration of each snapshot before a stage's end that isn't there, of ensembles that can be evaluated, or that
    a stage is to start from."""
    if not schedule.ensembles:
        return
    enabled = {stage.name for stage in schedule.stages if stage.enabled}
    started = {one.planned.stage.average for one in decided.values() if one.shown.state is State.FRESH}
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
    # Those that are not stale just because of their parent or teacher; for all stages of a block, its name.
    stale = {s.stage.name for s in plan.stale}
    own = [s.stage for s in plan.stale if s.changes or stale.isdisjoint((s.stage.parent, s.stage.solver.teacher))]
    names = {stage.name for stage in own}
    others = {stage.group for stage in plan.schedule.stages if stage.name not in names}
    asked = dict.fromkeys(s.group if s.group is not None and s.group not in others else s.name for s in own)
    redo = " ".join(f"--redo {name}" for name in asked)
    it = "them" if len(asked) > 1 else "it"
    raise ResumeRefused(
        "\n".join(lines),
        f"`{redo}` trains {it} and what follows from {it} again; or undo the change; if this is another schedule, give it "
        "a `name:` of its own or another --out",
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


def _left_out(planned: PlannedStage, chosen: bool, parent: Stage | None) -> PlannedStage:
    """The same stage, marked as disabled or not chosen if this plan leaves it out."""
    if not planned.stage.enabled:
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
