"""Weights and solver states exchanged with Caffe: names of blobs, the start of a stage from a .solverstate, and the export of a snapshot."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from google.protobuf import text_format

from stagerun.base.errors import DataError, UsageError, listing
from stagerun.base.recipe import WEIGHTS_DIGEST, Model, MomentumForm, Solver, Stage, Weights
from stagerun.base.text import count
from stagerun.base.weights import COUNTER, FACTOR, NORM
from stagerun.caffe.binary import Numbers, learnable, net_bytes, shapes, state_bytes, statistics_factor
from stagerun.caffe.layers import BatchNorm
from stagerun.caffe.resolve import of_model
from stagerun.data.weights import data_of, find, read_state
from stagerun.language.proto import caffe_pb2
from stagerun.language.rules.stage import CAFFES_TYPES
from stagerun.schedule import slots_of
from stagerun.system.files import mapped
from stagerun.train.progress import MOMENTUM, WEIGHTS
from stagerun.train.transfer import Mistake

if TYPE_CHECKING:
    from torch import Tensor


# -- names


def _resnet50() -> Iterator[tuple[str, str, str]]:
    def unit(layer: str, suffix: str, conv: str, norm: str) -> Iterator[tuple[str, str, str]]:
        yield layer, "Convolution", conv
        yield f"bn{suffix}", "BatchNorm", norm
        yield f"scale{suffix}", "Scale", norm

    yield from unit("conv1", "_conv1", "conv1", "bn1")
    for group, blocks in ((2, 3), (3, 4), (4, 6), (5, 3)):
        for at, letter in enumerate("abcdef"[:blocks]):
            suffix, block = f"{group}{letter}_branch", f"layer{group - 1}.{at}"
            if at == 0:
                down = f"{block}.downsample"
                yield from unit(f"res{suffix}1", f"{suffix}1", f"{down}.0", f"{down}.1")
            for i, branch in enumerate("abc", 1):
                yield from unit(f"res{suffix}2{branch}", f"{suffix}2{branch}", f"{block}.conv{i}", f"{block}.bn{i}")
    yield "fc1000", "InnerProduct", "fc"


def _plain(convolutions: Mapping[str, int], *linear: int) -> list[tuple[str, str, str]]:
    features = [(name, "Convolution", f"features.{at}") for name, at in convolutions.items()]
    return [*features, *((f"fc{i}", "InnerProduct", f"classifier.{at}") for i, at in enumerate(linear, 6))]


_VGG16 = {"1_1": 0, "1_2": 2, "2_1": 5, "2_2": 7}
_VGG16 |= {f"{g}_{i}": 7 * g - 11 + 2 * (i - 1) for g in (3, 4, 5) for i in (1, 2, 3)}
# Networks that are published for Caffe under one set of names: (layer, type, prefix of its parameters), in order. The last layer has
# another name in a net for other classes.
NAMED: dict[str, list[tuple[str, str, str]]] = {
    "resnet50_intel_caffe": list(_resnet50()),
    "resnet50": list(_resnet50()),
    "alexnet": _plain({f"conv{i}": at for i, at in enumerate((0, 3, 6, 8, 10), 1)}, 1, 4, 6),
    "vgg16": _plain({f"conv{name}": at for name, at in _VGG16.items()}, 0, 3, 6),
}


def network_names(model: Model, file: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Map the names of a .caffemodel's tensors, `res2a_branch1.weight`, to the names in a network of stagerun's; {} for a net, which
    keeps Caffe's names. `file`: the shapes of all tensors in order, which identify the last linear layer."""
    if model.net is not None or model.name not in NAMED:
        return {}
    *named, (_, _, last) = NAMED[model.name]
    prefixes = {layer: prefix for layer, _, prefix in named}
    linear = [name.rpartition(".")[0] for name, shape in file.items() if name.endswith(".weight") and len(shape) == 2]
    prefixes |= dict.fromkeys(linear[-1:], last)
    renamed: dict[str, str] = {}
    for name in file:
        layer, _, part = name.rpartition(".")
        new = f"{prefixes.get(layer)}.{part}"
        if layer in prefixes and new not in renamed.values():
            renamed[name] = new
    return renamed


class Written(NamedTuple):
    """A layer as Caffe writes it. `blobs`: the names of the network's tensors, and after a BatchNorm's statistics its FACTOR, which only
    Caffe has. `fraction`: a BatchNorm's moving_average_fraction."""

    name: str
    type: str
    blobs: tuple[str, ...]
    fraction: float = 0.0


def layers_of(model: Model) -> tuple[Written, ...]:
    """Return a net's training layers, or the layers with blobs of a network that is published for Caffe; () for other networks. The
    network may lack a bias."""
    layers = []
    for one in of_model(model).train.layers if model.net is not None else ():
        names = [f"{one.name}.{part}" for part in NORM] if isinstance(one.settings, BatchNorm) else []
        names += [blob.name for blob in one.blobs]
        layers.append(Written(one.name, one.type, tuple(names), getattr(one.settings, "moving_average_fraction", 0.0)))
    fraction = 0.9 if model.moving_average_fraction is None else model.moving_average_fraction
    for layer, type_, prefix in NAMED.get(model.name, ()) if model.net is None else ():
        parts = NORM if type_ == "BatchNorm" else ("weight", "bias")
        layers.append(Written(layer, type_, tuple(f"{prefix}.{part}" for part in parts), fraction))
    return tuple(layers)


# -- start of a stage


def _order_of(data: bytes | memoryview, path: Path, model: Model) -> tuple[str, ...]:
    """Return the network's parameter names in the order of the history. `data`: the weights next to it, in `path`. DataError."""
    try:
        names = network_names(model, shapes(data))
        return tuple(names.get(name, name) for name in learnable(data))
    except ValueError as error:
        raise DataError(f"{path}: {error}", "it is not a complete .caffemodel") from error


def mistakes_in(stage: Stage, weights: Weights) -> Iterator[Mistake]:
    """Yield the differences between the stage and the solver that wrote the state. UsageError, DataError."""
    file, solver, slots = find(weights), stage.solver, history_slots(stage.solver)
    state = file.held
    assert state is not None
    if solver.lr_policy == "multistep":
        # Caffe checks once per iteration, or, SURFsara's, once per parameter: it may be one step behind.
        most = sum(step <= state.iter for step in solver.stepvalue)
        if state.current_step not in (most, sum(step < state.iter for step in solver.stepvalue)):
            passed = count(state.current_step, "step")
            text = f"{weights.file} has passed {passed}, and by iteration {state.iter} the stage has {most}"
            yield Mistake("solverstate", text, "write the `stepvalue` of the solver that Caffe ran with")
    n = len(_order_of(mapped(file.path), file.path, stage.model))
    if len(state.history) != n * len(slots):
        blobs = count(len(state.history), "blob")
        text = f"{weights.file} holds {blobs}, and type `{solver.type}` needs {n * len(slots)}"
        why = f"the weights next to it have {count(n, 'blob')}, and `{solver.type}` stores {len(slots)} for each"
        yield Mistake("solverstate", text, f"{why}: write the `type` of the solver that Caffe ran with")


def history_slots(solver: Solver) -> Sequence[str]:
    """Return the slots of a history in order: Caffe writes one slot for all blobs, then the next. Adam's `t` is the iteration."""
    return [slot for slot in slots_of(solver.type, solver.momentum_form) if slot != "t"]


def remember(stage: Stage, live: "Mapping[str, Tensor]") -> None:
    """Copy the history into the solver's state, `SLOT/PARAMETER`, except for frozen parameters. DataError."""
    import torch

    weights, digest = stage.solver.start, stage.identity.get(WEIGHTS_DIGEST, "")
    assert weights is not None
    file = find(weights)
    assert file.state is not None
    state = read_state(file.state, weights.file, digest)
    names = _order_of(data_of(file, 0, digest), file.path, stage.model)
    blobs = (f"{slot}/{name}" for slot in history_slots(stage.solver) for name in names)
    history = dict(zip(blobs, state.history, strict=False))
    for name, tensor in live.items():
        slot, _, parameter = name.partition("/")
        if slot == "t":
            tensor.fill_(state.iter)
            continue
        blob = history.get(name)
        if blob is None or blob.data.size != tensor.numel():
            has = "nothing" if blob is None else count(blob.data.size, "number")
            text = f"{weights.file} holds {has} for `{parameter}`, which has {tensor.numel()}"
            raise DataError(text, "it is the state of another net")
        if not np.isfinite(blob.data).all():
            raise DataError(f"{weights.file}: the history of `{parameter}` is not finite")
        tensor.copy_(torch.from_numpy(np.array(blob.data)).reshape(tensor.shape))


# -- export


def caffemodel(model: Model, weights: "Mapping[str, Tensor]", double: bool, resumable: bool = False) -> bytes:
    """Return a NetParameter: all layers of a net, else the layers with blobs. A BatchNorm's statistics are written with a factor of 1 or,
    if `resumable` by Caffe, as the sums that Caffe has after as many passes. UsageError if Caffe has no such net."""
    layers = _layers(model, weights)

    def blobs(layer: Written) -> Iterator[Numbers]:
        factor = 1.0
        if resumable and layer.type == "BatchNorm":
            counter = weights[layer.blobs[2].removesuffix(FACTOR) + COUNTER]
            factor = statistics_factor(float(np.float32(layer.fraction)), int(counter))  # as 32 bits, in Caffe
        for name in layer.blobs:
            values = np.ones(1) if name.endswith(FACTOR) else weights[name].double().numpy()
            yield (values * factor if name.endswith(NORM) else values).astype(_kind(double))

    written = {name for layer in layers for name in layer.blobs}
    if left := sorted(name for name in weights if name not in written and not name.endswith(COUNTER)):
        text = f"the net that `{model.name}` is published as has no blob for `{left[0]}`"
        raise UsageError(text, "export a .safetensors file")
    return net_bytes(model.name, zip(_without_blobs(model, layers), map(blobs, layers), strict=True))


def solverstate(stage: Stage, files: Mapping[str, bytes], iter: int, learned_net: str, double: bool) -> bytes:
    """Return a file that `caffe train --snapshot` resumes from. `files`: the snapshot's. UsageError for a solver that Caffe lacks."""
    from stagerun.engine.codec import decode

    solver = stage.solver
    if solver.type not in CAFFES_TYPES:
        text = f"--solverstate: Caffe has no solver of type `{solver.type}`"
        raise UsageError(text, f"it has {listing(CAFFES_TYPES, 'and')}")
    if solver.type in ("SGD", "Nesterov") and solver.momentum_form is MomentumForm.TORCH:
        text = "--solverstate: with `momentum_form: TORCH` the solver stores gradients, and Caffe stores steps"
        raise UsageError(text, "export the weights alone")
    saved, weights = decode(files[MOMENTUM]), decode(files[WEIGHTS])
    names = dict.fromkeys(name for layer in _layers(stage.model, weights) for name in layer.blobs)

    def memory(slot: str, name: str) -> Numbers:
        """Return zeros, as Caffe has, for statistics and frozen parameters."""
        if f"{slot}/{name}" in saved:
            return saved[f"{slot}/{name}"].double().numpy().astype(_kind(double))
        return np.zeros(tuple(weights[name].shape) if name in weights else 1, _kind(double))

    history = [memory(slot, name) for slot in history_slots(solver) for name in names]
    passed = sum(step < iter for step in solver.stepvalue) if solver.lr_policy == "multistep" else 0
    return state_bytes(iter, learned_net, history, passed)


def _kind(double: bool) -> type[np.floating]:
    return np.float64 if double else np.float32


def _layers(model: Model, weights: "Mapping[str, Tensor]") -> list[Written]:
    """Return the layers with the blobs that the network has: it may lack a bias."""
    layers = layers_of(model)
    if not layers:
        names = listing(list(NAMED), "and")
        hint = f".caffemodel is for Caffe nets (`caffe_net`) and for {names}; export a .safetensors file"
        raise UsageError(f"Caffe has no net of `{model.name}`", hint)
    return [
        layer._replace(blobs=tuple(n for n in layer.blobs if n in weights or not n.endswith(".bias")))
        for layer in layers
    ]


def _without_blobs(model: Model, layers: Sequence[Written]) -> Iterator[bytes]:
    """Yield the layers without blobs, as a net's text has them in training, where several may be unnamed."""
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
