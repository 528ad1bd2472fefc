"""Caffe's nets that are one of stagerun's networks, and how its parameters are named. Pure."""

from collections.abc import Sequence

from stagerun.caffe_import.nets import Shape, text_of
from stagerun.spec.networks import TORCHVISION
from stagerun.spec.tree import Block
from stagerun.spec.view import View

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
# Networks whose layers have the same names in everybody's nets for Caffe, and their convolutions and linear layers in order.
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


def recognise(found: Sequence[Shape]) -> str:
    """The name of the network that the layers surely are, '' otherwise.

    The one there is: ResNet-50 of models/intel_optimized_models in sara-nl/caffe, which is recognised by name, width, kernel,
    stride, padding and bias of each of its 53 convolutions, and one linear layer at the end.
    """
    convolutions = {s.name: (s.sizes, s.bias) for s in found if s.type == "Convolution"}
    linear = [s for s in found if s.type == "InnerProduct"]
    return RESNET50 if convolutions == _resnet50() and len(linear) == 1 and found[-1] is linear[0] else ""


def _resnet50() -> dict[str, tuple[tuple[int, ...], bool]]:
    net: dict[str, tuple[tuple[int, ...], bool]] = {"conv1": ((64, 7, 2, 3, 1), True)}
    for group, blocks, width, out in GROUPS:
        for letter in "abcdef"[:blocks]:
            stride = 2 if letter == "a" and group > 2 else 1
            name = f"res{group}{letter}_branch"
            if letter == "a":
                net[f"{name}1"] = ((out, 1, stride, 0, 1), False)
            net[f"{name}2a"] = ((width, 1, 1, 0, 1), False)
            net[f"{name}2b"] = ((width, 3, stride, 1, 1), False)
            net[f"{name}2c"] = ((out, 1, 1, 0, 1), False)
    return net


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


def zero_gamma(layers: Sequence[Block]) -> str | None:
    """In which blocks of Intel's ResNet-50 the last scale starts at zero, as stagerun's Model.zero_gamma; None where it is
    another pattern. Intel's Caffe takes that from the filler of a BatchNorm, whose MKL-DNN form has scale and shift; BVLC's from
    that of a Scale layer.
    """
    zero = set()
    for layer in layers:
        for name in ("batch_norm_param", "scale_param"):
            settings = layer.block(name)
            filler = settings.block("filler") if settings else None
            if filler is not None and View(filler).number("value") == 0:
                zero.add(text_of(layer, "name").replace("scale", "bn", 1))
    every = {f"bn{g}{letter}_branch2c" for g, blocks, _, _ in GROUPS for letter in "abcdef"[:blocks]}
    last = {f"bn{g}{'abcdef'[blocks - 1]}_branch2c" for g, blocks, _, _ in GROUPS}
    return {frozenset(): "NONE", frozenset(last): "LAST", frozenset(every): "ALL"}.get(frozenset(zero))
