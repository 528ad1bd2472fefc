"""Where a stage starts on one rank: its state from a snapshot or the seed, the same on every rank."""

from collections.abc import Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

import torch

from stagerun.base import order
from stagerun.base.errors import Problems, RecipeError, ResumeRefused
from stagerun.base.recipe import MEAN_DIGEST, Model, Solver, Transform
from stagerun.comm.residual import BASIS, Residual
from stagerun.engine.asynchronous.record import Record, record_of
from stagerun.engine.asynchronous.training import Asynchronous
from stagerun.engine.codec import decode
from stagerun.engine.compression import residual_of
from stagerun.engine.device import dtype_of
from stagerun.engine.images import Normalise
from stagerun.engine.loop import StageLoop
from stagerun.engine.losses import Loss
from stagerun.engine.mixing import Mixing
from stagerun.engine.replicas import Replicas
from stagerun.engine.state import TrainState, average, make_state, momentum, replicas_of, restore, slots, weights
from stagerun.engine.update import Arithmetic
from stagerun.models import build
from stagerun.models.skeleton import without_memory
from stagerun.plan import PlannedStage, State
from stagerun.plan.transfer import Origin
from stagerun.schedule.early_stop import NOTHING_YET, BestSoFar
from stagerun.schedule.plateau import FRESH, PlateauState
from stagerun.store.given import mean_image
from stagerun.train import given
from stagerun.train.agreement import everyone, hand_out, rank0
from stagerun.train.caffe_state import remember
from stagerun.train.objective import made_loss
from stagerun.train.progress import ARRIVALS, AVERAGE, MOMENTUM, REPLICAS, RESIDUAL, WEIGHTS, Progress, progress_of
from stagerun.train.worker import StageRun

REDO = "take `--redo` for the stage, or another --out"
NOTHING_KNOWN: Mapping[str, str] = MappingProxyType({})


def normalise_for(
    model: Model,
    solver: Solver,
    transform: Transform,
    device: torch.device,
    identity: Mapping[str, str] = NOTHING_KNOWN,
) -> Normalise:
    """What turns the bytes of a batch into what the network takes in a stage. `identity`: the stage's, which may know its mean's digest."""
    known = identity.get(MEAN_DIGEST, "") if transform.mean_file == solver.transform.mean_file else ""
    mean = mean_image(transform, model.channels, known)
    return Normalise(transform, model.channels, device, dtype_of(solver.precision), solver.channels_last, mean)


def arithmetic_of(
    model: Model,
    solver: Solver,
    device: torch.device,
    loss: Loss | None = None,
    teacher: Model | None = None,
    identity: Mapping[str, str] = NOTHING_KNOWN,
) -> Arithmetic:
    """How a stage computes its updates. Without a `loss` it has one that takes as long: a teacher in it is of the network `teacher`, with
    other weights."""
    return Arithmetic(
        logical_workers=solver.logical_workers,
        normalise=normalise_for(model, solver, solver.transform, device, identity),
        precision=solver.precision,
        clip_gradients=solver.clip_gradients,
        forward_seed=lambda position: order.dropout_seed(solver.random_seed, position),
        mixing=Mixing(solver.random_seed, solver.mixup_alpha, solver.cutmix_alpha),
        loss=loss or made_loss(model, solver, device, teacher),
    )


def restored(run: StageRun) -> TrainState:
    """The state the stage goes on from, the same on every rank. Collective.

    RecipeError for a `param` that fits no parameter, ResumeRefused for a snapshot of another model or solver type.
    """
    solver = run.stage.solver
    torch.manual_seed(solver.random_seed)
    model = build(run.stage.model)

    def refuse_idle_rules() -> None:
        """In all stages, before the first of them is trained; what is wrong with weights that stages are given, on rank 0."""
        schedule, keeper = run.worker.schedule, run.worker.keeper
        problems = Problems(schedule.files)
        if keeper is not None and any(stage.solver.start for stage in schedule.stages):
            given.mistakes_in(schedule, keeper.plan().stages, problems)
        made = lambda other: model if other == run.stage.model else without_memory(other)  # noqa: E731
        given.report_idle(schedule.stages, problems, made)
        if problems:
            raise RecipeError(problems.all())

    everyone(run.worker.comm, refuse_idle_rules)
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
    if run.planned.state in (State.FRESH, State.RESUME) and solver.sync is not None and not solver.asynchronous:
        state.replicas = replicas_of(run.worker.schedule.determinism, state, solver, run.worker.comm)
        if state.replicas.start < state.iter < solver.max_iter:  # at its end all are the average
            _restore_replicas(run, state.replicas)
    if run.planned.state is not State.FRESH:
        _take_up_progress(run, state)
    if run.rollbacks is not None:
        state.rollbacks = run.rollbacks
    return state


def take_up_residual(run: StageRun, state: TrainState, solver: Solver) -> None:
    """What compressed gradients lacked so far, where `solver` remembers it: from the snapshot, or zeros. Collective."""
    state.residual = residual_of(run.worker.schedule.determinism, state, solver, run.worker.comm)
    if state.residual is not None and run.planned.state is State.RESUME:
        _restore_residual(run, state.residual)


def _take_up_progress(run: StageRun, state: TrainState) -> None:
    """What the snapshot knows of failures (`on_nan`), so that the limit is the same for a run that was interrupted, of `plateau` and of
    `early_stop`; from rank 0. Collective. ResumeRefused if it lacks what the stage goes on from. In a finished stage, which is kept as it
    is, that doesn't matter."""
    solver = run.stage.solver

    def saved() -> dict[str, Any]:
        found = progress_of(run.files) if run.files is not None else Progress(0, 0.0, [])
        lacks = None
        if found.plateau is None and solver.lr_policy == "plateau":
            lacks = "how its loss went, and lr_policy is `plateau`"
        elif found.best is None and solver.early_stop is not None:
            lacks = "what it was tested for, and the stage has `early_stop`"
        if lacks and run.planned.state is State.RESUME:
            raise ResumeRefused(
                f"the snapshot of stage `{run.stage.name}` does not say {lacks}",
                "it was made without; take `--redo` for the stage, or another --out",
            )
        counts = {name: getattr(found, name) for name in ("skips", "skips_in_all", "rollbacks", "tested")}
        return {**counts, "plateau": asdict(found.plateau or FRESH), "best": asdict(found.best or NOTHING_YET)}

    found = rank0(run.worker.comm, saved)
    state.skips, state.skips_in_all, state.rollbacks = found["skips"], found["skips_in_all"], found["rollbacks"]
    if run.rollbacks is None:  # else the evaluation was done on the way there
        state.tested = found["tested"]
    if solver.lr_policy == "plateau":
        fields = found["plateau"]
        state.plateau = PlateauState(**{**fields, "losses": tuple(fields["losses"])})
    if solver.early_stop is not None:
        state.best = BestSoFar(**found["best"])


def parent_id(planned: PlannedStage) -> str:
    """The id of the snapshot that the stage started from; '' for the seed."""
    start = planned.start
    if start is None:
        return ""
    return start.parent if planned.state is State.RESUME else start.id


def _restore_residual(run: StageRun, residual: Residual) -> None:
    """From the snapshot. Where there were other senders, what all of them had left is shared out evenly: the sum stays, and with it what
    the weights are still to get. Collective; ResumeRefused for residuals of another network or method.
    """
    saved: dict[str, torch.Tensor] = {}

    def read() -> int:
        assert run.files is not None
        try:
            saved.update(decode(run.files[RESIDUAL]) if RESIDUAL in run.files else {})
            return _senders_of(saved, residual)
        except ValueError as error:
            raise ResumeRefused(
                f"the residuals in snapshot {run.planned.start.name if run.planned.start else ''} do not fit stage "
                f"`{run.stage.name}`: {error}",
                "they are of another `compress_param`; take `--redo` for the stage, or another --out",
            ) from error

    senders = rank0(run.worker.comm, read)
    shares: dict[str, torch.Tensor] = {}

    def fill(sender: int, parts: Mapping[str, torch.Tensor]) -> None:
        for name, part in parts.items():
            if name in saved and senders == residual.senders:
                part.copy_(saved[name][sender])
            elif name in saved:
                if name not in shares:
                    shares[name] = saved[name].sum(0) / residual.senders
                part.copy_(shares[name])

    for name, basis in residual.bases.items():
        if f"{BASIS}{name}" in saved:
            basis.copy_(saved[f"{BASIS}{name}"])
    residual.hand_out(run.worker.comm, fill if run.worker.comm.rank == 0 else None)
    residual.shared_from = senders if senders not in (0, residual.senders) else 0


def _senders_of(saved: dict[str, torch.Tensor], residual: Residual) -> int:
    """How many senders the tensors of a snapshot's file are of. ValueError if they don't fit."""
    like = residual.like()
    numbers = {len(tensor) for name, tensor in saved.items() if not name.startswith(BASIS) and tensor.dim()}
    senders = numbers.pop() if len(numbers) == 1 else 0
    for name in sorted(like.keys() | saved.keys()):
        there, wanted = saved.get(name), like.get(name)
        if there is None or wanted is None or not there.is_floating_point() or not bool(torch.isfinite(there).all()):
            fits = False
        else:
            fits = there.shape == wanted.shape if name.startswith(BASIS) else there.shape[1:] == wanted.shape[1:]
        if not fits:
            raise ValueError(f"`{name}` is missing, or not as this stage has it")
    if not senders:
        raise ValueError("they are not all of the same senders")
    return senders


def _restore_replicas(run: StageRun, replicas: Replicas) -> None:
    """From the snapshot, each as it was. Collective. ResumeRefused if the snapshot has other ones."""
    saved: dict[str, torch.Tensor] = {}

    def read() -> None:
        assert run.files is not None
        if REPLICAS not in run.files:
            raise ResumeRefused(
                f"the snapshot of stage `{run.stage.name}` has no replicas to go on from, and the stage has `sync_param`",
                "it was made without; take `--redo` for the stage, or another --out",
            )
        saved.update(decode(run.files[REPLICAS]))
        like = replicas.names()
        for name in [n for n in saved if n.partition("/")[2] in replicas.live.keys() - replicas.apart.keys()]:
            del saved[name]  # an earlier version saved what is frozen, too
        if wrong := sorted(
            n for n in like.keys() | saved.keys() if n not in like or n not in saved or like[n].shape != saved[n].shape
        ):
            raise ResumeRefused(
                f"`{wrong[0]}` of the replicas in the snapshot of stage `{run.stage.name}` is not as the stage has it"
            )

    rank0(run.worker.comm, read)
    replicas.hand_out(saved if run.worker.comm.rank == 0 else None)


def asynchronous(run: StageRun, loop: StageLoop, state: TrainState) -> Asynchronous:
    """The replicas and the server of a stage with `ASYNC`. Collective."""
    worker, name = run.worker, run.stage.name
    record, known = Record(), None if worker.replay is None else Record()

    def look() -> None:
        """On rank 0."""
        nonlocal record, known
        if run.is_piece and worker.replaying is None:  # what others start from has no order of its own
            text = f"stage `{name}` pushed without waiting (`method: ASYNC`), and its snapshot after {run.planned.until} iterations is gone"
            redo = f"train it anew with `--redo {name}`; `--replay` makes it once more in another folder"
            raise ResumeRefused(text, redo)
        try:
            if state.arrivals is not None:
                record = record_of(state.arrivals)
            if worker.replaying is not None:
                known = record_of(worker.replaying.records[name].arrivals)
            if record.last != state.iter or (known is not None and known.until(state.iter) != record):
                raise ValueError(f"it doesn't match its snapshot at iteration {state.iter}")
        except ValueError as error:
            text = f"the recorded order of pushes in stage `{name}` can't be used: {error}"
            raise ResumeRefused(text, f"no run has written it, or an older version; {REDO}") from error

    rank0(worker.comm, look)
    return Asynchronous(loop, state, run.stage.solver, worker.schedule.determinism, worker.comm, record, known)


def _carries_momentum(planned: PlannedStage) -> bool:
    """Resuming does, a stage's start if it says so or begins with a .solverstate, and an evaluation has no use for it."""
    solver = planned.stage.solver
    begins = solver.carry_momentum or solver.solverstate is not None
    return planned.state is State.RESUME or (planned.state is State.FRESH and begins)


def _fill(run: StageRun, state: TrainState) -> bool:
    """Rank 0 puts the snapshot's tensors into the state; without one the freshly drawn weights stay.

    Whether averaged weights can be evaluated: not those of a finished stage that was trained without, and is kept as it is.
    """
    starts = run.planned.state is State.FRESH
    # In a sweep of rates the stage before is left out, whose network may be another.
    alone = run.stage.parent is None and run.files is not None
    if starts and (alone or given.is_given(run.worker.schedule, run.stage) or run.stage.solver.freeze):
        return _start(run, state)
    if run.files is None:
        return True
    assert run.planned.start is not None or run.planned.end is not None
    try:
        restore(weights(state), decode(run.files[WEIGHTS]))
        if _carries_momentum(run.planned):
            restore(momentum(state), _saved_momentum(run, state, run.files[MOMENTUM]))
        averaged = AVERAGE in run.files
        if averaged and run.planned.state is not State.FRESH and state.average is not None:
            restore(average(state), decode(run.files[AVERAGE]))
        if not averaged and run.planned.state is State.RESUME and state.average is not None:
            raise ValueError("it has no averaged weights to go on from, and the stage has `ema_decay`")
    except (ValueError, KeyError) as error:
        ref = run.planned.start or run.planned.end
        raise ResumeRefused(
            f"snapshot {ref.name if ref else ''} does not fit stage `{run.stage.name}`: {error}",
            "it was made by another model, solver type or stagerun; take another --out to start anew",
        ) from error
    if run.planned.state is not State.FRESH:
        state.arrivals = run.files.get(ARRIVALS)
        progress = progress_of(run.files)
        run.weights = progress.weights
        run.seconds = progress.train_seconds
        run.losses.extend(progress.losses)
    return averaged or run.planned.state is State.FRESH


def _start(run: StageRun, state: TrainState) -> bool:
    """The same for a stage that starts with other weights than its parent ends with, or freezes some."""
    files, stage = run.files, run.stage
    try:
        before = decode(files[WEIGHTS]) if files is not None else None
        if before is not None and stage.parent is not None and not given.is_given(run.worker.schedule, stage):
            restore(weights(state), before)
        made = given.fill(run.worker.schedule, stage, weights(state), before)
        if files is not None and _carries_momentum(run.planned):
            kept = {row.name for row in made.of(Origin.PARENT)}
            saved = _saved_momentum(run, state, files[MOMENTUM])
            for name, tensor in momentum(state).items():
                if name.partition("/")[2] in kept and saved[name].shape == tensor.shape:
                    tensor.copy_(saved[name])
        if stage.solver.solverstate is not None:
            remember(run.worker.schedule, stage, momentum(state))
    except (ValueError, KeyError) as error:
        ref = run.planned.start
        raise ResumeRefused(f"snapshot {ref.name if ref else ''} does not fit stage `{stage.name}`: {error}") from error
    run.weights = given.record(made)
    run.weights_table = given.table(made, stage, given.start_of(stage), given.frozen_in(state.model, stage))
    return True


def _saved_momentum(run: StageRun, state: TrainState, data: bytes) -> dict[str, torch.Tensor]:
    """What the snapshot remembers of updates, complete for the state. ValueError if its solver type remembered something
    else."""
    saved, live = decode(data), momentum(state)
    if slots(saved) != slots(live):
        raise ValueError(
            f"it remembers `{'`, `'.join(slots(saved)) or 'nothing'}` of its updates, and type "
            f"`{run.stage.solver.type}` goes on from `{'`, `'.join(slots(live))}`"
        )
    if run.planned.state is State.FRESH:
        # The parent may have frozen other parameters: what it didn't move has no momentum, and what is frozen now needs
        # none.
        return {name: saved.get(name, v) for name, v in live.items()}
    return saved
