"""What comes next: rank 0 decides from what is on disk, and every rank is told.

The plan is made anew before each stage by the same pure function. So going on after a kill is not a path of its own: it is how every stage
starts.
"""

from dataclasses import replace
from typing import Any

from stagerun.base.events import Note
from stagerun.base.snapshots import SnapshotRef
from stagerun.base.wings import wing
from stagerun.plan import PlannedStage, State
from stagerun.plan.ensembles import PlannedEnsemble, other_set, tested_set
from stagerun.train import results
from stagerun.train.agreement import rank0
from stagerun.train.context import Context, StageRun
from stagerun.train.environment import promise, promise_of_ensemble, require_exact, require_same
from stagerun.train.keeper import Keeper
from stagerun.train.members import EnsembleRun, Trained
from stagerun.train.rollback import was_set_aside
from stagerun.train.snapshot_sizes import most_for

Step = StageRun | EnsembleRun

# Of a PlannedStage, what the other ranks need beside its stage, its state, and the identity, for which rank 0 alone looks at files.
_SHARED = ("iter", "position", "skipped", "until")


def next_step(context: Context) -> tuple[Step | None, list[Note]]:
    """Return the stage or ensemble to run now, None when nothing is left, and rank 0's notes on it. Collective."""
    decided: Step | None = None
    notes: list[Note] = []

    def decide() -> dict[str, Any]:
        nonlocal decided
        decided = _decide(context, notes)
        if decided is not None and context.exact:
            require_exact(promised(context, decided))
        match decided:
            case EnsembleRun():
                return {"ensemble": decided.ensemble.name}
            case StageRun(planned=planned):
                shared = {name: getattr(planned, name) for name in _SHARED}
                shared["record_ends"], shared["identity"] = decided.record_ends, dict(planned.stage.identity)
                return {"stage": planned.stage.name, "state": planned.state.value, "number": decided.number, **shared}
        return {}

    answer = rank0(context.comm, decide)
    if context.keeper is not None or not answer:
        return decided, notes
    schedule = context.schedule
    if "ensemble" in answer:
        return EnsembleRun(context, schedule.ensemble(answer["ensemble"])), []
    stage = replace(schedule.stage(answer["stage"]), identity=answer["identity"])
    shared = {name: answer[name] for name in _SHARED}
    planned = PlannedStage(stage=stage, state=State(answer["state"]), **shared)
    return StageRun(context, planned, answer["number"], record_ends=answer["record_ends"]), []


def promised(context: Context, step: Step) -> Note | None:
    """What is said of the bits that come of a step, on rank 0."""
    if isinstance(step, EnsembleRun):
        refs = [trained.ref for trained in step.trained]
        return promise_of_ensemble(context.schedule, step.ensemble, refs, context.environment)
    return promise(context.schedule, step.planned, context.environment(step.stage), step.replays)


def evaluated_again(context: Context, planned: PlannedStage) -> Note | None:
    """Why a stage that is done is evaluated again, where that is other images."""
    keeper, stage = context.keeper, planned.stage
    result = results.read_result(keeper.out, planned.end) if keeper is not None and planned.end is not None else None
    if result is None or not other_set(context.schedule, stage, result.tested_set):
        return None
    images = f"{result.tested_set} -> {tested_set(context.schedule, stage)}"
    return Note(text=f"{stage.name} is evaluated again, on other validation images: {images}", warning=True)


def _decide(context: Context, notes: list[Note]) -> Step | None:
    """Rank 0's. A start snapshot that turns out damaged is set aside, and the plan is made again without it: training then goes on from
    the one before, at the cost of the iterations in between."""
    keeper = context.keeper
    assert keeper is not None
    if context.replay is not None and context.replaying is None:
        context.replaying = wing("wire.replay.Replay")(context.replay, context.schedule, keeper.out)
    replay = context.replaying
    while True:
        plan = keeper.plan()
        require_same(plan, context.environment)
        if replay is not None:
            compared = replay.compared(plan, keeper.read)
            if compared is None:
                continue
            notes += compared
        waiting = results.unfinished(plan, keeper.out, keeper.evaluated)
        ready = [] if waiting else results.ready_ensembles(plan, keeper.out)
        if ready:
            trained = _members(keeper, ready[0], notes)
            if trained is None:
                keeper.evaluated.clear()
                continue
            return EnsembleRun(context, ready[0].ensemble, trained)
        planned = waiting[0] if waiting else plan.next
        if planned is None and keeper.forget():
            continue
        if planned is None:
            return None
        if replay is not None and (over := replay.over(planned)):
            notes.append(over)
            return None
        if (step := _read(context, keeper, planned, notes)) is None:
            continue
        enabled = [s.stage.name for s in plan.stages if s.state is not State.DISABLED]
        step.number, step.iterations_left = enabled.index(planned.stage.name) + 1, plan.iterations_left
        step.record_ends = replay.ends(planned) if replay is not None else None
        return step


def _read(context: Context, keeper: Keeper, planned: PlannedStage, notes: list[Note]) -> StageRun | None:
    """The stage with the files of the snapshots that it needs. None if one is damaged, and is set aside now."""
    done, damaged = planned.state is State.DONE, list[SnapshotRef]()

    def read(ref: SnapshotRef | None, start: bool = False) -> dict[str, bytes] | None:
        if ref is None:
            return None
        files = keeper.read(ref, most_for(context.schedule, planned) if start else None)
        if files is None:
            damaged.append(ref)
        return files

    files = read(planned.end if done else planned.start, start=True)
    teacher = read(planned.teacher) if not done else None
    if planned.state is State.FRESH:
        for ref in planned.averaged:
            read(ref)
    notes += [was_set_aside(ref.name) for ref in damaged]
    return None if damaged else StageRun(context, planned, files=files, teacher=teacher)


def _members(keeper: Keeper, planned: PlannedEnsemble, notes: list[Note]) -> tuple[Trained, ...] | None:
    """What an ensemble is made from, each snapshot verified. None if there is something to do before: one was damaged, and is set
    aside now, or its result is gone."""
    found = []
    for ref, (_, iter) in zip(planned.members, planned.ensemble.points, strict=True):
        if keeper.read(ref) is None:
            notes.append(was_set_aside(ref.name))
            return None
        result = results.read_result(keeper.out, ref) if iter is None else None
        if iter is None and result is None:
            return None
        found.append(Trained(ref, result))
    return tuple(found)
