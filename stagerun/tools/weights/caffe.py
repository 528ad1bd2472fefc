"""A snapshot in Caffe's formats: .caffemodel and .solverstate."""

from collections.abc import Iterator, Mapping

import numpy as np
from google.protobuf import text_format
from torch import Tensor

from stagerun.base.caffe_file import Numbers, layer_bytes, net_bytes, state_bytes
from stagerun.base.errors import UsageError, listing
from stagerun.base.recipe import Model, MomentumForm, Solver
from stagerun.engine.codec import decode
from stagerun.language.caffe_names import FACTOR, NAMED, Written, layers_of, learnable
from stagerun.language.check_weights import CAFFES_TYPES
from stagerun.language.proto import caffe_pb2
from stagerun.plan.transfer import COUNTER
from stagerun.train.caffe_state import history_slots
from stagerun.train.progress import MOMENTUM
from stagerun.train.stored import Stored


def caffemodel(model: Model, weights: Mapping[str, Tensor], double: bool) -> bytes:
    """A NetParameter: of a net all of its layers, else those with blobs. The statistics of a BatchNorm are written as they are, divided by 1.
    UsageError where Caffe has no such net."""
    layers, left = _layers(model), {name for name in weights if not name.endswith(COUNTER)}
    kind = np.float64 if double else np.float32

    def blobs(layer: Written) -> Iterator[Numbers]:
        for name in layer.blobs:
            if name == FACTOR:
                yield np.ones(1, kind)
            elif name in weights:
                left.discard(name)
                yield _array(weights[name], kind)

    said = _said(model)

    def as_said(layer: Written) -> bytes:
        texts = said.get((layer.name, layer.type))
        return texts.pop(0) if texts else layer_bytes(layer.name, layer.type)

    data = net_bytes(model.name, [(as_said(one), list(blobs(one))) for one in layers])
    if left:
        raise UsageError(
            f"the net that `{model.name}` is published as has no blob for `{sorted(left)[0]}`",
            "export with --safetensors",
        )
    return data


def solverstate(stored: Stored, learned_net: str, double: bool) -> bytes:
    """What `caffe train --snapshot` goes on from, with the weights in `learned_net`. UsageError for a solver that Caffe has not."""
    solver, layers = stored.stage.solver, _layers(stored.stage.model)
    require_caffes(solver)
    saved = decode(stored.files[MOMENTUM])
    weights = {name: tensor.shape for name, tensor in decode(stored.files["model.safetensors"]).items()}
    kind = np.float64 if double else np.float32
    history: list[Numbers] = []
    for slot in history_slots(solver):
        for name in learnable(layers):
            if name == FACTOR:
                history.append(np.zeros(1, kind))
            elif f"{slot}/{name}" in saved:
                history.append(_array(saved[f"{slot}/{name}"], kind))
            elif name in weights:  # running statistics, and what is frozen: Caffe has zeros for them
                history.append(np.zeros(tuple(weights[name]), kind))
    iter = stored.ref.iter
    passed = sum(step < iter for step in solver.stepvalue) if solver.lr_policy == "multistep" else 0
    return state_bytes(iter, learned_net, history, passed)


def require_caffes(solver: Solver) -> None:
    if solver.type not in CAFFES_TYPES:
        raise UsageError(
            f"--solverstate: Caffe has no solver of type `{solver.type}`", f"it has {listing(CAFFES_TYPES, 'and')}"
        )
    if solver.type in ("SGD", "Nesterov") and solver.momentum_form is MomentumForm.TORCH:
        raise UsageError(
            "--solverstate: with `momentum_form: TORCH` the solver remembers gradients, and Caffe's steps",
            "export the weights alone",
        )


def _layers(model: Model) -> tuple[Written, ...]:
    found = layers_of(model)
    if not found:
        raise UsageError(
            f"Caffe has no net of `{model.name}`",
            f"--caffemodel is for nets of Caffe's (`caffe_net`) and for {listing(NAMED, 'and')}; export with --safetensors",
        )
    return found


def _said(model: Model) -> dict[tuple[str, str], list[bytes]]:
    """By name and type the layers of a net in training, as its text has them, without blobs. Several may have no name."""
    if model.net is None:
        return {}
    net = text_format.Parse(model.net, caffe_pb2.NetParameter())
    kept = [one for one in net.layer if not one.include or any(rule.phase == caffe_pb2.TRAIN for rule in one.include)]
    found: dict[tuple[str, str], list[bytes]] = {}
    for one in kept:
        found.setdefault((one.name, one.type), []).append(one.SerializeToString(deterministic=True))
    return found


def _array(tensor: Tensor, kind: type[np.floating]) -> Numbers:
    return tensor.double().numpy().astype(kind)
