"""The state at the start of a stage: from a snapshot, the seed or other weights, the same on every rank."""

import json
from dataclasses import replace

import torch
from torch import nn

from stagerun.base.errors import ResumeRefused
from stagerun.base.wings import require_wing
from stagerun.engine.codec import decode
from stagerun.engine.state import TrainState, average, make_state, momentum, restore, slots, weights
from stagerun.models import build, without_memory
from stagerun.plan import PlannedStage, State
from stagerun.plan.planned import needed
from stagerun.schedule.improvement import FRESH, NOTHING_YET
from stagerun.train import starting_weights
from stagerun.train.agreement import everyone, hand_out, rank0
from stagerun.train.context import StageRun
from stagerun.train.progress import AVERAGE, MOMENTUM, STATE, WEIGHTS, Progress, progress_of
from stagerun.train.transfer import Origin


def restored(run: StageRun) -> TrainState:
    """Return the state to train or evaluate from, the same on every rank. Collective.

    RecipeError for a `param` that fits no parameter, ResumeRefused for a snapshot of another model or solver type.
    """
    solver = run.stage.solver
    torch.manual_seed(solver.random_seed)
    model = build(run.stage.model)
    _require_rules_that_fit(run, model)
    state = make_state(model, solver, run.worker.device)
    state.iter = state.tested = run.planned.iter
    if not rank0(run.worker.comm, lambda: _fill(run, state)):
        state.average = None
    tensors = [*weights(state).values()]
    if _carries_momentum(run.planned):
        tensors += momentum(state).values()
    if run.planned.state is not State.FRESH:
        tensors += average(state).values()
    hand_out(run.worker.comm, tensors)
    if run.planned.state is State.FRESH and state.average is not None:
        state.average.restart()
    if run.planned.state is not State.FRESH:
        _take_up_progress(run, state)
    if run.rollbacks is not None:
        state.rollbacks = run.rollbacks
    return state


def _require_rules_that_fit(run: StageRun, model: nn.Module) -> None:
    """Raise RecipeError for a `param` or `freeze` of any stage that fits no parameter, and for weights that a stage can't take.
    Collective; once in a run, before the first stage is trained. `model`: the network of this stage."""
    worker, schedule = run.worker, run.worker.schedule
    if worker.rules_checked:
        return

    def look() -> None:
        started = []
        if worker.keeper is not None and any(stage.solver.start for stage in schedule.stages):
            planned = worker.keeper.plan().stages
            started = [one.stage for one in planned if one.stage.enabled and needed(one) is not None]
        made = lambda other: model if other == run.stage.model else without_memory(other)  # noqa: E731
        starting_weights.require_fitting(schedule, started, schedule.stages, made)

    everyone(worker.comm, look)
    worker.rules_checked = True


def _take_up_progress(run: StageRun, state: TrainState) -> None:
    """Restore from rank 0 the counts of failures (`on_nan`), so that the limit also holds for an interrupted run, and the state of
    `plateau` and `early_stop`. Collective. ResumeRefused if a snapshot to resume from lacks it; a finished stage is kept as it is."""
    solver, followed = run.stage.solver, run.worker.schedule.followed(run.stage) is not None

    def saved() -> str:
        progress = progress_of(run.files) if run.files is not None else Progress(0, 0.0, [])
        missing = None
        if progress.plateau is None and solver.lr_policy == "plateau":
            missing = "lr_policy `plateau`"
        elif progress.best is None and followed:
            missing = "`early_stop`"
        if missing and run.resumes:
            raise ResumeRefused(
                f"the snapshot of stage `{run.stage.name}` was made without {missing}",
                "take `--redo` for the stage, or another --out",
            )
        return json.dumps(replace(progress, losses=[], weights={}).record())

    progress = progress_of({STATE: rank0(run.worker.comm, saved).encode()})
    state.skips, state.skips_in_all, state.rollbacks = progress.skips, progress.skips_in_all, progress.rollbacks
    if run.rollbacks is None:  # else the evaluation was done before the rollback
        state.tested = progress.tested
    if solver.lr_policy == "plateau":
        state.plateau = progress.plateau or FRESH
    if followed:
        state.best = progress.best or NOTHING_YET


def _carries_momentum(planned: PlannedStage) -> bool:
    """Return whether the momentum is restored: on a resume, or at a start that asks for it or begins with a .solverstate."""
    solver = planned.stage.solver
    begins = solver.carry_momentum or solver.solverstate is not None
    return planned.state is State.RESUME or (planned.state is State.FRESH and begins)


def _fill(run: StageRun, state: TrainState) -> bool:
    """Put the snapshot's tensors into the state, on rank 0; without a snapshot the drawn weights stay. Return whether averaged weights
    can be evaluated: a finished stage may have been trained without."""
    files, planned = run.files, run.planned
    fresh, resumes = planned.state is State.FRESH, planned.state is State.RESUME
    # A sweep of rates leaves the parent stage out, whose network may be another.
    alone = run.stage.parent is None and files is not None
    other = alone or starting_weights.has_other_weights(run.worker.schedule, run.stage) or bool(run.stage.solver.freeze)
    try:
        if fresh and other:
            _start(run, state)
        if files is None or (fresh and other):
            return True
        averaged = AVERAGE in files
        restore(weights(state), decode(files[WEIGHTS]))
        if _carries_momentum(planned):
            restore(momentum(state), _saved_momentum(run, state, files[MOMENTUM]))
        if averaged and not fresh and state.average is not None:
            restore(average(state), decode(files[AVERAGE]))
        if not averaged and resumes and state.average is not None:
            raise ValueError("it lacks averaged weights, and the stage has `ema_decay`")
    except (ValueError, KeyError) as error:
        ref = planned.start or planned.end
        raise ResumeRefused(
            f"snapshot {ref.name if ref else ''} does not fit stage `{run.stage.name}`: {error}",
            "it was made by another model, solver type or stagerun; take another --out to start again",
        ) from error
    if not fresh:
        progress = progress_of(files)
        run.weights, run.seconds = progress.weights, progress.train_seconds
        run.losses.extend(progress.losses)
    return averaged or fresh


def _start(run: StageRun, state: TrainState) -> None:
    """Fill the state of a stage that starts with other weights than its parent ends with, or freezes some."""
    files, stage, schedule = run.files, run.stage, run.worker.schedule
    before = decode(files[WEIGHTS]) if files is not None else None
    if before is not None and stage.parent is not None and not starting_weights.has_other_weights(schedule, stage):
        restore(weights(state), before)
    made = starting_weights.fill(schedule, stage, weights(state), before)
    if files is not None and _carries_momentum(run.planned):
        kept = {row.name for row in made.of(Origin.PARENT)}
        saved = _saved_momentum(run, state, files[MOMENTUM])
        for name, tensor in momentum(state).items():
            if name.partition("/")[2] in kept and saved[name].shape == tensor.shape:
                tensor.copy_(saved[name])
    if stage.solver.solverstate is not None:
        require_wing("caffe.tensors.remember")(stage, momentum(state))
    run.weights = starting_weights.record(made)
    run.weights_table = starting_weights.table_of(made, stage, state.model)


def _saved_momentum(run: StageRun, state: TrainState, data: bytes) -> dict[str, torch.Tensor]:
    """Return the snapshot's memory of updates, complete for the state. ValueError if its solver type has another one."""
    saved, live = decode(data), momentum(state)
    if slots(saved) != slots(live):
        raise ValueError(
            f"it remembers `{'`, `'.join(slots(saved)) or 'nothing'}` of its updates, and type "
            f"`{run.stage.solver.type}` needs `{'`, `'.join(slots(live))}`"
        )
    if run.planned.state is State.FRESH:
        # The parent may have frozen other parameters, which have no momentum; frozen ones need none.
        return {name: saved.get(name, v) for name, v in live.items()}
    return saved
