"""The run: rank 0 looks at what is on disk and says what comes next, every rank does it, until nothing is left.

The plan is made anew before each stage by the same pure function, from what is on disk then. So going on after a kill is not
a path of its own: it is how every stage starts.
"""

import time
from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import Any

import torch

from stagerun.base.events import Event, Note, Renamed, RunFinished, Stopped
from stagerun.base.recipe import Model
from stagerun.base.snapshots import SnapshotRef
from stagerun.engine.update import explained
from stagerun.plan import PlannedStage, State
from stagerun.plan.counting import names_of, other_set, tested_set
from stagerun.plan.ensembles import PlannedEnsemble
from stagerun.system.pulse import Section
from stagerun.train import results
from stagerun.train.agreement import anyone, hosts_of, only_here, rank0, require_same_schedule
from stagerun.train.ensembling import EnsembleRun, Trained, test_ensemble
from stagerun.train.environment import (
    environment_of,
    other_machines,
    promise,
    promise_of_ensemble,
    require_exact,
    require_same,
)
from stagerun.train.finish import finish_stage
from stagerun.train.keeper import Keeper, run_started
from stagerun.train.replay import Replay
from stagerun.train.rollback import aside
from stagerun.train.stage import train_stage
from stagerun.train.stage_start import restored
from stagerun.train.stored import most_bytes, most_for
from stagerun.train.worker import Context, StageRun


def run(worker: Context) -> Iterator[Event]:
    """Run what is not yet done. Collective; the keeper is opened, on rank 0 alone. Ends after Stopped or RunFinished.

    `stop` is asked in the midst of what takes long; with a grace period it is found before that, too, and an iteration that can't be
    finished in time is broken off. A replay ends where its record ends. ResumeRefused where `exact` is asked and not promised.

    Errors concern all ranks: one of them raises the error, the others ToldByAnother or PeerError.
    """
    began, comm, keeper = time.monotonic(), worker.comm, worker.keeper
    require_same_schedule(comm, worker.world, worker.schedule)
    worker.others = other_machines(comm, worker.device)
    if keeper is not None:
        worker.schedule = keeper.schedule  # which has the sets: rank 0 plans, promises and writes
    with worker.open_images():
        trained = yield from _walk(worker)
    if trained is not None:
        not_chosen = keeper.not_chosen() if keeper is not None else ()
        if keeper is not None and worker.replay is not None:  # a record may end before the schedule
            not_chosen += tuple(dict.fromkeys(planned.stage.name for planned in keeper.plan().work))
        yield RunFinished(trained=trained, seconds=time.monotonic() - began, not_chosen=not_chosen)


def _walk(worker: Context) -> Generator[Event, None, bool | None]:
    """Whether there was anything to do; None after Stopped."""
    opened, keeper = False, worker.keeper
    yield from _opening(worker)
    for name in keeper.harmed if keeper is not None else ():
        yield aside(name, f".bad-{name}")
    for name in keeper.inventory().damaged if keeper is not None else ():
        yield Note(text=f"snapshot {name} is damaged and is passed over", warning=True)
    while True:
        worker.comm.pulse.enter(Section.START)
        step, notes = _next(worker)
        yield from notes
        if step is None:
            break
        reason = "asked to stop" if anyone(worker.comm, worker.stopping.asked) else ""
        if not reason and not worker.images.looked_at:
            if (yield from worker.images.imported(worker.comm, worker.stop)):
                reason = "asked to stop while the images were imported; the import goes on where it was"
            # Before the import only names and sizes were known. Another run may have imported the folders after rank 0's first look.
            elif worker.images.imports and rank0(worker.comm, lambda: keeper is not None and keeper.look_at_images()):
                if keeper is not None:
                    worker.schedule = keeper.schedule
                continue
            elif (yield from worker.images.open(worker.comm, worker.world, worker.stop)):
                reason = "asked to stop while the images were copied; the copy goes on where it was"
            else:
                worker.images.remove_others(worker.comm, worker.world)
                worker.images.preflight(worker.comm)
        if reason:
            stage, iter = _place(step)
            yield Stopped(stage=stage, iter=iter, reason=reason)
            return None
        opened = True
        for event in _do(worker, step):
            yield event
            if isinstance(event, Stopped):
                return None
    return opened


def _do(worker: Context, step: StageRun | EnsembleRun) -> Iterator[Event]:
    """Collective; the last event may be Stopped."""
    keeper = worker.keeper
    if isinstance(step, EnsembleRun):
        if keeper is not None and (other := _promise(worker, step)):
            yield other
        yield from test_ensemble(step)
        return
    done = step.planned.state is State.DONE
    if done and keeper is not None:
        again, same = _evaluated_again(keeper, step.planned), _promise(worker, step)
        if again:
            yield again
        if same and (same.warning or not again):
            yield same
    # A GPU may be too small for the weights alone, too.
    with explained(step.planned.stage.solver.device_batch_size):
        yield from finish_stage(step, restored(step)) if done else train_stage(step)


def _evaluated_again(keeper: Keeper, planned: PlannedStage) -> Note | None:
    result = results.read_result(keeper.out, planned.end) if planned.end is not None else None
    if result is None or not other_set(keeper.schedule, planned.stage, result.tested_set):
        return None
    now = tested_set(keeper.schedule, planned.stage)
    text = f"{planned.stage.name} is evaluated again, on other validation images: {result.tested_set} -> {now}"
    return Note(text=text, warning=True)


def _promise(worker: Context, step: StageRun | EnsembleRun) -> Note | None:
    """What is said about its bits, on rank 0."""
    if isinstance(step, EnsembleRun):
        refs = [trained.ref for trained in step.trained]
        return promise_of_ensemble(worker.schedule, step.ensemble, refs, worker.device, worker.comm.size, worker.others)
    now = environment_of(worker.schedule, step.planned.stage, worker.device, worker.comm.size, worker.others)
    return promise(worker.schedule, step.planned, now, step.replays)


def _opening(worker: Context) -> Iterator[Event]:
    schedule, comm, keeper = worker.schedule, worker.comm, worker.keeper

    def left() -> int:
        assert keeper is not None
        return keeper.plan().iterations_left

    hosts = tuple(hosts_of(comm))
    yield run_started(
        schedule,
        out=worker.out,
        workers=comm.size,
        device=str(worker.device),
        threads=torch.get_num_threads(),
        iterations_left=rank0(comm, left),
        hosts=hosts,
        attempt=keeper.attempt if keeper is not None else 0,
    )
    if (text := only_here(comm, hosts, worker.out)) and keeper is not None:
        yield Note(text=text, warning=True)
    taken = names_of(keeper.inventory()) if keeper is not None else {}
    for name in dict.fromkeys(taken.values()):
        yield Renamed(stage=name, snapshots=tuple(snapshot for snapshot, stage in taken.items() if stage == name))


def _place(step: StageRun | EnsembleRun) -> tuple[str, int]:
    """Stage and iteration at which a step begins: of an ensemble those of the member that is trained last."""
    if isinstance(step, StageRun):
        return step.planned.stage.name, step.planned.iter
    return step.begins_at


# Of a PlannedStage, what the other ranks need beside its stage, its state, and the identity, for which rank 0 alone looks at files.
_SHARED = ("iter", "position", "skipped", "until")


def _next(worker: Context) -> tuple[StageRun | EnsembleRun | None, list[Note]]:
    """Rank 0's decision, on every rank; None when nothing is left. Collective."""
    found: list[StageRun | EnsembleRun | None] = []
    notes: list[Note] = []

    def decide() -> dict[str, Any]:
        step = _decide(worker, notes)
        if step is not None and worker.exact:
            require_exact(_promise(worker, step))
        found.append(step)
        match step:
            case EnsembleRun():
                return {"ensemble": step.ensemble.name}
            case StageRun(planned=planned):
                shared = {name: getattr(planned, name) for name in _SHARED}
                shared["record_ends"], shared["identity"] = step.record_ends, dict(planned.stage.identity)
                return {"stage": planned.stage.name, "state": planned.state.value, "number": step.number, **shared}
        return {}

    answer = rank0(worker.comm, decide)
    if found:
        return found[0], notes
    if not answer:
        return None, []
    schedule = worker.schedule
    if "ensemble" in answer:
        return EnsembleRun(worker, next(e for e in schedule.ensembles if e.name == answer["ensemble"])), []
    shared = {name: answer[name] for name in _SHARED}
    stage = replace(schedule.stage(answer["stage"]), identity=answer["identity"])
    planned = PlannedStage(stage=stage, state=State(answer["state"]), **shared)
    return StageRun(worker, planned, answer["number"], record_ends=answer["record_ends"]), []


def _decide(worker: Context, notes: list[Note]) -> StageRun | EnsembleRun | None:
    """Rank 0's. A start snapshot that turns out damaged is set aside, and the plan is made again without it: training then goes on from
    the one before, at the cost of the iterations in between."""
    keeper = worker.keeper
    assert keeper is not None
    if worker.replay is not None and worker.replaying is None:
        worker.replaying = Replay(worker.replay, worker.schedule, keeper.out)
    while True:
        plan = keeper.plan()
        require_same(plan, worker.device, worker.comm.size, worker.others)
        replay = worker.replaying
        if replay is not None:
            same = replay.compared(plan, lambda ref: keeper.read(ref, most_bytes(_model(keeper, ref))))
            if same is None:
                continue
            notes += same
        waiting = results.unfinished(plan, keeper.out)
        ready = [] if waiting else results.ready_ensembles(plan, keeper.out)
        if ready:
            trained = _members(keeper, ready[0], notes)
            if trained is None:
                continue
            return EnsembleRun(worker, ready[0].ensemble, trained)
        planned = waiting[0] if waiting else plan.next
        if planned is None:
            return None
        if replay is not None and (over := replay.over(planned)):
            notes.append(over)
            return None
        source = planned.end if planned.state is State.DONE else planned.start
        # Not for the seed: how large a network is takes a second to find.
        files = keeper.read(source, most_for(worker.schedule, planned)) if source is not None else None
        lesson = planned.teacher if planned.state is not State.DONE else None
        teacher = keeper.read(lesson, most_bytes(_model(keeper, lesson))) if lesson is not None else None
        damaged = [ref for ref, got in ((source, files), (lesson, teacher)) if ref is not None and got is None]
        if planned.state is State.FRESH:
            damaged += [ref for ref in planned.averaged if keeper.read(ref, most_bytes(_model(keeper, ref))) is None]
        if not damaged:
            enabled = [s.stage.name for s in plan.stages if s.state is not State.DISABLED]
            number, ends = enabled.index(planned.stage.name) + 1, replay.ends(planned) if replay is not None else None
            return StageRun(worker, planned, number, plan.iterations_left, files, ends, teacher)
        notes += [aside(ref.name, f".bad-{ref.name}") for ref in damaged]


def _model(keeper: Keeper, ref: SnapshotRef) -> Model:
    return keeper.schedule.stage(ref.stage).model


def _members(keeper: Keeper, planned: PlannedEnsemble, notes: list[Note]) -> tuple[Trained, ...] | None:
    """What an ensemble is made from, each snapshot verified. None if there is something to do before: one was damaged, and is set
    aside now, or its result is gone."""
    found = []
    for ref, (_, iter) in zip(planned.members, planned.ensemble.points, strict=True):
        files = keeper.read(ref, most_bytes(_model(keeper, ref)))
        result = results.read_result(keeper.out, ref) if iter is None else None
        if files is None:
            notes.append(aside(ref.name, f".bad-{ref.name}"))
        if files is None or (iter is None and result is None):
            return None
        found.append(Trained(ref, result))
    return tuple(found)
