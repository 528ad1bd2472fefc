"""The engine's view of a stage: its arithmetic, and the constants of its loop."""

import torch

from stagerun.base import order
from stagerun.base.recipe import MEAN_DIGEST, Model, Stage, Transform
from stagerun.comm import runs_of
from stagerun.data.weights import mean_image
from stagerun.engine.device import dtype_of
from stagerun.engine.images import Normalise
from stagerun.engine.loop import StageLoop
from stagerun.engine.losses import Loss, Mixing
from stagerun.engine.update import Arithmetic
from stagerun.schedule import make_knobs
from stagerun.train.context import StageRun
from stagerun.train.objective import made_loss


def normalise_for(stage: Stage, transform: Transform, device: torch.device) -> Normalise:
    """Return the conversion from a batch's bytes to the input of the stage's network. The stage's identity may have the digest of its
    mean image."""
    model, solver = stage.model, stage.solver
    digest = stage.identity.get(MEAN_DIGEST, "") if transform.mean_file == solver.transform.mean_file else ""
    mean = mean_image(transform, model.channels, digest)
    return Normalise(transform, model.channels, device, dtype_of(solver.precision), solver.channels_last, mean)


def arithmetic_of(
    stage: Stage, device: torch.device, loss: Loss | None = None, teacher: Model | None = None
) -> Arithmetic:
    """Return the arithmetic of the updates. Without a `loss` use one that takes as long: with a network `teacher` of other weights."""
    solver = stage.solver
    return Arithmetic(
        logical_workers=solver.logical_workers,
        normalise=normalise_for(stage, solver.transform, device),
        precision=solver.precision,
        clip_gradients=solver.clip_gradients,
        forward_seed=lambda position: order.dropout_seed(solver.random_seed, position),
        mixing=Mixing(solver.random_seed, solver.mixup_alpha, solver.cutmix_alpha),
        loss=loss or made_loss(stage.model, solver, device, teacher),
    )


def make_loop(run: StageRun, loss: Loss | None = None) -> StageLoop:
    """Return the constants of the stage's loop on this rank."""
    worker, stage, solver = run.worker, run.stage, run.stage.solver
    followed = worker.schedule.followed(stage) is not None
    return StageLoop(
        stage=stage.name,
        max_iter=run.last,
        batch_size=solver.batch_size,
        epoch_images=stage.data.train.images,
        start_position=run.planned.position + run.planned.skipped,
        logical_workers=runs_of(solver.logical_workers, worker.comm.size)[worker.comm.rank],
        knobs=make_knobs(solver),
        snapshot=solver.snapshot,
        # A piece is tested only for the best evaluation, with which the stage may resume.
        test_interval=0 if run.is_piece and not followed else solver.test_interval,
        branch_points=frozenset(worker.schedule.saved_at(stage.name)),
        is_piece=run.is_piece,
        on_nan=solver.on_nan,
        max_nan=solver.max_nan,
        plateau=solver if solver.lr_policy == "plateau" else None,
        arithmetic=arithmetic_of(stage, worker.device, loss, worker.schedule.teacher_model(stage)),
        tests_first=followed,
        tests_last=bool(worker.schedule.best_of(stage.name)),
    )
