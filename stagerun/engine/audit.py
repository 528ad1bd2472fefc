"""The gradient of one device batch: listened to while training computes it, and computed again, which leaves everything as it was."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stagerun.base.recipe import Precision
from stagerun.engine.codec import digest, mix
from stagerun.engine.images import Batch
from stagerun.engine.state import TrainState
from stagerun.engine.update import Arithmetic, loss_of

# What is kept of each parameter's gradient, by its name: the digest, or norm and projection.
Marks = dict[str, Any]

# How far two gradients may be apart where the bits are not promised to be the same, as a share of their norm: on processors of two kinds
# sums are rounded in another order.
TOLERANCE = {Precision.FP64: 1e-6, Precision.FP32: 1e-2, Precision.BF16: 0.2}


def sketch(gradient: Tensor) -> list[float]:
    """Norm, and the projection on a vector of signs that is the same on all devices: of a difference d it is about the norm of d."""
    flat = gradient.detach().reshape(-1).double()
    signs = mix(torch.zeros(flat.numel(), dtype=torch.int64, device=flat.device), 0) & 1
    return [float(torch.linalg.vector_norm(flat)), float(flat @ (2 * signs - 1).double())]


def alike(a: Mapping[str, list[float]], b: Mapping[str, list[float]], tolerance: float) -> bool:
    """Whether the sketches are of gradients that are `tolerance` of their norm apart at most. Those that are not finite are for `on_nan`."""
    norm = math.sqrt(max(sum(n * n for n, _ in a.values()), sum(n * n for n, _ in b.values())))
    if not math.isfinite(norm):
        return True
    return a.keys() == b.keys() and all(abs(a[name][1] - b[name][1]) <= tolerance * norm for name in a)


@contextmanager
def heard(state: TrainState, mark: Callable[[Tensor], Any]) -> Iterator[Marks]:
    """What `mark` makes of each gradient that a backward pass inside brings to a parameter, before it is added to anything."""
    marks: Marks = {}

    def hear(name: str, gradient: Tensor) -> None:
        marks[name] = mark(gradient)

    handles = [p.tensor.register_hook(partial(hear, p.name)) for p in state.solver.parameters]
    try:
        yield marks
    finally:
        for handle in handles:
            handle.remove()


def computed_again(state: TrainState, batch: Batch, how: Arithmetic, mark: Callable[[Tensor], Any]) -> Marks:
    """The marks of the gradient of a device batch. Gradients that stand at the parameters stay, as do buffers and random numbers."""
    kept = [(t, t.clone()) for t in (*state.model.buffers(), state.statistics.batch)]
    device = state.statistics.batch.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        loss = loss_of(state, batch, how) / how.logical_workers
        parameters = state.solver.parameters
        gradients = torch.autograd.grad(loss, [p.tensor for p in parameters], allow_unused=True)
    with torch.no_grad():
        for live, saved in kept:
            live.copy_(saved)
    return {p.name: mark(g) for p, g in zip(parameters, gradients, strict=True) if g is not None}


def mark_of(exact: bool) -> Callable[[Tensor], Any]:
    return digest if exact else sketch
