"""Inception-BN of MXNet's first distributed examples (November 2015), for crops of 28 and of 224 pixels.

Blocks are rows of widths: of (1x1, 3x3); of (3x3,), which halves the map; of (1x1, 3x3 thinned, 3x3, double 3x3 thinned, double 3x3, behind the
pooling); and of (3x3 thinned, 3x3, double 3x3 thinned, double 3x3), which halves it. `thinned` is a 1x1 before the 3x3.
"""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from stagerun.base.recipe import Filler, Model
from stagerun.models.layers import Chain, conv_unit, fill, start


class Beside(Chain):
    """Layers beside each other on the same map: as many channels as all have."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([layer(x) for layer in self], 1)


def halving_max() -> nn.Module:
    """3x3 maxima around every second pixel, half as many, rounded up, as a strided convolution gives.

    The first window starts at pixel 0 and the last one hangs over the edge, as in MXNet's pooling of 2015. (Later versions of these networks
    pad by 1 and round down, which moves all windows by a pixel.)
    """
    return nn.Sequential(nn.ConstantPad2d((0, 2, 0, 2), -torch.inf), nn.MaxPool2d(3, 2))


def thinned(
    model: Model, width_in: int, thin: int, width: int, *, double: bool = False, stride: int = 1
) -> nn.Sequential:
    """A 1x1 unit that makes the map thin, and 3x3 units: one, or two where `double`; the last one in steps of `stride`."""
    units = [conv_unit(model, width_in, thin, 1, bias=True)]
    if double:
        units.append(conv_unit(model, thin, width, 3, bias=True))
    units.append(conv_unit(model, width if double else thin, width, 3, stride=stride, bias=True))
    return nn.Sequential(*units)


def block(model: Model, width_in: int, widths: tuple[int, ...], pool: str) -> tuple[Beside, int]:
    """A block, and how many channels it has. `pool`: of the pooling beside the others, `max` or `avg`."""
    unit, thin = partial(conv_unit, model, width_in, bias=True), partial(thinned, model, width_in)
    match widths:
        case width1, width3:
            return Beside(conv1x1=unit(width1, 1), conv3x3=unit(width3, 3)), width1 + width3
        case (width,):
            return Beside(conv3x3=unit(width, 3, stride=2), max=halving_max()), width + width_in
        case thin3, width3, thin33, width33:
            conv3x3, double3x3 = thin(thin3, width3, stride=2), thin(thin33, width33, double=True, stride=2)
            return Beside(conv3x3=conv3x3, double3x3=double3x3, max=halving_max()), width3 + width33 + width_in
    width1, thin3, width3, thin33, width33, behind = widths
    conv1x1, conv3x3, double3x3 = unit(width1, 1), thin(thin3, width3), thin(thin33, width33, double=True)
    # A mean at the edge counts the zeros around the map, as MXNet's does.
    pooling = nn.MaxPool2d(3, 1, 1) if pool == "max" else nn.AvgPool2d(3, 1, 1)
    projection = Chain(pool=pooling, **dict(unit(behind, 1).named_children()))
    beside = Beside(conv1x1=conv1x1, conv3x3=conv3x3, double3x3=double3x3, projection=projection)
    return beside, width1 + width3 + width33 + behind


def inception(
    model: Model, first: dict[str, nn.Module], width: int, blocks: Mapping[str, tuple[int, ...]], limit: float
) -> Chain:
    """`first`, blocks, the mean over the map, fc. Weights start evenly from -limit to limit, biases at zero, scales at one: MXNet's Uniform(limit)."""
    layers = dict(first)
    for name, widths in blocks.items():
        layers[name], width = block(model, width, widths, "max" if name == "in5b" else "avg")
    fc = nn.Linear(width, model.num_classes)
    net = Chain(**layers, mean=nn.AdaptiveAvgPool2d(1), flat=nn.Flatten(), fc=fc)
    evenly = partial(fill, filler=Filler(type="uniform", min=-limit, max=limit))
    start(net, evenly, evenly)
    return net


BLOCKS_28: dict[str, tuple[int, ...]] = {
    "in3a": (32, 32),
    "in3b": (32, 48),
    "in3c": (80,),
    "in4a": (112, 48),
    "in4b": (96, 64),
    "in4c": (80, 80),
    "in4d": (48, 96),
    "in4e": (96,),
    "in5a": (176, 160),
    "in5b": (176, 160),
}


def inception_bn_28_small(model: Model) -> Chain:
    """Units of a convolution with bias, BatchNorm and ReLU: a 3x3 one of 96 channels, BLOCKS_28, the mean over the map, fc.

    Maps of 28x28 up to in3b, 14x14 up to in4d, 7x7 at the end. 1,652,826 parameters with 3 channels and 10 classes. Weights
    start evenly from -0.07 to 0.07. The published network ends with a 7x7 mean, which for 28 pixels is the one over the map.
    Source: apache/mxnet: example/distributed-training/{cifar10,train_cifar10}.py of November 2015.
    """
    return inception(model, {"conv1": conv_unit(model, model.channels, 96, 3, bias=True)}, 96, BLOCKS_28, 0.07)


BLOCKS: dict[str, tuple[int, ...]] = {
    "in3a": (64, 64, 64, 64, 96, 32),
    "in3b": (64, 64, 96, 64, 96, 64),
    "in3c": (128, 160, 64, 96),
    "in4a": (224, 64, 96, 96, 128, 128),
    "in4b": (192, 96, 128, 96, 128, 128),
    "in4c": (160, 128, 160, 128, 160, 128),
    "in4d": (96, 128, 192, 160, 192, 128),
    "in4e": (128, 192, 192, 256),
    "in5a": (352, 192, 320, 160, 224, 128),
    "in5b": (352, 192, 320, 192, 224, 128),
}


def inception_bn(model: Model) -> Chain:
    """Units of a convolution with bias, BatchNorm and ReLU:

                                                   output for 224x224x3
        conv1          7x7/2 64, 3x3/2 max         56x56x64
        conv2          1x1 64, 3x3 192, 3x3/2 max  28x28x192
        in3a to in3c   BLOCKS                      14x14x576
        in4a to in4e                               7x7x1024
        in5a, in5b                                 7x7x1024
        mean over the map, fc

    The pooling beside the convolutions of a block is a mean, in in5b a maximum. 11,295,240 parameters with 3 channels and 1000 classes. Weights
    start evenly from -0.01 to 0.01. The published network ends with a 7x7 mean, which for 224 pixels is the one over the map. Source:
    apache/mxnet: example/distributed-training/{imagenet,train_imagenet}.py of November 2015, after arXiv:1502.03167.
    """
    first = {
        "conv1": conv_unit(model, model.channels, 64, 7, stride=2, bias=True),
        "max1": halving_max(),
        "conv2": thinned(model, 64, 64, 192),
        "max2": halving_max(),
    }
    return inception(model, first, 192, BLOCKS, 0.01)
