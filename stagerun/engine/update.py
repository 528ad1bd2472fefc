"""One weight update: forward and backward of this rank's logical workers, reduction, clipping, step."""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stagerun.comm import Reducer
from stagerun.engine.device import autocast, seed, synchronize
from stagerun.engine.images import Batch, Normalise
from stagerun.engine.mix import Mixed, blend, placed, training_loss
from stagerun.engine.mixture import NO_MIXING, Mixing
from stagerun.engine.state import TrainState
from stagerun.errors import UsageError
from stagerun.knobs import Knobs
from stagerun.recipe import Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """How a stage computes, the same for every update."""

    logical_workers: int  # of the whole job
    normalise: Normalise
    precision: Precision
    clip_gradients: float | None
    forward_seed: Callable[[int], int]  # position of a device batch's first image -> seed of dropout and the like
    mixing: Mixing = NO_MIXING
    label_smoothing: float = 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the ranks agree on after an update: mean loss over the global batch, that of mixed images and smoothed labels where
    there are any, and whether any of them asks to stop."""

    loss: float
    stop: bool
    seconds: float = 0.0  # since the last backward pass; a GPU may not have moved the weights yet


def update(
    state: TrainState,
    pieces: Iterable[tuple[int, Batch, bool]],
    knobs: Knobs | Callable[[float], Knobs],
    reducer: Reducer,
    how: Arithmetic,
    stop: Callable[[], bool],
) -> Outcome:
    """Moves `state` one iteration on. Collective.

    `pieces`: (logical worker, its device batch, whether it is this rank's last), in order. `knobs`, or what they are for the
    loss of this update. If the loss is not finite, the weights are left as they were; all ranks see the same loss and so do the
    same.
    """
    state.model.train()
    reducer.begin()
    statistics = state.statistics
    tail = torch.zeros(statistics.n + 2, dtype=torch.float64, device=how.normalise.device)
    for worker, batch, last in pieces:
        loss = _loss(state, batch, how)
        tail[: statistics.n].copy_(statistics.batch)
        tail[-2].copy_(loss.detach())
        tail[-1].fill_(last and stop())
        with explained(len(batch.labels)):
            reducer.add(loss / how.logical_workers, worker, tail, last)
    synchronize(how.normalise.device)
    begun = time.monotonic()
    total = reducer.finish()
    loss_sum, stopping = total[-2:].tolist()
    loss_mean = loss_sum / how.logical_workers
    if math.isfinite(loss_mean):
        if how.clip_gradients is not None:
            clip([p.tensor.grad for p in state.solver.parameters if p.tensor.grad is not None], how.clip_gradients)
        state.solver.update(knobs if isinstance(knobs, Knobs) else knobs(loss_mean))
        statistics.move(total[: statistics.n], how.logical_workers)
        state.iter += 1
        if state.average is not None:
            state.average.follow(state.iter)
    return Outcome(loss_mean, stopping > 0, time.monotonic() - begun)


def _loss(state: TrainState, batch: Batch, how: Arithmetic) -> Tensor:
    """Of one device batch, after the forward pass."""
    logits, mixed = forward(state.model, batch, how)
    labels = how.normalise.labels(batch.labels)
    return training_loss(logits.to(how.normalise.dtype), labels, how.label_smoothing, mixed)


def forward(model: nn.Module, batch: Batch, how: Arithmetic) -> tuple[Tensor, Mixed | None]:
    """The pass of training over one device batch: logits, and how its images were mixed."""
    normalise, position = how.normalise, int(batch.positions[0])
    seed(how.forward_seed(position), normalise.device)
    with explained(len(batch.labels)):
        images = normalise(batch.images, batch.lighting, batch.cutout)
        mixed = placed(how.mixing.draw(position, len(images), images.shape[2], images.shape[3]), normalise.device)
        if mixed is not None:
            blend(images, mixed)
        with autocast(how.precision, normalise.device):
            return model(images), mixed


@contextmanager
def explained(size: int, field: str = "device_batch_size") -> Iterator[None]:
    """Turns what torch says of a batch that is too large or too small, or of a compiler, into UsageError. `field` is what says
    that the batch has `size` images."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        message = f"out of memory on the GPU with a {field} of {size}"
        seen = "; BatchNorm then sees fewer images" if field == "device_batch_size" else ""
        raise UsageError(message, f"a smaller {field} needs less{seen}") from error
    except RuntimeError as error:
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


@torch.no_grad()
def clip(gradients: list[Tensor], limit: float) -> None:
    """Scales all gradients by limit / norm where their global L2 norm is above `limit` (Caffe's ClipGradients)."""
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    factor = torch.where(norm > limit, limit / norm, torch.ones_like(norm))
    torch._foreach_mul_(gradients, factor)
