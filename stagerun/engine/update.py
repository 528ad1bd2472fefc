"""Weight updates: forward and backward of this rank's logical workers, reduction, clipping, step; and breaking off an iteration that would
take longer than the time before a stop."""

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stagerun.base.errors import UsageError
from stagerun.base.recipe import Precision
from stagerun.comm import Reducer
from stagerun.engine.device import autocast, moment, seed
from stagerun.engine.images import Batch, Normalise
from stagerun.engine.losses import NO_MIXING, SOFTMAX, Answers, Loss, Mixing, Mixture, blend, placed
from stagerun.engine.state import Tensors, TrainState
from stagerun.schedule import Knobs

Pieces = Iterable[tuple[int, Batch, bool]]
Stop = Callable[[], bool]  # returns whether this rank is asked to stop


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """The arithmetic of a stage, the same for every update."""

    logical_workers: int  # of the whole job
    normalise: Normalise
    precision: Precision
    clip_gradients: float | None
    forward_seed: Callable[[int], int]  # position of a device batch's first image -> seed of dropout and the like
    mixing: Mixing = NO_MIXING
    loss: Loss = SOFTMAX


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of an update, the same on all ranks: mean loss over the global batch, including mixing, smoothing and class weights, and
    whether a rank asks to stop. `wrong` names a value that is not finite; '' if all are: then, and only then, the state was moved."""

    loss: float
    stop: bool
    seconds: float = 0.0  # since the last backward pass; a GPU may not have moved the weights yet
    wrong: str = ""
    broken_off: bool = False  # the state was not moved; ignore the others
    met: int | None = None  # bytes that this rank sent for the replicas' synchronisation, if any


def update(
    state: TrainState,
    pieces: Pieces,
    knobs: Knobs | Callable[[float], Knobs],
    reducer: Reducer,
    how: Arithmetic,
    stop: Stop,
    hopeless: Callable[[int], bool] = lambda done: False,
) -> Outcome:
    """Move `state` by an iteration. Collective.

    `pieces`: (logical worker, its device batch, whether it is this rank's last), in order. `knobs`, or a function of this update's loss.
    If loss, gradients or BatchNorm statistics are not finite, the state stays as it was: the check is of the sums, so all ranks agree.

    `hopeless` is called before each of this rank's device batches, with the number done: if it returns True on any rank, all break the
    iteration off, and the state stays as it was. The request uses the number by which a rank asks to stop: so it costs nothing, and
    doesn't change the bits of other iterations."""
    state.statistics.to_training()
    sums = summed(state, pieces, reducer, how, stop, hopeless)
    loss_mean = sums.loss_sum / how.logical_workers
    if sums.stopping >= BROKEN_OFF:
        return Outcome(loss_mean, True, time.monotonic() - sums.started, broken_off=True)
    wrong = not_finite(loss_mean, sums.size, sums.gradients, sums.moved)
    if not wrong:
        now = knobs if isinstance(knobs, Knobs) else knobs(loss_mean)
        wrong = too_fast(state, now, loss_mean)
    if not wrong:
        apply(state, sums, now, how)
        reducer.accept()
        state.iter += 1
        if state.average is not None:
            state.average.follow(state.iter)
    else:
        state.statistics.forget()
    return Outcome(loss_mean, sums.stopping > 0, time.monotonic() - sums.started, wrong)


@dataclass(frozen=True, slots=True)
class Summed:
    """The sums over the logical workers of an update. `size`: the gradients' norm; `moved`: the sum of the absolute BatchNorm statistics;
    `stopping`: the ranks that ask to stop, or BROKEN_OFF; `started`: the end of the last backward pass."""

    total: Tensor
    gradients: Tensors
    norm: Tensor
    loss_sum: float
    stopping: float
    size: float
    moved: float
    started: float


def summed(
    state: TrainState,
    pieces: Pieces,
    reducer: Reducer,
    how: Arithmetic,
    stop: Stop,
    hopeless: Callable[[int], bool],
) -> Summed:
    """Do forward and backward passes, and sum over the logical workers of `reducer`."""
    reducer.begin(state.iter)
    statistics = state.statistics
    tail = torch.zeros(statistics.n + TAIL, dtype=torch.float64, device=how.normalise.device)
    for done, (worker, batch, last) in enumerate(pieces):
        if hopeless(done):
            tail.zero_()[-1] = BROKEN_OFF
            reducer.break_off(tail)
            break
        loss = loss_of(state, batch, how)
        tail[: statistics.n].copy_(statistics.share_of(worker, how.logical_workers))
        tail[-2].copy_(loss.detach())
        tail[-1].fill_(last and stop())
        with explained(len(batch.labels)):
            reducer.add(loss / how.logical_workers, worker, tail, last)
    computed = moment(how.normalise.device)
    total = reducer.finish()
    gradients = {p.name: p.tensor.grad for p in state.solver.parameters if p.tensor.grad is not None}
    norm = torch.nn.utils.get_total_norm(gradients.values())  # finite only if all of them are
    # One look at the device for all four, when all of the GPU's work is queued. Wait for this rank's part first: so the watch
    # distinguishes a rank that hangs from a rank that waits.
    looked_at = torch.stack([total[-2], total[-1], norm.to(total.dtype), total[: statistics.n].abs().sum()])
    started = computed()
    loss_sum, stopping, size, moved = reducer.look(looked_at)
    return Summed(total, gradients, norm, loss_sum, stopping, size, moved, started)


def apply(state: TrainState, sums: Summed, now: Knobs, how: Arithmetic) -> None:
    """Move weights and statistics by the sums; the gradients are in the parameters' `.grad`."""
    clip_summed(sums, how)
    state.solver.update(now)
    state.statistics.move(sums.total[: state.statistics.n], how.logical_workers)


@torch.no_grad()
def clip_summed(sums: Summed, how: Arithmetic) -> None:
    """Scale all gradients by limit / norm if their global L2 norm is above the stage's limit (Caffe's ClipGradients)."""
    limit, norm, gradients = how.clip_gradients, sums.norm, list(sums.gradients.values())
    if limit is None:
        return
    if not math.isfinite(sums.size):  # the numbers are finite, and their squares too large
        lengths = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients]
        norm = torch.linalg.vector_norm(torch.stack(lengths))
    factor = torch.where(norm > limit, limit / norm, torch.ones_like(norm))
    torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))


def too_fast(state: TrainState, knobs: Knobs, loss: float) -> str:
    """Return an error if the learning rate overflows, or ''."""
    parameters = state.solver.parameters
    if knobs.lr * max(p.lr_mult for p in parameters) > torch.finfo(parameters[0].tensor.dtype).max:
        return f"the learning rate is more than a weight can hold (the loss is {loss:.4g})"
    return ""


def not_finite(loss: float, norm: float, gradients: Tensors, moved: float) -> str:
    """Return an error for a value that is not finite, or ''. The norm of finite numbers isn't finite if their squares are too large."""
    if not math.isfinite(loss):
        return f"the loss is {loss}"
    if not math.isfinite(norm):
        names = [name for name, gradient in gradients.items() if not torch.isfinite(gradient).all()]
        if names:
            more = f" and of {len(names) - 1} more" if len(names) > 1 else ""
            return f"the gradient of `{names[0]}`{more} is not finite (the loss is {loss:.4g})"
    return "" if math.isfinite(moved) else f"BatchNorm's statistics are not finite (the loss is {loss:.4g})"


def loss_of(state: TrainState, batch: Batch, how: Arithmetic) -> Tensor:
    """Return the loss of one device batch, after the forward pass."""
    answers, mixed, images = forward(state.model, batch, how)
    labels, dtype = how.normalise.labels(batch.labels), how.normalise.dtype
    with explained(len(batch.labels)):
        logits = answers.to(dtype) if isinstance(answers, Tensor) else tuple(each.to(dtype) for each in answers)
        return how.loss(logits, labels, mixed, images)


def forward(model: nn.Module, batch: Batch, how: Arithmetic) -> tuple[Answers, Mixture | None, Tensor]:
    """Do training's forward pass over one device batch: return logits, the mixture, and the images."""
    normalise, position = how.normalise, int(batch.positions[0])
    seed(how.forward_seed(position), normalise.device)
    with explained(len(batch.labels)):
        images = normalise(batch.images, batch.cutout, batch.crop)
        mixed = placed(how.mixing.draw(position, len(images), images.shape[2], images.shape[3]), normalise.device)
        if mixed is not None:
            blend(images, mixed)
        with autocast(how.precision, normalise.device):
            return model(images), mixed, images


@contextmanager
def explained(size: int, field: str = "device_batch_size") -> Iterator[None]:
    """Turn torch's errors for a batch that is too large or too small, or of a compiler, into UsageError. `field` sets the batch to `size`
    images."""
    try:
        yield
    except RuntimeError as error:
        # NCCL has no class for it.
        if isinstance(error, torch.OutOfMemoryError) or re.search("(?s)(CUDA|NCCL).*out of memory", str(error)):
            message = f"out of memory on the GPU with a {field} of {size}"
            seen = "; BatchNorm then sees fewer images" if field == "device_batch_size" else ""
            raise UsageError(message, f"a smaller {field} needs less{seen}") from error
        # By name, because importing the compiler's errors takes a second.
        if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            raise
        first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UsageError(
            f"torch.compile can't make the network's code: {first}",
            "it needs a C++ compiler, for a GPU also Triton; or leave `compile` out",
        ) from error
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        message = f"BatchNorm has one value per channel to normalise over: {field} is {size}"
        raise UsageError(message, f"use a larger {field}, or larger images") from error


# Numbers that are sent with the gradients and BatchNorm's statistics: the loss, and whether a rank asks to stop.
TAIL = 2

# Sent instead of the 1 by which a rank asks to stop after this iteration. More than any number of ranks; sums are exact in float64.
BROKEN_OFF = float(1 << 30)

# An iteration may take a tenth longer than the previous ones.
_MARGIN = 1.1


def hopeless(left: float | None, done: int, of: int, spent: float, usual: float | None) -> bool:
    """Return whether to break off an iteration with `done` of `of` device batches computed in `spent` seconds.

    `left`: seconds in which it must end; None: no stop, or no limit. `usual`: seconds of an iteration; None: not measured yet, so that
    this process life has trained nothing that could be lost, as before the first device batch.

    >>> hopeless(33.0, 1, 4, 10.0, 40.0), hopeless(35.0, 1, 4, 10.0, 40.0), hopeless(None, 1, 4, 10.0, 40.0)
    (True, False, False)"""
    if left is None:
        return False
    if done == 0 or usual is None:
        return True
    return _MARGIN * max(usual, spent / done * of) - spent > left
