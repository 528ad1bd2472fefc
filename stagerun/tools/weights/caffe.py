"""A snapshot in Caffe's formats: .caffemodel and .solverstate."""

from collections.abc import Container, Iterator, Mapping, Sequence

import numpy as np
from google.protobuf import text_format
from torch import Tensor

from stagerun.base.caffe_file import Numbers, net_bytes, state_bytes
from stagerun.base.errors import UsageError, listing
from stagerun.base.net import statistics_factor
from stagerun.base.recipe import Model, MomentumForm, Solver
from stagerun.base.weights import COUNTER, FACTOR, MEAN, VARIANCE
from stagerun.engine.codec import decode
from stagerun.language.caffe_names import NAMED, Written, in_history, layers_of
from stagerun.language.check_weights import CAFFES_TYPES
from stagerun.language.proto import caffe_pb2
from stagerun.tools.caffe.solver_state import history_slots
from stagerun.tools.weights.stored import Stored
from stagerun.train.progress import MOMENTUM


def caffemodel(model: Model, weights: Mapping[str, Tensor], double: bool, goes_on: bool = False) -> bytes:
    """A NetParameter: of a net all of its layers, else those with blobs. The statistics of a BatchNorm are written as they are, divided by
    1, or, where Caffe `goes_on` training, as the sums that it has after as many passes. UsageError where Caffe has no such net."""
    layers, left = _layers(model), {name for name in weights if not name.endswith(COUNTER)}
    kind = np.float64 if double else np.float32

    def blobs(layer: Written) -> Iterator[Numbers]:
        factor = _factor(layer, weights) if goes_on else 1.0
        for name, shape in zip(layer.blobs, layer.shapes, strict=True):
            if name.endswith(FACTOR):
                yield np.full(1, factor, kind)
            elif _has(weights, name):
                left.discard(name)
                values = weights[name]
                if name.endswith((MEAN, VARIANCE)):
                    values = values.double() * factor
                yield _array(values, kind).reshape(shape or values.shape)

    data = net_bytes(model.name, list(zip(_said(model, layers), map(list, map(blobs, layers)), strict=True)))
    if left:
        text = f"the net that `{model.name}` is published as has no blob for `{sorted(left)[0]}`"
        raise UsageError(text, "export with --safetensors")
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
        for name in in_history(layers):
            if name.endswith(FACTOR):
                history.append(np.zeros(1, kind))
            elif f"{slot}/{name}" in saved:
                history.append(_array(saved[f"{slot}/{name}"], kind))
            elif _has(weights, name):  # running statistics, and what is frozen: Caffe has zeros for them
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
        text = "--solverstate: with `momentum_form: TORCH` the solver remembers gradients, and Caffe's steps"
        raise UsageError(text, "export the weights alone")


def _layers(model: Model) -> tuple[Written, ...]:
    found = layers_of(model)
    if not found:
        text = f"Caffe has no net of `{model.name}`"
        hint = f"--caffemodel is for nets of Caffe's (`caffe_net`) and for {listing(NAMED, 'and')}; export with --safetensors"
        raise UsageError(text, hint)
    return found


def _said(model: Model, layers: Sequence[Written]) -> list[bytes]:
    """The layers without blobs: of a net as its text has them in training, where several may have no name."""
    text = text_format.Parse(model.net or "", caffe_pb2.NetParameter()).layer
    kept: dict[tuple[str, str], list[caffe_pb2.LayerParameter]] = {}
    for one in text:
        if not one.include or any(rule.phase == caffe_pb2.TRAIN for rule in one.include):
            kept.setdefault((one.name, one.type), []).append(one)
    found = []
    for layer in layers:
        same = kept.get((layer.name, layer.type))
        one = same.pop(0) if same else caffe_pb2.LayerParameter(name=layer.name, type=layer.type)
        if layer.type == "BatchNorm":
            one.batch_norm_param.moving_average_fraction = layer.fraction
        found.append(one.SerializeToString(deterministic=True))
    return found


def _factor(layer: Written, weights: Mapping[str, Tensor]) -> float:
    """What the statistics of a BatchNorm are divided by; Caffe has the fraction in 32 bits. 1 of another layer."""
    counters = [name.removesuffix(FACTOR) + COUNTER for name in layer.blobs if name.endswith(FACTOR)]
    return statistics_factor(float(np.float32(layer.fraction)), int(weights[counters[0]])) if counters else 1.0


def _has(weights: Container[str], name: str) -> bool:
    """A bias may be missing. ValueError for another one that is."""
    if name not in weights and not name.endswith(".bias"):
        raise ValueError(f"the network has no `{name}`")
    return name in weights


def _array(tensor: Tensor, kind: type[np.floating]) -> Numbers:
    return tensor.double().numpy().astype(kind)
