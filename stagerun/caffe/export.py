"""A snapshot in Caffe's formats: .caffemodel and .solverstate. `stagerun export` finds it by `base.wings`."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from google.protobuf import text_format
from torch import Tensor

from stagerun.base.errors import UsageError, listing
from stagerun.base.recipe import Model, MomentumForm, Stage
from stagerun.base.weights import COUNTER, FACTOR, MEAN, VARIANCE
from stagerun.caffe.binary import Numbers, net_bytes, state_bytes
from stagerun.caffe.blob_names import statistics_factor
from stagerun.caffe.names import NAMED, Written, in_history, layers_of
from stagerun.caffe.solver_state import history_slots
from stagerun.engine.codec import decode
from stagerun.language.proto import caffe_pb2
from stagerun.language.rules.stage import CAFFES_TYPES
from stagerun.train.progress import MOMENTUM, WEIGHTS


def caffemodel(model: Model, weights: Mapping[str, Tensor], double: bool, goes_on: bool = False) -> bytes:
    """A NetParameter: of a net all of its layers, else those with blobs. The statistics of a BatchNorm are written as they are, divided by
    1, or, where Caffe `goes_on` training, as the sums that it has after as many passes. UsageError where Caffe has no such net."""
    layers = _layers(model)
    kind = np.float64 if double else np.float32

    def blobs(layer: Written) -> Iterator[Numbers]:
        counters = [name.removesuffix(FACTOR) + COUNTER for name in layer.blobs if name.endswith(FACTOR)]
        # Caffe has the fraction in 32 bits.
        fraction, summed = float(np.float32(layer.fraction)), counters and goes_on
        factor = statistics_factor(fraction, int(weights[counters[0]])) if summed else 1.0
        for name in layer.blobs:
            if name.endswith(FACTOR):
                yield np.full(1, factor, kind)
            elif name in weights or not name.endswith(".bias"):  # a bias may be missing
                times = factor if name.endswith((MEAN, VARIANCE)) else 1.0
                yield (weights[name].double() * times).numpy().astype(kind)

    written = {name for layer in layers for name in layer.blobs}
    if left := sorted(name for name in weights if name not in written and not name.endswith(COUNTER)):
        text = f"the net that `{model.name}` is published as has no blob for `{left[0]}`"
        raise UsageError(text, "export with --safetensors")
    return net_bytes(model.name, zip(_without_blobs(model, layers), map(blobs, layers), strict=True))


def solverstate(stage: Stage, files: Mapping[str, bytes], iter: int, learned_net: str, double: bool) -> bytes:
    """What `caffe train --snapshot` goes on from. `files`: those of the snapshot. UsageError for a solver that Caffe has not."""
    solver = stage.solver
    if solver.type not in CAFFES_TYPES:
        text = f"--solverstate: Caffe has no solver of type `{solver.type}`"
        raise UsageError(text, f"it has {listing(CAFFES_TYPES, 'and')}")
    if solver.type in ("SGD", "Nesterov") and solver.momentum_form is MomentumForm.TORCH:
        text = "--solverstate: with `momentum_form: TORCH` the solver remembers gradients, and Caffe's steps"
        raise UsageError(text, "export the weights alone")
    saved, weights = decode(files[MOMENTUM]), decode(files[WEIGHTS])
    kind = np.float64 if double else np.float32
    history: list[Numbers] = []
    for slot in history_slots(solver):
        for name in in_history(_layers(stage.model)):
            if (memory := saved.get(f"{slot}/{name}")) is not None:
                history.append(memory.double().numpy().astype(kind))
            elif name.endswith(FACTOR):
                history.append(np.zeros(1, kind))
            elif name in weights or not name.endswith(".bias"):  # of statistics, and what is frozen, Caffe has zeros
                history.append(np.zeros(tuple(weights[name].shape), kind))
    passed = sum(step < iter for step in solver.stepvalue) if solver.lr_policy == "multistep" else 0
    return state_bytes(iter, learned_net, history, passed)


def _layers(model: Model) -> tuple[Written, ...]:
    if found := layers_of(model):
        return found
    hint = f"--caffemodel is for nets of Caffe's (`caffe_net`) and for {listing(list(NAMED), 'and')}; export with --safetensors"
    raise UsageError(f"Caffe has no net of `{model.name}`", hint)


def _without_blobs(model: Model, layers: Sequence[Written]) -> Iterator[bytes]:
    """The layers without blobs: of a net as its text has them in training, where several may have no name."""
    kept: dict[tuple[str, str], list[caffe_pb2.LayerParameter]] = {}
    for one in text_format.Parse(model.net or "", caffe_pb2.NetParameter()).layer:
        if not one.include or any(rule.phase == caffe_pb2.TRAIN for rule in one.include):
            kept.setdefault((one.name, one.type), []).append(one)
    for layer in layers:
        same = kept.get((layer.name, layer.type))
        one = same.pop(0) if same else caffe_pb2.LayerParameter(name=layer.name, type=layer.type)
        if layer.type == "BatchNorm":
            one.batch_norm_param.moving_average_fraction = layer.fraction
        yield one.SerializeToString(deterministic=True)
