"""The mutable state of training, and what of it goes into a snapshot."""

import math
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from stagerun.base.errors import StorageError
from stagerun.base.recipe import Solver
from stagerun.engine.averages import Average, BatchStatistics
from stagerun.engine.codec import Digests, Packed, Tensors, digest, mixed
from stagerun.engine.device import dtype_of, synchronize
from stagerun.engine.parameters import frozen_norms, trained_parameters
from stagerun.engine.solvers import WeightUpdate, make_update
from stagerun.schedule.improvement import FRESH, NOTHING_YET, BestSoFar, PlateauState
from stagerun.system.files import private_folder

if TYPE_CHECKING:
    from stagerun.train.exchange import Exchange


@dataclass(slots=True)
class TrainState:
    """Network, solver, BatchNorm statistics, and `iter`: the number of weight updates done in this stage. `average`: the averaged weights
    with `ema_decay`. `plateau`, `best`: the state of lr_policy `plateau` and of `early_stop`, the same on every rank. `skips`: consecutive
    iterations skipped by `on_nan: SKIP`, and `skips_in_all` in the stage; `rollbacks`: their number. `tested`: the iteration of the newest
    evaluation. `exchange`: combines gradients in a stage that is trained; the model may differ by rank until `show`."""

    model: nn.Module
    solver: WeightUpdate
    statistics: BatchStatistics
    iter: int = 0
    average: Average | None = None
    plateau: PlateauState = FRESH
    best: BestSoFar = NOTHING_YET
    skips: int = 0
    skips_in_all: int = 0
    rollbacks: int = 0
    tested: int = 0
    exchange: "Exchange | None" = None

    def show(self) -> None:
        """Give the network the weights for evaluations and snapshots. Collective."""
        if self.exchange is not None:
            self.exchange.show()


def to_channels_last(model: nn.Module) -> None:
    """Convert in place. `Module.to` refuses tensors of five dimensions, as a Conv3d has: these stay as they are."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.dim() == 4:
            tensor.data = tensor.data.to(memory_format=torch.channels_last)


def placed(model: nn.Module, solver: Solver, device: torch.device) -> nn.Module:
    """Move a network to the device, in the precision and memory format that a stage trains in."""
    model.to(device, dtype_of(solver.precision))
    if solver.channels_last:
        to_channels_last(model)
    return model


def make_state(model: nn.Module, solver: Solver, device: torch.device) -> TrainState:
    """Return the state at iteration 0 of a stage, with the weights of `model` and no history."""
    placed(model, solver, device)
    if solver.loss is not None and hasattr(model, "train_alone"):  # a net of Caffe's
        model.train_alone()  # type: ignore[operator]
    update = make_update(trained_parameters(model, solver.param, solver.freeze), solver)
    state = TrainState(model, update, BatchStatistics(model, frozen_norms(model, solver.freeze)))
    if solver.ema_decay is not None:
        state.average = Average(model, solver.ema_decay, solver.ema_interval)
    if solver.compile:
        _give_cache()
        # In place: names and tensors stay. Images that grow get code for each size: torch's code for any size, made when it meets the
        # second, would differ in a run that resumes with that size, and so would the bits.
        model.compile(dynamic=False if solver.transform.crop_size_ramp else None)
    return state


def _give_cache() -> None:
    """Set torch's cache of compiled code, which it loads and runs, to a private folder, unless the user sets one. Another user can create
    torch's default in /tmp first. PermissionDenied, StorageError."""
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        return
    instead = "set TORCHINDUCTOR_CACHE_DIR"
    try:
        folder = Path(tempfile.gettempdir()) / f"stagerun-compiled-{os.getuid()}"
        private_folder(folder, "compiled kernels", instead)
    except OSError as error:
        raise StorageError(f"can't make a folder for compiled code: {error.strerror}", instead) from None
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)


def weights(state: TrainState) -> Tensors:
    """Return parameters and buffers by torch's names: the live tensors, not copies."""
    return dict(state.model.state_dict())


def momentum(state: TrainState) -> Tensors:
    """Return the solver's history, by `SLOT/PARAMETER`: the live tensors."""
    return {f"{slot}/{name}": t for slot, kept in state.solver.history.items() for name, t in kept.items()}


def slots(momentum: Iterable[str]) -> list[str]:
    """Return the slots in the names of `momentum`, sorted."""
    return sorted({name.partition("/")[0] for name in momentum if "/" in name})


def average(state: TrainState) -> Tensors:
    """Return the averaged weights: the live tensors; empty without `ema_decay`."""
    return dict(state.average.tensors) if state.average is not None else {}


EMA = "ema/"


def together(weights: Tensors, momentum: Tensors, average: Tensors) -> Tensors:
    """Return all tensors by unique names: weights' have dots, the momentum's a slash already."""
    return {**weights, **momentum, **{f"{EMA}{name}": tensor for name, tensor in average.items()}}


def live(state: TrainState) -> Tensors:
    return together(weights(state), momentum(state), average(state))


@torch.no_grad()
def finite(state: TrainState) -> bool:
    """Return whether all weights and the solver's history are finite. Collective."""
    state.show()
    return _all_finite([*weights(state).values(), *momentum(state).values()])


def _all_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether all are finite, mostly by one look at the device: a finite sum has finite terms, though it may overflow."""
    numbers = [t for t in tensors if t.is_floating_point()]
    if math.isfinite(float(torch.stack([t.sum(dtype=torch.float64) for t in numbers]).sum())):
        return True
    return all(bool(torch.isfinite(t).all()) for t in numbers)


def digests(state: TrainState) -> Digests:
    """Return the digests of all that is equal on every rank after an update: each tensor, with averaged weights as `ema/NAME` and momentum as
    `SLOT/NAME`, and the counters of `state`."""
    return {name: digest(tensor) for name, tensor in live(state).items()} | _remembered(state)


def digests_on_device(state: TrainState) -> Digests:
    """Return `digests` computed on the weights' device: by `digest` on a CPU, elsewhere by `mixed`."""
    on_host = next(iter(weights(state).values())).device.type == "cpu"
    return {name: (digest if on_host else mixed)(t) for name, t in live(state).items()} | _remembered(state)


def _remembered(state: TrainState) -> Digests:
    return counters(state.iter, state.plateau, state.best, state.skips, state.skips_in_all, state.rollbacks)


def counters(*kept: object) -> Digests:
    """Return the digest of a state's values besides tensors: iteration, plateau, best, skips, skips in all and rollbacks, in this order."""
    return {"counters": digest(torch.frombuffer(bytearray(repr(kept).encode()), dtype=torch.uint8))}


class Capture:
    """A copy of a state in host memory, allocated once, so that training continues while it is written to disk."""

    def __init__(self, state: TrainState) -> None:
        pinned = any(t.device.type == "cuda" for t in weights(state).values())
        self.packed = [Packed(part, pinned) for part in (weights(state), momentum(state), average(state))]
        self.weights, self.momentum, self.average = (packed.tensors for packed in self.packed)

    @torch.no_grad()
    def take(self, state: TrainState, digests: Digests | None = None) -> None:
        """Copy the state. The previous copy must be on disk, or discarded. Fill `digests` with the digests of the copy, from which a snapshot
        is made."""
        device = next(iter(weights(state).values())).device
        copies = together(self.weights, self.momentum, self.average)
        for name, tensor in live(state).items():
            if device.type != "cpu":
                copies[name].copy_(tensor, non_blocking=True)  # all are under way at once
                continue
            _copy(copies[name], tensor)
            if digests is not None:  # now, while it is in a cache
                digests[name] = digest(copies[name])
        synchronize(device)
        if digests is not None:
            digests |= {name: digest(copy) for name, copy in copies.items() if name not in digests} | _remembered(state)

    def finite(self) -> bool:
        """Return whether all weights and the solver's history are finite; any other state must not replace a good one."""
        return _all_finite([*self.weights.values(), *self.momentum.values()])

    def files(self) -> tuple[memoryview, memoryview, memoryview | None]:
        """Return the copy's memory as .safetensors files: weights, momentum, and averaged weights, if any."""
        weights, momentum, average = (packed.data for packed in self.packed)
        return weights, momentum, average if self.average else None


def _copy(copy: Tensor, live: Tensor) -> None:
    """Copy on the CPU, by one thread: all of torch's threads would synchronise after each tensor, and if another process keeps a core busy
    training stops ten times as long as one thread takes."""
    if live.dtype == torch.bfloat16:  # numpy lacks it
        copy, live = copy.view(torch.int16), live.view(torch.int16)
    np.copyto(copy.numpy(), live.detach().numpy())


@torch.no_grad()
def restore(live: Tensors, saved: Tensors) -> None:
    """Copy `saved` into `live`, by name.

    ValueError naming the first tensor that is missing, extra, or of another shape or kind of number: the snapshot belongs to
    another model. Precisions may differ: a stage may start from another precision."""
    for name in sorted(live.keys() | saved.keys()):
        if name not in saved or name not in live:
            raise ValueError(f"`{name}` is not in the {'model' if name in saved else 'snapshot'}")
        if live[name].shape != saved[name].shape:
            raise ValueError(
                f"`{name}` is {tuple(saved[name].shape)} in the snapshot and {tuple(live[name].shape)} in the model"
            )
        if live[name].is_floating_point() != saved[name].is_floating_point():
            raise ValueError(f"`{name}` is {saved[name].dtype} in the snapshot and {live[name].dtype} in the model")
    for name, tensor in live.items():
        tensor.copy_(saved[name])
