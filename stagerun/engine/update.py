"""One weight update: forward and backward of this rank's logical workers, reduction, clipping, step; and when one is broken off, since a
stop was asked for and it could not be finished in the time that is left."""

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
from stagerun.engine.losses import SOFTMAX, Answers, Loss
from stagerun.engine.mixing import NO_MIXING, Mixing, Mixture, blend, placed
from stagerun.engine.state import TrainState
from stagerun.schedule import Knobs

Pieces = Iterable[tuple[int, Batch, bool]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """How a stage computes, the same for every update."""

    logical_workers: int  # of the whole job
    normalise: Normalise
    precision: Precision
    clip_gradients: float | None
    forward_seed: Callable[[int], int]  # position of a device batch's first image -> seed of dropout and the like
    mixing: Mixing = NO_MIXING
    loss: Loss = SOFTMAX


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the ranks agree on after an update: mean loss over the global batch, that of mixed images, smoothed labels and class weights
    where there are any, and whether any of them asks to stop. `wrong` says what is not a finite number, '' if all is: then, and only then,
    the state was moved."""

    loss: float
    stop: bool
    seconds: float = 0.0  # since the last backward pass; a GPU may not have moved the weights yet
    wrong: str = ""
    broken_off: bool = False  # the state was not moved, whatever the rest says
    met: int | None = None  # bytes that this rank sent for the replicas' synchronisation, where there was one


def update(
    state: TrainState,
    pieces: Pieces,
    knobs: Knobs | Callable[[float], Knobs],
    reducer: Reducer,
    how: Arithmetic,
    stop: Callable[[], bool],
    hopeless: Callable[[int], bool] = lambda done: False,
) -> Outcome:
    """Moves `state` one iteration on. Collective.

    `pieces`: (logical worker, its device batch, whether it is this rank's last), in order. `knobs`, or what they are for the
    loss of this update. If loss, gradients or BatchNorm statistics are not finite, the state is left as it was: that is looked for
    in the sums, which are the same on all ranks, and so is what they do.

    `hopeless` is asked before each of this rank's device batches, with the number of those that are done: if it says so, on any
    rank, all break the iteration off, and the state is left as it was. The request is a number in the place of that by which a
    rank asks to stop: so it costs nothing, and an iteration that is not broken off has the bits that it ever had.
    """
    state.statistics.to_training()
    found = summed(state, pieces, reducer, how, stop, hopeless)
    loss_mean = found.loss_sum / how.logical_workers
    if found.stopping >= BROKEN_OFF:
        return Outcome(loss_mean, True, time.monotonic() - found.started, broken_off=True)
    wrong = not_finite(loss_mean, found.size, found.gradients, found.moved)
    if not wrong:
        now = knobs if isinstance(knobs, Knobs) else knobs(loss_mean)
        wrong = too_fast(state, now, loss_mean)
    if not wrong:
        apply(state, found, now, how)
        reducer.accept()
        state.iter += 1
        if state.average is not None:
            state.average.follow(state.iter)
    else:
        state.statistics.forget()
    return Outcome(loss_mean, found.stopping > 0, time.monotonic() - found.started, wrong)


@dataclass(frozen=True, slots=True)
class Summed:
    """What has come of the logical workers of an update. `size`: the gradients' norm; `moved`: sum of the size of BatchNorm's statistics;
    `stopping`: how many ask to stop, or BROKEN_OFF; `started`: when the last backward pass was over."""

    total: Tensor
    gradients: dict[str, Tensor]
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
    stop: Callable[[], bool],
    hopeless: Callable[[int], bool],
) -> Summed:
    """Forward and backward passes, and the sum over the logical workers that `reducer` is for."""
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
    # One look at the device for all of them, when a GPU has all to compute that leads there. Its own part is waited for first: so the
    # watch tells a rank that hangs from one that waits for it.
    looked_at = torch.stack([total[-2], total[-1], norm.to(total.dtype), total[: statistics.n].abs().sum()])
    started = computed()
    loss_sum, stopping, size, moved = reducer.look(looked_at)
    return Summed(total, gradients, norm, loss_sum, stopping, size, moved, started)


def apply(state: TrainState, found: Summed, now: Knobs, how: Arithmetic) -> None:
    """Moves weights and statistics by what was summed; the gradients stand at the parameters."""
    clip_summed(found, how)
    state.solver.update(now)
    state.statistics.move(found.total[: state.statistics.n], how.logical_workers)


@torch.no_grad()
def clip_summed(found: Summed, how: Arithmetic) -> None:
    """Scales all gradients by limit / norm where their global L2 norm is above the stage's limit (Caffe's ClipGradients)."""
    limit, norm, gradients = how.clip_gradients, found.norm, list(found.gradients.values())
    if limit is None:
        return
    if not math.isfinite(found.size):  # of numbers, whose squares are too large
        lengths = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients]
        norm = torch.linalg.vector_norm(torch.stack(lengths))
    factor = torch.where(norm > limit, limit / norm, torch.ones_like(norm))
    torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))


def too_fast(state: TrainState, knobs: Knobs, loss: float) -> str:
    """What is wrong with the learning rate, '' if nothing is."""
    parameters = state.solver.parameters
    if knobs.lr * max(p.lr_mult for p in parameters) > torch.finfo(parameters[0].tensor.dtype).max:
        return f"the learning rate is more than a weight can hold (the loss is {loss:.4g})"
    return ""


def not_finite(loss: float, norm: float, gradients: dict[str, Tensor], moved: float) -> str:
    """What is not finite, '' if all is. A norm that is not may have come of numbers that are, whose squares are too large."""
    if not math.isfinite(loss):
        return f"the loss is {loss}"
    if not math.isfinite(norm):
        names = [name for name, gradient in gradients.items() if not torch.isfinite(gradient).all()]
        if names:
            more = f" and of {len(names) - 1} more" if len(names) > 1 else ""
            return f"the gradient of `{names[0]}`{more} is not finite (the loss is {loss:.4g})"
    return "" if math.isfinite(moved) else f"BatchNorm's statistics are not finite (the loss is {loss:.4g})"


def loss_of(state: TrainState, batch: Batch, how: Arithmetic) -> Tensor:
    """The loss of one device batch, after the forward pass."""
    answers, mixed, images = forward(state.model, batch, how)
    labels, dtype = how.normalise.labels(batch.labels), how.normalise.dtype
    with explained(len(batch.labels)):
        logits = answers.to(dtype) if isinstance(answers, Tensor) else tuple(each.to(dtype) for each in answers)
        return how.loss(logits, labels, mixed, images)


def forward(model: nn.Module, batch: Batch, how: Arithmetic) -> tuple[Answers, Mixture | None, Tensor]:
    """The pass of training over one device batch: logits, how its images were mixed, and the images."""
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
    """Turns what torch says of a batch that is too large or too small, or of a compiler, into UsageError. `field` is what says
    that the batch has `size` images."""
    try:
        yield
    except RuntimeError as error:
        # NCCL has no class for it.
        if isinstance(error, torch.OutOfMemoryError) or re.search("(?s)(CUDA|NCCL).*out of memory", str(error)):
            message = f"out of memory on the GPU with a {field} of {size}"
            seen = "; BatchNorm then sees fewer images" if field == "device_batch_size" else ""
            raise UsageError(message, f"a smaller {field} needs less{seen}") from error
        # By name, because importing the compiler's own errors takes a second.
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


# Numbers that travel with the gradients beside the statistics of BatchNorm: the loss, and whether a rank asks to stop.
TAIL = 2

# In the place of the 1 by which a rank asks to stop after this iteration. More than ranks can be; sums of it are exact in float64.
BROKEN_OFF = float(1 << 30)

# An iteration may take a tenth longer than the ones before.
_MARGIN = 1.1


def hopeless(left: float | None, done: int, of: int, spent: float, usual: float | None) -> bool:
    """Whether to break off an iteration of which `done` of `of` device batches are computed in `spent` seconds.

    `left`: seconds in which it would have to be finished; None: no one asks for a stop, or it has all the time it needs. `usual`:
    what an iteration takes; None: not known yet, and then nothing was trained yet in this process life that could be lost, nor
    before the first device batch.

    >>> hopeless(33.0, 1, 4, 10.0, 40.0), hopeless(35.0, 1, 4, 10.0, 40.0), hopeless(None, 1, 4, 10.0, 40.0)
    (True, False, False)
    """
    if left is None:
        return False
    if done == 0 or usual is None:
        return True
    return _MARGIN * max(usual, spent / done * of) - spent > left
