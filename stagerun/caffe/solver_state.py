"""What Caffe's solver remembered, in a stage that begins with its .solverstate (`solverstate`). The trunk finds it by `base.wings`."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from stagerun.base.errors import DataError
from stagerun.base.recipe import WEIGHTS_DIGEST, Model, Solver, Stage, Weights
from stagerun.base.text import count
from stagerun.base.weights import is_hdf5
from stagerun.caffe import blob_names
from stagerun.caffe.names import here, in_history, layers_of
from stagerun.data.weights import data_of, find, read_state
from stagerun.schedule import slots_of
from stagerun.system.files import mapped
from stagerun.train.transfer import Mistake

if TYPE_CHECKING:
    from torch import Tensor


def _order_of(data: bytes | memoryview, path: Path, model: Model) -> tuple[str, ...]:
    """The network's names of what a history is of. `data`: the weights beside it, in `path`. DataError."""
    if is_hdf5(data):
        if model.net is None:
            text = f"{path} is HDF5, which does not say in which order the history is"
            raise DataError(text, "let Caffe write the snapshot with `snapshot_format: BINARYPROTO`")
        return in_history(layers_of(model))
    try:
        names = here(model, blob_names.shapes(data))
        return tuple(names.get(name, name) for name in blob_names.learnable(data))
    except ValueError as error:
        raise DataError(f"{path}: {error}", "it is not a whole .caffemodel") from error


def mistakes_in(stage: Stage, weights: Weights) -> Iterator[Mistake]:
    """Where the stage is not the solver that wrote it. UsageError, DataError."""
    found, solver, slots = find(weights), stage.solver, history_slots(stage.solver)
    state = found.held
    assert state is not None
    if solver.lr_policy == "multistep":
        # Caffe looks once per iteration, or, SURFsara's, once per parameter: it may be one behind.
        most = sum(step <= state.iter for step in solver.stepvalue)
        if state.current_step not in (most, sum(step < state.iter for step in solver.stepvalue)):
            passed = count(state.current_step, "step")
            text = f"{weights.file} has passed {passed}, and by iteration {state.iter} the stage has {most}"
            yield Mistake("solverstate", text, "write the `stepvalue` of the solver that Caffe ran with")
    n = len(_order_of(mapped(found.path), found.path, stage.model))
    if len(state.history) != n * len(slots):
        blobs = count(len(state.history), "blob")
        text = f"{weights.file} remembers {blobs}, and type `{solver.type}` {n * len(slots)}"
        why = f"the weights beside it have {count(n, 'blob')}, and `{solver.type}` remembers {len(slots)} of each"
        yield Mistake("solverstate", text, f"{why}: write the `type` of the solver that Caffe ran with")


def history_slots(solver: Solver) -> Sequence[str]:
    """What a history has of each blob, in its order: Caffe has all of one, and then all of the other. Adam's `t` is the iteration."""
    return [slot for slot in slots_of(solver.type, solver.momentum_form) if slot != "t"]


def remember(stage: Stage, live: "Mapping[str, Tensor]") -> None:
    """Put the history into what the solver remembers, `SLOT/PARAMETER`. Parameters that the stage has frozen are passed over. DataError."""
    import torch

    weights, digest = stage.solver.start, stage.identity.get(WEIGHTS_DIGEST, "")
    assert weights is not None
    file = find(weights)
    assert file.state is not None
    state = read_state(file.state, weights.file, digest)
    names = _order_of(data_of(file, 0, digest), file.path, stage.model)
    blobs = (f"{slot}/{name}" for slot in history_slots(stage.solver) for name in names)
    found = dict(zip(blobs, state.history, strict=False))
    for name, tensor in live.items():
        slot, _, parameter = name.partition("/")
        if slot == "t":
            tensor.fill_(state.iter)
            continue
        blob = found.get(name)
        if blob is None or blob.data.size != tensor.numel():
            has = "nothing" if blob is None else count(blob.data.size, "number")
            text = f"{weights.file} remembers {has} of `{parameter}`, which has {tensor.numel()}"
            raise DataError(text, "it is the state of another net")
        if not np.isfinite(blob.data).all():
            raise DataError(f"what {weights.file} remembers of `{parameter}` is not all numbers")
        tensor.copy_(torch.from_numpy(np.array(blob.data)).reshape(tensor.shape))
