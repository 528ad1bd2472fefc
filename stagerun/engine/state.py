"""The mutable state of training, and what of it goes into a snapshot."""

import math
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from stagerun.base.errors import StorageError
from stagerun.base.recipe import Determinism, Solver
from stagerun.comm import Comm
from stagerun.comm.residual import BASIS, Residual
from stagerun.engine.averages import Average, BatchStatistics
from stagerun.engine.codec import Packed, digest, digest_and_look, digest_there
from stagerun.engine.device import dtype_of, synchronize
from stagerun.engine.parameters import frozen_norms, still_in, trained_parameters
from stagerun.engine.replicas import Replicas
from stagerun.engine.solvers import WeightUpdate, make_update
from stagerun.models.net import Network
from stagerun.schedule.early_stop import NOTHING_YET, BestSoFar
from stagerun.schedule.plateau import FRESH, PlateauState
from stagerun.system.files import private_folder


@dataclass(slots=True)
class TrainState:
    """Network, solver, BatchNorm statistics, and `iter`: the number of weight updates done in this stage. `average`: the averaged weights,
    of a stage with `ema_decay`. `plateau`: what lr_policy `plateau` remembers, the same on every rank; `best`: likewise `early_stop`.
    `skips`: how many of the last iterations, one after the other, `on_nan: SKIP` has passed over, and `skips_in_all` of all in the stage;
    `rollbacks`: how often it has gone back. `tested`: the iteration of the newest evaluation. `residual`: what this rank's compressed
    gradients lacked, of a stage that remembers it; that differs between ranks, as do `replicas`, of a stage with `sync_param`, and the
    model while they have parted and are not shown. `frozen`: BatchNorm layers that normalise with their running statistics. `arrivals`: of
    a stage with `method: ASYNC`, the file in which its snapshots keep the order of all pushes so far; on rank 0.
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
    residual: Residual | None = None
    replicas: Replicas | None = None
    arrivals: bytes | None = None
    frozen: tuple[nn.Module, ...] = ()

    def to_training(self) -> None:
        """The mode of training, but for what is `frozen`."""
        self.model.train()
        for layer in self.frozen:
            layer.eval()


def to_channels_last(model: nn.Module) -> None:
    """In place. `Module.to` refuses tensors of five dimensions, as a Conv3d has: these stay as they are."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.dim() == 4:
            tensor.data = tensor.data.to(memory_format=torch.channels_last)


def make_state(model: nn.Module, solver: Solver, device: torch.device) -> TrainState:
    """The state at iteration 0 of a stage, with the weights that `model` has and nothing remembered of updates."""
    model.to(device, dtype_of(solver.precision))
    if solver.channels_last:
        to_channels_last(model)
    if solver.loss is not None and isinstance(model, Network):
        model.train_alone()
    parameters, frozen = trained_parameters(model, solver.param, solver.freeze), frozen_norms(model, solver.freeze)
    statistics = BatchStatistics(model, frozen)
    state = TrainState(model, make_update(parameters, solver), statistics, frozen=tuple(frozen))
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


def replicas_of(determinism: Determinism, state: TrainState, solver: Solver, comm: Comm) -> Replicas:
    """Those of a stage with `sync_param`, which have not parted. Collective."""
    trained: dict[str, Tensor] = {p.name: p.tensor for p in state.solver.parameters}
    return Replicas(weights(state), momentum(state), trained, solver, determinism, comm, still(state, solver))


def still(state: TrainState, solver: Solver) -> frozenset[str]:
    """The names of the weights that no update moves."""
    return still_in(state.model, solver.param, solver.freeze)


PARTS = (weights, momentum, average)


@torch.no_grad()
def finite(state: TrainState) -> bool:
    """Whether all weights, and what is remembered of updates, are numbers. One look at the device as a rule: a sum is a number
    only if all that it is of are, though not the other way round. Collective with replicas, whose average is looked at."""
    if state.replicas is not None:
        state.replicas.show()
    live = [t for part in (weights(state), momentum(state)) for t in part.values() if t.is_floating_point()]
    if math.isfinite(float(torch.stack([t.sum(dtype=torch.float64) for t in live]).sum())):
        return True
    return all(bool(torch.isfinite(t).all()) for t in live)


def _called(part: object, name: str) -> str:
    """A tensor among those of all parts. The names of weights have dots, those of the momentum a slash already."""
    return f"ema/{name}" if part is average else name


def digests(state: TrainState) -> tuple[dict[str, int], bool]:
    """The digests of all that is equal on every rank after an update: each tensor, and what else `state` remembers; and whether it is `finite`.
    Those of averaged weights are called `ema/NAME`, those of the momentum `SLOT/NAME`."""
    found, good = _remembered(state), True
    for part in PARTS:
        for name, tensor in part(state).items():
            found[_called(part, name)], numbers = digest_and_look(tensor)
            good = good and (numbers or part is average)
    return found, good


def _live(state: TrainState) -> dict[str, Tensor]:
    return {_called(part, name): tensor for part in PARTS for name, tensor in part(state).items()}


def common(state: TrainState) -> dict[str, Tensor]:
    """What all ranks hold besides PARTS: POWER_SGD's bases, and what parted replicas last went on from. These are the live tensors."""
    bases = {f"{BASIS}{name}": t for name, t in state.residual.bases.items()} if state.residual is not None else {}
    parted = state.replicas is not None and state.replicas.parted
    return bases | (state.replicas.common_by_name() if parted and state.replicas is not None else {})


def digests_there(state: TrainState) -> dict[str, int]:
    """What `digests` is of, with `digest_there`."""
    return {name: digest_there(t) for name, t in _live(state).items()} | _remembered(state)


def digests_common(state: TrainState) -> dict[str, int]:
    """Those of `common`, with `digest_there`."""
    return {name: digest_there(t) for name, t in common(state).items()}


def _remembered(state: TrainState) -> dict[str, int]:
    return counters(state.iter, state.plateau, state.best, state.skips, state.skips_in_all, state.rollbacks)


def counters(*kept: object) -> dict[str, int]:
    """The digest of what a state remembers besides tensors: iteration, plateau, best, skips, skips in all and rollbacks, in this order."""
    return {"counters": digest(torch.frombuffer(bytearray(repr(kept).encode()), dtype=torch.uint8))}


class Capture:
    """A copy of a state in host memory, allocated once, so that training goes on while it is written to disk."""

    def __init__(self, state: TrainState) -> None:
        pinned = any(t.device.type == "cuda" for t in weights(state).values())
        self.parts = {part: Packed(part(state), pinned) for part in PARTS}
        self.weights, self.momentum, self.average = (packed.tensors for packed in self.parts.values())
        self.residual = Packed(state.residual.like(), pinned) if state.residual is not None else None
        self.replicas: Packed | None = None
        self.arrivals: bytes | None = None

    @torch.no_grad()
    def take_replicas(self, replicas: Replicas, iter: int) -> None:
        """Copies those of all ranks in, where they differ after `iter` updates. Collective; the others call `gather` with None."""
        if not replicas.differ(iter):
            self.replicas = None
            return
        if self.replicas is None:
            self.replicas = Packed(replicas.names())
        tensors = self.replicas.tensors

        def take(name: str, tensor: Tensor) -> None:
            tensors[name].copy_(tensor)

        replicas.gather(take)

    @torch.no_grad()
    def take_residual(self, residual: Residual, comm: Comm) -> None:
        """Copies those of all ranks in. Collective; the others call `residual.gather` with None."""
        assert self.residual is not None
        tensors = self.residual.tensors

        def take(sender: int, parts: Mapping[str, Tensor]) -> None:
            for name, tensor in parts.items():
                tensors[name][sender].copy_(tensor)

        for name, basis in residual.bases.items():
            tensors[f"{BASIS}{name}"].copy_(basis)
        residual.gather(comm, take)

    @torch.no_grad()
    def take(self, state: TrainState, found: dict[str, int] | None = None) -> None:
        """Copies the state in. The copy before must be on disk, or given up. `found` is filled with the `digests` of the copy, which is
        what a snapshot is made of."""
        self.arrivals = state.arrivals
        device = next(iter(weights(state).values())).device
        late = []
        for part, packed in self.parts.items():
            for name, tensor in part(state).items():
                copy = packed.tensors[name]
                if device.type != "cpu":
                    copy.copy_(tensor, non_blocking=True)  # all are under way at once
                    late.append((_called(part, name), copy))
                    continue
                _copy(copy, tensor)
                if found is not None:  # now, while a cache has it
                    found[_called(part, name)] = digest(copy)
        synchronize(device)
        if found is not None:
            found |= {name: digest(copy) for name, copy in late} | _remembered(state)

    def finite(self) -> bool:
        """Whether all weights and what the solver remembers of them are numbers; a state that isn't must not replace a good one. A sum
        is a number only if all that it is of are; where it isn't, they are looked at one by one, since it may have overflowed."""
        vectors = [v for part in (weights, momentum) for v in self.parts[part].vectors if v.is_floating_point()]
        return all(math.isfinite(float(v.sum())) or bool(torch.isfinite(v).all()) for v in vectors)

    def files(self) -> tuple[memoryview | None, ...]:
        """The copy's own memory as .safetensors files: weights, momentum, and averaged weights, residuals, replicas and arrivals, None
        where there are none."""
        found = {part: packed.data for part, packed in self.parts.items()}
        residual = self.residual.data if self.residual is not None else None
        replicas = self.replicas.data if self.replicas is not None else None
        arrivals = memoryview(self.arrivals) if self.arrivals is not None else None
        averaged = found[average] if self.average else None
        return found[weights], found[momentum], averaged, residual, replicas, arrivals


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
