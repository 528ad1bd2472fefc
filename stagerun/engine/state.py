"""The mutable state of training, and what of it goes into a snapshot."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stagerun.engine.device import dtype_of
from stagerun.engine.ema import Average
from stagerun.engine.parameters import trained_parameters
from stagerun.engine.solvers import WeightUpdate, make_update
from stagerun.engine.statistics import BatchStatistics
from stagerun.recipe import Solver
from stagerun.schedule.plateau import FRESH, PlateauState


@dataclass(slots=True)
class TrainState:
    """Network, solver, BatchNorm statistics, and `iter`: the number of weight updates done in this stage. `average`: the
    averaged weights, of a stage with `ema_decay`. `plateau`: what lr_policy `plateau` remembers, the same on every rank."""

    model: nn.Module
    solver: WeightUpdate
    statistics: BatchStatistics
    iter: int = 0
    average: Average | None = None
    plateau: PlateauState = FRESH


def make_state(model: nn.Module, solver: Solver, device: torch.device) -> TrainState:
    """The state at iteration 0 of a stage, with the weights that `model` has and nothing remembered of updates."""
    model.to(device, dtype_of(solver.precision))
    if solver.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    parameters = trained_parameters(model, solver.param)
    statistics = BatchStatistics(model)
    state = TrainState(model, make_update(parameters, solver), statistics)
    if solver.ema_decay is not None:
        state.average = Average(model, solver.ema_decay, solver.ema_interval)
    if solver.compile:
        # In place: names and tensors stay. Images that grow have code for each of their sizes: what torch makes for any size,
        # when it meets the second, a run that goes on with that one would not have, and other bits.
        model.compile(dynamic=False if solver.transform.crop_size_ramp else None)
    return state


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


class Capture:
    """A copy of a state in host memory, allocated once, so that training goes on while it is written to disk."""

    def __init__(self, state: TrainState) -> None:
        def like(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {k: torch.empty(t.shape, dtype=t.dtype) for k, t in tensors.items()}

        self.weights = like(weights(state))
        self.momentum = like(momentum(state))
        self.average = like(average(state))

    @torch.no_grad()
    def take(self, state: TrainState) -> None:
        """Copies the state in. The copy before must be on disk, or given up."""
        parts = ((self.weights, weights), (self.momentum, momentum), (self.average, average))
        for copies, live in parts:
            for name, tensor in live(state).items():
                copies[name].copy_(tensor)

    def finite(self) -> bool:
        """Whether all weights are numbers; a state that isn't must not replace a good one."""
        return all(bool(torch.isfinite(t).all()) for t in self.weights.values() if t.is_floating_point())


@torch.no_grad()
def restore(live: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Copies `saved` into `live`, by name.

    ValueError naming the first tensor that is missing, too many, or of another shape: the snapshot is of another model.
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
    for name, tensor in live.items():
        tensor.copy_(saved[name])
