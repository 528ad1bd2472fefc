"""How the blobs of Caffe's layers are called in networks: in those of stagerun's that are published for Caffe, and in nets. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from stagerun.base.net import BatchNorm, Layer
from stagerun.base.recipe import Model
from stagerun.base.weights import NORM
from stagerun.language.nets import of_model
from stagerun.language.networks import TORCHVISION

# Blocks of each group of ResNet-50, and the widths of their convolutions.
GROUPS = ((2, 3, 64, 256), (3, 4, 128, 512), (4, 6, 256, 1024), (5, 3, 512, 2048))
RESNET50 = "resnet50_intel_caffe"

# The last linear layer by the first letters of a network's name, for rules that are for it alone.
LAST_LAYER = {
    "resnet": "fc",
    "resnext": "fc",
    "wide_resnet": "fc",
    "googlenet": "fc",
    "inception_v3": "fc",
    "regnet": "fc",
    "shufflenet": "fc",
    "alexnet": "classifier.6",
    "vgg": "classifier.6",
    "densenet": "classifier",
}
# Networks whose layers have the same names in all nets for Caffe, and their convolutions and linear layers in order.
PLAIN_LAYERS = {
    "alexnet": {
        **{f"conv{i}": f"features.{at}" for i, at in enumerate((0, 3, 6, 8, 10), 1)},
        "fc6": "classifier.1",
        "fc7": "classifier.4",
    },
    "vgg16": {
        **{f"conv{i}": f"features.{at}" for i, at in zip(("1_1", "1_2", "2_1", "2_2"), (0, 2, 5, 7), strict=True)},
        **{f"conv{g}_{i}": f"features.{7 * g - 11 + 2 * (i - 1)}" for g in (3, 4, 5) for i in (1, 2, 3)},
        "fc6": "classifier.0",
        "fc7": "classifier.3",
    },
}
# Networks that are published for Caffe under one set of names.
NAMED = (RESNET50, "resnet50", *PLAIN_LAYERS)


def parameter_prefix(model: str, layer: str, last: str) -> str:
    """What the parameters of a layer of Caffe's begin with in stagerun's network, `layer1.0.conv1`; '' where that is not
    known. `last` is the name of the net's last linear layer."""
    if layer == last and (model in TORCHVISION or model == RESNET50):
        fitting = [end for start, end in LAST_LAYER.items() if model.startswith(start)]
        return fitting[0] if fitting else ""
    if model in PLAIN_LAYERS:
        return PLAIN_LAYERS[model].get(layer, "")
    if model not in (RESNET50, "resnet50"):
        return ""
    if layer in ("conv1", "bn_conv1", "scale_conv1"):
        return "conv1" if layer == "conv1" else "bn1"
    for start, ours in (("res", "conv"), ("bn", "bn"), ("scale", "bn")):
        place, _, branch = layer.removeprefix(start).partition("_branch")
        if layer.startswith(start) and len(place) == 2 and place[0] in "2345" and place[1] in "abcdef":
            block = f"layer{int(place[0]) - 1}.{'abcdef'.index(place[1])}"
            if branch == "1":
                return f"{block}.downsample.{0 if ours == 'conv' else 1}"
            return f"{block}.{ours}{'abc'.index(branch[1]) + 1}" if branch in ("2a", "2b", "2c") else ""
    return ""


def here(model: Model, file: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """By the name of a tensor in a .caffemodel, `res2a_branch1.weight`, its name in a network of stagerun's, where both are known; none of a
    net, in which it has that name. `file`: the shapes of all of its tensors in their order, which tell the last linear layer."""
    linear = [name.rpartition(".")[0] for name, shape in file.items() if name.endswith(".weight") and len(shape) == 2]
    found: dict[str, str] = {}
    for name in file if model.net is None and model.name in NAMED else ():
        layer, _, part = name.rpartition(".")
        prefix = parameter_prefix(model.name, layer, linear[-1] if linear else "")
        if prefix and f"{prefix}.{part}" not in found.values():
            found[name] = f"{prefix}.{part}"
    return found


@dataclass(frozen=True, slots=True)
class Written:
    """A layer as Caffe writes it. `blobs`: the names of the network's tensors, and after a BatchNorm's statistics its FACTOR, which the network
    hasn't. `shapes`: those that they have in this layer, () as the tensor. `fraction`: a BatchNorm's moving_average_fraction."""

    name: str
    type: str
    blobs: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    fraction: float = 0.0


def layers_of(model: Model) -> tuple[Written, ...]:
    """All layers of a net in training, and of a network that is published for Caffe those with blobs; none of another one. A bias may be
    missing in the network."""
    if model.net is not None:
        return tuple(_written(one, model) for one in of_model(model).train.layers)
    published, fraction = list(_published(model.name)), model.moving_average_fraction
    found = []
    for layer, type_ in published:
        prefix = parameter_prefix(model.name, layer, published[-1][0])
        parts = NORM if type_ == "BatchNorm" else ("weight", "bias")
        names = tuple(f"{prefix}.{part}" for part in parts)
        found.append(Written(layer, type_, names, ((),) * len(names), 0.9 if fraction is None else fraction))
    return tuple(found)


def _written(layer: Layer, model: Model) -> Written:
    names, shapes = [blob.name for blob in layer.blobs], [blob.shape for blob in layer.blobs]
    if not isinstance(layer.settings, BatchNorm):
        return Written(layer.name, layer.type, tuple(names), tuple(shapes))
    own, other = layer.settings.moving_average_fraction, model.moving_average_fraction
    statistics = (f"{layer.name}.{part}" for part in NORM)
    return Written(
        layer.name, layer.type, (*statistics, *names), ((), (), (), *shapes), own if other is None else other
    )


def in_history(layers: tuple[Written, ...]) -> tuple[str, ...]:
    """The tensors in the order of a history: one that is shared comes where it is first."""
    return tuple(dict.fromkeys(name for layer in layers for name in layer.blobs))


def _published(model: str) -> Iterator[tuple[str, str]]:
    """(layer, type), in the order of the published net."""
    if model in (RESNET50, "resnet50"):
        yield from _unit("conv1", "conv1")
        for group, blocks, _, _ in GROUPS:
            for letter in "abcdef"[:blocks]:
                place = f"{group}{letter}_branch"
                for branch in ("1", "2a", "2b", "2c") if letter == "a" else ("2a", "2b", "2c"):
                    yield from _unit(f"res{place}{branch}", f"{place}{branch}")
        yield "fc1000", "InnerProduct"
    elif model in PLAIN_LAYERS:
        for layer in PLAIN_LAYERS[model]:
            yield layer, "InnerProduct" if layer.startswith("fc") else "Convolution"
        yield "fc8", "InnerProduct"


def _unit(layer: str, place: str) -> Iterator[tuple[str, str]]:
    joint = "_" if place == layer else ""
    yield layer, "Convolution"
    yield f"bn{joint}{place}", "BatchNorm"
    yield f"scale{joint}{place}", "Scale"
