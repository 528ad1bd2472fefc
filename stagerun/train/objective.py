"""The loss of a stage, with its teacher or the user's function, if it has one."""

import torch
from torch import nn

from stagerun.base.code import code_of
from stagerun.base.errors import ResumeRefused, UsageError
from stagerun.base.recipe import Loss as UserLoss
from stagerun.base.recipe import LossType, Model, Solver
from stagerun.base.wings import of_model, require_wing
from stagerun.engine.codec import decode
from stagerun.engine.device import dtype_of
from stagerun.engine.losses import Custom, Loss, loss_of, try_out
from stagerun.engine.state import restore, to_channels_last
from stagerun.language import arguments, consent
from stagerun.models import build
from stagerun.system.code import called, function_of, parameters_of
from stagerun.train.agreement import everyone, hand_out, rank0
from stagerun.train.context import StageRun
from stagerun.train.progress import WEIGHTS


def objective(run: StageRun) -> Loss:
    """Return the stage's loss, the same on every rank. Collective. ResumeRefused for a teacher's snapshot of another network,
    UsageError for mistakes of the user's function."""
    teacher = _taught(run)
    return everyone(run.worker.comm, lambda: made_loss(run.stage.model, run.stage.solver, run.worker.device, teacher))


def _taught(run: StageRun) -> nn.Module | None:
    """Return the stage's teacher, the same on every rank, or None. Collective."""
    model = run.worker.schedule.teacher_model(run.stage)
    if model is None:
        return None
    network = _network(model, run.stage.solver, run.worker.device)
    tensors = dict(network.state_dict())

    def fill() -> None:
        assert run.teacher is not None
        try:
            restore(tensors, decode(run.teacher[WEIGHTS]))
        except (ValueError, KeyError) as error:
            ref = run.planned.teacher
            raise ResumeRefused(
                f"snapshot {ref.name if ref else ''} can't teach stage `{run.stage.name}`: {error}",
                "it is of another network; take another teacher",
            ) from error

    rank0(run.worker.comm, fill)
    hand_out(run.worker.comm, tensors.values())
    return network


def made_loss(model: Model, solver: Solver, device: torch.device, teacher: nn.Module | Model | None = None) -> Loss:
    """Return the loss of these settings; UsageError for mistakes of the user's function. `teacher`: a network, or a model to build with
    fresh weights."""
    how = solver.loss
    user = None
    if how is not None and how.type is LossType.PYTHON:
        user = _user_loss(how, solver.label_smoothing, model.num_classes, device, dtype_of(solver.precision))
    if isinstance(teacher, Model):
        teacher = _network(teacher, solver, device)
    of_net = require_wing("caffe.steps.losses_of")(of_model(model)) if model.net is not None else ()
    return loss_of(solver, teacher, user, device, of_net)


def _network(model: Model, solver: Solver, device: torch.device) -> nn.Module:
    """Build a teacher for a stage's images, with freshly drawn weights, not compiled."""
    network = build(model).to(device, dtype_of(solver.precision)).requires_grad_(False)
    if solver.channels_last:
        to_channels_last(network)
    return network.eval()


def _user_loss(how: UserLoss, smoothing: float, classes: int, device: torch.device, dtype: torch.dtype) -> Custom:
    """Build the loss by the user's function, and try it on four made-up images. UsageError with the place in the user's file."""
    consent.require_consent(how, "the loss of a snapshot")
    assert how.function is not None and how.sources is not None
    code, sources = code_of(how.function), how.sources
    builder, named = function_of(code, sources), arguments.read(how.args)
    names, others = parameters_of(builder)
    if others or "num_classes" in names:
        named["num_classes"] = classes
    try:
        function = called(code, sources, builder, **named)
    except UsageError as error:
        if "required positional argument" in error.message:
            error.hint = (
                f"`{code.function}` is called once, with `args` alone; it returns the function of (logits, targets)"
            )
        raise
    if not callable(function):
        hint = f"let `{code.function}` return a function of (logits, targets), or an nn.Module without parameters"
        raise UsageError(f"`{code}` returns {function!r:.40}, which can't be called", hint)
    if isinstance(function, nn.Module):
        if any(True for _ in function.parameters()):
            raise UsageError(f"the loss of `{code}` has parameters, which are not trained", "make them buffers")
        function.to(device, dtype)
    user = Custom(smoothing, code, sources, function)
    try_out(user, classes, device, dtype)
    return user
