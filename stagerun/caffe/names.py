"""How the blobs of Caffe's layers are called in networks: in those of stagerun's that are published for Caffe, and in nets. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from stagerun.base.recipe import Model
from stagerun.base.weights import NORM
from stagerun.caffe.layers import BatchNorm
from stagerun.caffe.resolve import of_model


def _resnet50() -> Iterator[tuple[str, str, str]]:
    def unit(layer: str, place: str, conv: str, norm: str) -> Iterator[tuple[str, str, str]]:
        yield layer, "Convolution", conv
        yield f"bn{place}", "BatchNorm", norm
        yield f"scale{place}", "Scale", norm

    yield from unit("conv1", "_conv1", "conv1", "bn1")
    for group, blocks in ((2, 3), (3, 4), (4, 6), (5, 3)):
        for at, letter in enumerate("abcdef"[:blocks]):
            place, block = f"{group}{letter}_branch", f"layer{group - 1}.{at}"
            if at == 0:
                down = f"{block}.downsample"
                yield from unit(f"res{place}1", f"{place}1", f"{down}.0", f"{down}.1")
            for i, branch in enumerate("abc", 1):
                yield from unit(f"res{place}2{branch}", f"{place}2{branch}", f"{block}.conv{i}", f"{block}.bn{i}")
    yield "fc1000", "InnerProduct", "fc"


def _plain(convolutions: Mapping[str, int], *linear: int) -> list[tuple[str, str, str]]:
    found = [(name, "Convolution", f"features.{at}") for name, at in convolutions.items()]
    return [*found, *((f"fc{i}", "InnerProduct", f"classifier.{at}") for i, at in enumerate(linear, 6))]


_VGG16 = {"1_1": 0, "1_2": 2, "2_1": 5, "2_2": 7}
_VGG16 |= {f"{g}_{i}": 7 * g - 11 + 2 * (i - 1) for g in (3, 4, 5) for i in (1, 2, 3)}
# Networks that are published for Caffe under one set of names: (layer, type, what its parameters begin with), in order. The last layer is
# called otherwise in a net for other classes.
NAMED: dict[str, list[tuple[str, str, str]]] = {
    "resnet50_intel_caffe": list(_resnet50()),
    "resnet50": list(_resnet50()),
    "alexnet": _plain({f"conv{i}": at for i, at in enumerate((0, 3, 6, 8, 10), 1)}, 1, 4, 6),
    "vgg16": _plain({f"conv{name}": at for name, at in _VGG16.items()}, 0, 3, 6),
}


def here(model: Model, file: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """By the name of a tensor in a .caffemodel, `res2a_branch1.weight`, its name in a network of stagerun's, where both are known; none of a
    net, in which it has that name. `file`: the shapes of all of its tensors in their order, which tell the last linear layer."""
    if model.net is not None or model.name not in NAMED:
        return {}
    *known, (_, _, last) = NAMED[model.name]
    prefixes = {layer: prefix for layer, _, prefix in known}
    linear = [name.rpartition(".")[0] for name, shape in file.items() if name.endswith(".weight") and len(shape) == 2]
    prefixes |= dict.fromkeys(linear[-1:], last)
    found: dict[str, str] = {}
    for name in file:
        layer, _, part = name.rpartition(".")
        if layer in prefixes and f"{prefixes[layer]}.{part}" not in found.values():
            found[name] = f"{prefixes[layer]}.{part}"
    return found


@dataclass(frozen=True, slots=True)
class Written:
    """A layer as Caffe writes it. `blobs`: the names of the network's tensors, and after a BatchNorm's statistics its FACTOR, which the network
    hasn't. `fraction`: a BatchNorm's moving_average_fraction."""

    name: str
    type: str
    blobs: tuple[str, ...]
    fraction: float = 0.0


def layers_of(model: Model) -> tuple[Written, ...]:
    """All layers of a net in training, and of a network that is published for Caffe those with blobs; none of another one. A bias may be
    missing in the network."""
    found = []
    for one in of_model(model).train.layers if model.net is not None else ():
        names = [f"{one.name}.{part}" for part in NORM] if isinstance(one.settings, BatchNorm) else []
        names += [blob.name for blob in one.blobs]
        found.append(Written(one.name, one.type, tuple(names), getattr(one.settings, "moving_average_fraction", 0.0)))
    fraction = 0.9 if model.moving_average_fraction is None else model.moving_average_fraction
    for layer, type_, prefix in NAMED.get(model.name, ()) if model.net is None else ():
        parts = NORM if type_ == "BatchNorm" else ("weight", "bias")
        found.append(Written(layer, type_, tuple(f"{prefix}.{part}" for part in parts), fraction))
    return tuple(found)


def in_history(layers: tuple[Written, ...]) -> tuple[str, ...]:
    """The tensors in the order of a history: one that is shared comes where it is first."""
    return tuple(dict.fromkeys(name for layer in layers for name in layer.blobs))
