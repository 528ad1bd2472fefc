"""The next step: rank 0 decides from what is on disk, and tells the other ranks.

The same pure function plans again before each stage, so resuming needs no special code.
"""

from collections import deque
from collections.abc import Generator
from dataclasses import replace
from typing import Any, NamedTuple

from stagerun import store
from stagerun.base.errors import Diverged
from stagerun.base.events import Event, Note, NotFinite
from stagerun.base.recipe import Determinism
from stagerun.base.snapshots import SnapshotRef
from stagerun.base.wings import wing
from stagerun.plan import PlannedStage, State
from stagerun.plan.counting import rollback_iter, targets
from stagerun.plan.ensembles import PlannedEnsemble, other_set, tested_set
from stagerun.train import results
from stagerun.train.agreement import rank0
from stagerun.train.context import LOSS_WINDOW, Context, StageRun
from stagerun.train.environment import promise, promise_of_ensemble, require_exact, require_same
from stagerun.train.hooks import keys_of
from stagerun.train.members import EnsembleRun, Trained
from stagerun.train.progress import most_for

Step = StageRun | EnsembleRun

# Fields of a PlannedStage that the other ranks need, besides stage, state, and the identity, for which rank 0 alone reads files.
_SHARED = ("iter", "position", "skipped", "until")


def next_step(context: Context) -> tuple[Step | None, list[Note]]:
    """Return the stage or ensemble to run now, None when nothing remains, and notes of rank 0. Collective."""
    decided: Step | None = None
    notes: list[Note] = []

    def decide() -> dict[str, Any]:
        nonlocal decided
        decided = _decide(context, notes)
        portable = context.schedule.determinism is Determinism.PORTABLE
        if decided is not None and (context.exact or portable):
            require_exact(promised(context, decided), portable)
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
    """Return the promise for a step's bits, on rank 0."""
    if isinstance(step, EnsembleRun):
        refs = [trained.ref for trained in step.trained]
        return promise_of_ensemble(context.schedule, step.ensemble, refs, context.environment)
    return promise(context.schedule, step.planned, context.environment(step.stage), step.replays)


def evaluated_again(context: Context, planned: PlannedStage) -> Note | None:
    """Return a note if a finished stage is evaluated again on other images."""
    keeper, stage = context.keeper, planned.stage
    result = results.read_result(keeper.out, planned.end) if keeper is not None and planned.end is not None else None
    if result is None or not other_set(context.schedule, stage, result.tested_set):
        return None
    images = f"{result.tested_set} -> {tested_set(context.schedule, stage)}"
    return Note(text=f"{stage.name} is evaluated again, on other validation images: {images}", warning=True)


def _decide(context: Context, notes: list[Note]) -> Step | None:
    """Decide, on rank 0. A damaged start snapshot is set aside, and the plan is made again without it: training resumes from the
    previous one, and repeats the iterations in between."""
    keeper = context.rank0_keeper
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
            trained = _members(context, ready[0], notes)
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
        if (step := _read(context, planned, notes)) is None:
            continue
        enabled = [s.stage.name for s in plan.stages if s.state is not State.DISABLED]
        step.number, step.iterations_left = enabled.index(planned.stage.name) + 1, plan.iterations_left
        step.record_ends = replay.ends(planned) if replay is not None else None
        return step


def _read(context: Context, planned: PlannedStage, notes: list[Note]) -> StageRun | None:
    """Return the stage with the files of its snapshots. None if one is damaged, and is set aside now."""
    done, damaged = planned.state is State.DONE, list[SnapshotRef]()

    def read(ref: SnapshotRef | None, start: bool = False) -> dict[str, bytes] | None:
        if ref is None:
            return None
        files = context.rank0_keeper.read(ref, most_for(context.schedule, planned) if start else None)
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


def _members(context: Context, planned: PlannedEnsemble, notes: list[Note]) -> tuple[Trained, ...] | None:
    """Return the verified members of an ensemble. None if something comes first: a snapshot was damaged, and is set aside now, or its
    result is missing."""
    keeper, members = context.rank0_keeper, []
    for ref, (_, iter) in zip(planned.members, planned.ensemble.points, strict=True):
        if keeper.read(ref) is None:
            notes.append(was_set_aside(ref.name))
            return None
        result = results.read_result(keeper.out, ref) if iter is None else None
        if iter is None and result is None:
            return None
        members.append(Trained(ref, result))
    return tuple(members)


# -- `on_nan: ROLLBACK`


class _Target(NamedTuple):
    """The snapshot to roll back to, None for the seed, with its verified files, on rank 0; `resumes`: it belongs to the stage."""

    ref: SnapshotRef | None = None
    files: dict[str, bytes] | None = None
    resumes: bool = False


def go_back(run: StageRun, failed: NotFinite) -> Generator[Event, None, StageRun]:
    """Return the stage's run that continues after `failed`, from an earlier snapshot and with other images. Collective; no snapshot may
    be in flight, and the failed state is lost: the snapshot is read again. Diverged if the stage's start is missing or damaged, and no
    other snapshot exists.

    The count of rollbacks and the skipped images are in no snapshot before the next one. A run that is killed in between repeats the
    iterations, fails again, and rolls back the same way. If the right snapshot is damaged or missing, the run takes the previous one,
    and is EQUIVALENT only.
    """
    worker, planned, solver = run.worker, run.planned, run.stage.solver
    target, notes = _Target(), list[Note]()

    def choose() -> list[Any]:
        nonlocal target
        target = _choose(run, failed, notes)
        return [target.resumes, target.ref.iter if target.ref is not None and target.resumes else run.stage.begins]

    resumes, back_to = rank0(worker.comm, choose)
    yield from notes
    wanted = max(
        run.stage.begins, rollback_iter(failed.iter, solver.snapshot, worker.schedule.saved_at(run.stage.name))
    )
    if back_to != wanted:
        text = (
            f"{run.stage.name}: {failed.what} at iteration {failed.iter}; the snapshot of {wanted} is damaged or missing: "
            f"resuming from {back_to} is EQUIVALENT, not BIT-EXACT"
        )
        yield Note(text=text, warning=True)
    start = target.ref.name if target.ref is not None else f"seed {solver.random_seed}"
    yield replace(failed, keys=keys_of(run, failed), back_to=back_to, snapshot=start, until=planned.until)
    return replace(
        run,
        planned=replace(
            planned,
            state=State.RESUME if resumes else State.FRESH,
            iter=back_to,
            start=target.ref,
            skipped=planned.skipped + (failed.iter + 1 - back_to) * solver.batch_size,
            # The ids of a renamed stage continue with its first name, also from its start.
            like=planned.like or (planned.start if planned.state is State.RESUME else None),
        ),
        files=target.files,
        iterations_left=run.iterations_left + planned.iter - back_to,
        losses=deque(maxlen=LOSS_WINDOW),
        seconds=0.0,
        rollbacks=failed.number,
    )


def _choose(run: StageRun, failed: NotFinite, notes: list[Note]) -> _Target:
    """Choose the target, on rank 0; damaged snapshots are set aside, and noted."""
    keeper, planned, stage = run.worker.rank0_keeper, run.planned, run.stage
    branches, parent = run.worker.schedule.saved_at(stage.name), run.parent_id
    for name in keeper.inventory().damaged:
        parsed = store.parse_name(name)
        # Training may reach this iteration again, and need the name.
        if parsed is not None and parsed.stage == stage.name and keeper.is_harmed(stage.name, name):
            keeper.require_held()
            notes.append(was_set_aside(name, store.set_aside(keeper.disk, keeper.out, name)))
    while True:
        inventory = keeper.inventory()
        earlier = targets(inventory, stage, branches, parent, planned.skipped, failed.iter)
        start = next((ref for ref in inventory.snapshots if ref.id == parent), None)
        if not earlier and parent and start is None:
            raise Diverged(
                f"in stage `{stage.name}` {failed.what} at iteration {failed.iter}, and the snapshot that it started from is missing",
                "train the stage before it again, or write `on_nan: SKIP`",
            )
        ref = earlier[0] if earlier else start
        resumed = replace(planned, state=State.RESUME if earlier else State.FRESH)
        files = keeper.read(ref, most_for(run.worker.schedule, resumed)) if ref is not None else None
        if ref is None or files is not None:
            return _Target(ref, files, bool(earlier))
        notes.append(was_set_aside(ref.name))


def was_set_aside(name: str, now: str = "") -> Note:
    """Return the warning about a damaged snapshot, which is now called `now`."""
    return Note(text=f"snapshot {name} is damaged and was set aside as {now or f'.bad-{name}'}", warning=True)
