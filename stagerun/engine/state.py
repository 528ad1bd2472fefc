"""The mutable state of training, and what of it goes into a snapshot."""

import math
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from stagerun.base.errors import StorageError
from stagerun.base.recipe import Solver
from stagerun.engine.averages import Average, BatchStatistics
from stagerun.engine.codec import Packed, digest, mixed
from stagerun.engine.device import dtype_of, synchronize
from stagerun.engine.parameters import frozen_norms, trained_parameters
from stagerun.engine.solvers import WeightUpdate, make_update
from stagerun.schedule.early_stop import NOTHING_YET, BestSoFar
from stagerun.schedule.plateau import FRESH, PlateauState
from stagerun.system.files import private_folder

if TYPE_CHECKING:
    from stagerun.train.exchange import Exchange

Tensors = Mapping[str, Tensor]


@dataclass(slots=True)
class TrainState:
    """Network, solver, BatchNorm statistics, and `iter`: the number of weight updates done in this stage. `average`: the averaged weights,
    of a stage with `ema_decay`. `plateau`: what lr_policy `plateau` remembers, the same on every rank; `best`: likewise `early_stop`.
    `skips`: how many of the last iterations, one after the other, `on_nan: SKIP` has passed over, and `skips_in_all` of all in the stage;
    `rollbacks`: how often it has gone back. `tested`: the iteration of the newest evaluation. `exchange`: how gradients come together, in a
    stage that is trained; by it the model may be this rank's own until it is shown.
    """

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
        """Make the network hold what evaluations and snapshots look at. Collective."""
        if self.exchange is not None:
            self.exchange.show()


def to_channels_last(model: nn.Module) -> None:
    """In place. `Module.to` refuses tensors of five dimensions, as a Conv3d has: these stay as they are."""
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
    """The state at iteration 0 of a stage, with the weights that `model` has and nothing remembered of updates."""
    placed(model, solver, device)
    if solver.loss is not None and hasattr(model, "train_alone"):  # a net of Caffe's
        model.train_alone()  # type: ignore[operator]
    update = make_update(trained_parameters(model, solver.param, solver.freeze), solver)
    state = TrainState(model, update, BatchStatistics(model, frozen_norms(model, solver.freeze)))
    if solver.ema_decay is not None:
        state.average = Average(model, solver.ema_decay, solver.ema_interval)
    if solver.compile:
        _give_cache()
        # In place: names and tensors stay. Images that grow have code for each of their sizes: what torch makes for any size,
        # when it meets the second, a run that goes on with that one would not have, and other bits.
        model.compile(dynamic=False if solver.transform.crop_size_ramp else None)
    return state


def _give_cache() -> None:
    """Where torch keeps compiled code, which it loads and runs: a folder of this user's alone, unless the user says which. Torch's own has
    a name in /tmp that others can take before. PermissionDenied, StorageError."""
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        return
    instead = "set TORCHINDUCTOR_CACHE_DIR"
    try:
        folder = Path(tempfile.gettempdir()) / f"stagerun-compiled-{os.getuid()}"
        private_folder(folder, "compiled kernels", instead)
    except OSError as error:
        raise StorageError(f"can't make a folder for compiled code: {error.strerror}", instead) from None
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)


def weights(state: TrainState) -> dict[str, Tensor]:
    """Parameters and buffers by torch's names: the live tensors, not copies."""
    return dict(state.model.state_dict())


def momentum(state: TrainState) -> dict[str, Tensor]:
    """What the solver remembers of updates, by `SLOT/PARAMETER`: the live tensors."""
    return {f"{slot}/{name}": t for slot, kept in state.solver.history.items() for name, t in kept.items()}


def slots(momentum: Iterable[str]) -> list[str]:
    """The slots in the names of `momentum`, sorted."""
    return sorted({name.partition("/")[0] for name in momentum if "/" in name})


def average(state: TrainState) -> dict[str, Tensor]:
    """The averaged weights: the live tensors; none of a stage without `ema_decay`."""
    return dict(state.average.tensors) if state.average is not None else {}


EMA = "ema/"


def together(weights: Tensors, momentum: Tensors, average: Tensors) -> dict[str, Tensor]:
    """All of them by one name each. Those of weights have dots, those of the momentum a slash already."""
    return {**weights, **momentum, **{f"{EMA}{name}": tensor for name, tensor in average.items()}}


def live(state: TrainState) -> dict[str, Tensor]:
    return together(weights(state), momentum(state), average(state))


@torch.no_grad()
def finite(state: TrainState) -> bool:
    """Whether all weights, and what is remembered of updates, are numbers. Collective."""
    state.show()
    return _all_finite([*weights(state).values(), *momentum(state).values()])


def _all_finite(tensors: Iterable[Tensor]) -> bool:
    """One look at the device as a rule: a sum is a number only if all that it is of are, though it may overflow without."""
    numbers = [t for t in tensors if t.is_floating_point()]
    if math.isfinite(float(torch.stack([t.sum(dtype=torch.float64) for t in numbers]).sum())):
        return True
    return all(bool(torch.isfinite(t).all()) for t in numbers)


def digests(state: TrainState) -> dict[str, int]:
    """The digests of all that is equal on every rank after an update: each tensor, and what else `state` remembers. Those of averaged weights are
    called `ema/NAME`, those of the momentum `SLOT/NAME`."""
    return {name: digest(tensor) for name, tensor in live(state).items()} | _remembered(state)


def digests_there(state: TrainState) -> dict[str, int]:
    """As `digests`, computed where the weights are: by `digest` on a CPU, elsewhere by `mixed`."""
    on_host = next(iter(weights(state).values())).device.type == "cpu"
    return {name: (digest if on_host else mixed)(t) for name, t in live(state).items()} | _remembered(state)


def _remembered(state: TrainState) -> dict[str, int]:
    return counters(state.iter, state.plateau, state.best, state.skips, state.skips_in_all, state.rollbacks)


def counters(*kept: object) -> dict[str, int]:
    """The digest of what a state remembers besides tensors: iteration, plateau, best, skips, skips in all and rollbacks, in this order."""
    return {"counters": digest(torch.frombuffer(bytearray(repr(kept).encode()), dtype=torch.uint8))}


class Capture:
    """A copy of a state in host memory, allocated once, so that training goes on while it is written to disk."""

    def __init__(self, state: TrainState) -> None:
        pinned = any(t.device.type == "cuda" for t in weights(state).values())
        self.packed = [Packed(part, pinned) for part in (weights(state), momentum(state), average(state))]
        self.weights, self.momentum, self.average = (packed.tensors for packed in self.packed)

    @torch.no_grad()
    def take(self, state: TrainState, found: dict[str, int] | None = None) -> None:
        """Copies the state in. The copy before must be on disk, or given up. `found` is filled with the `digests` of the copy, which is
        what a snapshot is made of."""
        device = next(iter(weights(state).values())).device
        copies = together(self.weights, self.momentum, self.average)
        for name, tensor in live(state).items():
            if device.type != "cpu":
                copies[name].copy_(tensor, non_blocking=True)  # all are under way at once
                continue
            _copy(copies[name], tensor)
            if found is not None:  # now, while a cache has it
                found[name] = digest(copies[name])
        synchronize(device)
        if found is not None:
            found |= {name: digest(copy) for name, copy in copies.items() if name not in found} | _remembered(state)

    def finite(self) -> bool:
        """Whether all weights and what the solver remembers of them are numbers; a state that isn't must not replace a good one."""
        return _all_finite([*self.weights.values(), *self.momentum.values()])

    def files(self) -> tuple[memoryview, memoryview, memoryview | None]:
        """The copy's own memory as .safetensors files: weights, momentum, and averaged weights, None where there are none."""
        weights, momentum, average = (packed.data for packed in self.packed)
        return weights, momentum, average if self.average else None


def _copy(copy: Tensor, live: Tensor) -> None:
    """On the CPU, by one thread: all of torch's would have to meet after each tensor, and where something else keeps a core busy
    training stands still ten times as long as one thread takes."""
    if live.dtype == torch.bfloat16:  # numpy doesn't know it
        copy, live = copy.view(torch.int16), live.view(torch.int16)
    np.copyto(copy.numpy(), live.detach().numpy())


@torch.no_grad()
def restore(live: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Copies `saved` into `live`, by name.

    ValueError naming the first tensor that is missing, too many, or of another shape or kind of number: the snapshot is of
    another model. Precisions may differ: a stage may start from one of another precision.
    """
    for name in sorted(live.keys() | saved.keys()):
        if name not in saved:
            raise ValueError(f"`{name}` is not in the snapshot")
        if name not in live:
            raise ValueError(f"`{name}` of the snapshot is not in the model")
        if live[name].shape != saved[name].shape:
            raise ValueError(
                f"`{name}` is {tuple(saved[name].shape)} in the snapshot and {tuple(live[name].shape)} in the model"
            )
        if live[name].is_floating_point() != saved[name].is_floating_point():
            raise ValueError(f"`{name}` is {saved[name].dtype} in the snapshot and {live[name].dtype} in the model")
    for name, tensor in live.items():
        tensor.copy_(saved[name])
