"""Inception-BN of MXNet's first distributed examples (November 2015): the small one for crops of 28 pixels, and the one for 224."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stagerun.base import recipe
from stagerun.base.recipe import Filler
from stagerun.models.layers import ConvUnit, fill


class Simple(nn.Module):
    """1x1 and 3x3 units beside each other: as many channels as both have."""

    def __init__(self, model: recipe.Model, width_in: int, width1: int, width3: int) -> None:
        super().__init__()
        self.conv1x1 = ConvUnit(model, width_in, width1, 1, bias=True)
        self.conv3x3 = ConvUnit(model, width_in, width3, 3, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.conv1x1(x), self.conv3x3(x)], 1)


class Down(nn.Module):
    """Half the size: a strided 3x3 unit and a 3x3 maximum beside each other."""

    def __init__(self, model: recipe.Model, width_in: int, width: int) -> None:
        super().__init__()
        self.conv3x3 = ConvUnit(model, width_in, width, 3, stride=2, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.conv3x3(x), max_in_steps_of_2(x)], 1)


def max_in_steps_of_2(x: Tensor) -> Tensor:
    """3x3 maxima around every second pixel, half as many, rounded up, as a strided convolution gives.

    The first window starts at pixel 0 and the last one hangs over the edge: MXNet's pooling of 2015 padded nothing and rounded
    up. (Its later versions of these networks pad by 1 and round down, which moves all windows by a pixel.)
    """
    return F.max_pool2d(F.pad(x, (0, 2, 0, 2), value=-torch.inf), 3, 2)


def start_uniform(net: nn.Module, limit: float) -> None:
    """All weights evenly from -limit to limit, biases zero, scales one: MXNet's Uniform(limit)."""
    for module in net.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            fill(module.weight, Filler(type="uniform", min=-limit, max=limit))
            if module.bias is not None:
                nn.init.zeros_(module.bias)


# (width of 1x1, width of 3x3) of Simple, or (width,) of Down.
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


class InceptionBN28Small(nn.Module):
    """Units of a convolution with bias, BatchNorm and ReLU: a 3x3 one of 96 channels, BLOCKS_28, the mean over the map, fc.

    Maps of 28x28 up to in3b, 14x14 up to in4d, 7x7 at the end. 1,652,826 parameters with 3 channels and 10 classes. Weights
    start evenly from -0.07 to 0.07. The published network ends with a 7x7 mean, which for 28 pixels is the one over the map.
    Source: apache/mxnet: example/distributed-training/{cifar10,train_cifar10}.py of November 2015.
    """

    def __init__(self, model: recipe.Model) -> None:
        super().__init__()
        self.conv1 = ConvUnit(model, model.channels, 96, 3, bias=True)
        width = 96
        for name, widths in BLOCKS_28.items():
            if len(widths) == 2:
                self.add_module(name, Simple(model, width, *widths))
                width = sum(widths)
            else:
                self.add_module(name, Down(model, width, *widths))
                width += sum(widths)
        self.fc = nn.Linear(width, model.num_classes)
        start_uniform(self, 0.07)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(x)
        for name in BLOCKS_28:
            x = self.get_submodule(name)(x)
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Thinned(nn.Sequential):
    """A 1x1 unit that makes the map thin, and 3x3 units: one, or two where `double`; the last one in steps of `stride`."""

    def __init__(
        self, model: recipe.Model, width_in: int, thin: int, width: int, *, double: bool = False, stride: int = 1
    ) -> None:
        units = [ConvUnit(model, width_in, thin, 1, bias=True)]
        if double:
            units.append(ConvUnit(model, thin, width, 3, bias=True))
        units.append(ConvUnit(model, width if double else thin, width, 3, stride=stride, bias=True))
        super().__init__(*units)


class BlockA(nn.Module):
    """1x1, thinned 3x3, thinned double 3x3, and 3x3 pooling with a 1x1 behind it, beside each other."""

    def __init__(self, model: recipe.Model, width_in: int, widths: tuple[int, ...], pool: str) -> None:
        super().__init__()
        width1, thin3, width3, thin33, width33, behind = widths
        self.conv1x1 = ConvUnit(model, width_in, width1, 1, bias=True)
        self.conv3x3 = Thinned(model, width_in, thin3, width3)
        self.double3x3 = Thinned(model, width_in, thin33, width33, double=True)
        # A mean at the edge counts the zeros around the map, as MXNet's does.
        self.pool = nn.MaxPool2d(3, 1, 1) if pool == "max" else nn.AvgPool2d(3, 1, 1)
        self.projection = ConvUnit(model, width_in, behind, 1, bias=True)
        self.width = width1 + width3 + width33 + behind

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.conv1x1(x), self.conv3x3(x), self.double3x3(x), self.projection(self.pool(x))], 1)


class BlockB(nn.Module):
    """Half the size: strided thinned 3x3, strided thinned double 3x3 and a 3x3 maximum, beside each other."""

    def __init__(self, model: recipe.Model, width_in: int, widths: tuple[int, ...]) -> None:
        super().__init__()
        thin3, width3, thin33, width33 = widths
        self.conv3x3 = Thinned(model, width_in, thin3, width3, stride=2)
        self.double3x3 = Thinned(model, width_in, thin33, width33, double=True, stride=2)
        self.width = width3 + width33 + width_in

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.conv3x3(x), self.double3x3(x), max_in_steps_of_2(x)], 1)


# Of BlockA: 1x1, 3x3 thinned, 3x3, double 3x3 thinned, double 3x3, behind the pooling; and the kind of pooling. Of BlockB,
# which always takes the maximum: 3x3 thinned, 3x3, double 3x3 thinned, double 3x3.
BLOCKS: dict[str, tuple[tuple[int, ...], str]] = {
    "in3a": ((64, 64, 64, 64, 96, 32), "avg"),
    "in3b": ((64, 64, 96, 64, 96, 64), "avg"),
    "in3c": ((128, 160, 64, 96), "max"),
    "in4a": ((224, 64, 96, 96, 128, 128), "avg"),
    "in4b": ((192, 96, 128, 96, 128, 128), "avg"),
    "in4c": ((160, 128, 160, 128, 160, 128), "avg"),
    "in4d": ((96, 128, 192, 160, 192, 128), "avg"),
    "in4e": ((128, 192, 192, 256), "max"),
    "in5a": ((352, 192, 320, 160, 224, 128), "avg"),
    "in5b": ((352, 192, 320, 192, 224, 128), "max"),
}


class InceptionBN(nn.Module):
    """Units of a convolution with bias, BatchNorm and ReLU:

                                                   output for 224x224x3
        conv1          7x7/2 64, 3x3/2 max         56x56x64
        conv2          1x1 64, 3x3 192, 3x3/2 max  28x28x192
        in3a to in3c   BLOCKS                      14x14x576
        in4a to in4e                               7x7x1024
        in5a, in5b                                 7x7x1024
        mean over the map, fc

    11,295,240 parameters with 3 channels and 1000 classes. Weights start evenly from -0.01 to 0.01. The published network ends
    with a 7x7 mean, which for 224 pixels is the one over the map. Source: apache/mxnet:
    example/distributed-training/{imagenet,train_imagenet}.py of November 2015, after arXiv:1502.03167.
    """

    def __init__(self, model: recipe.Model) -> None:
        super().__init__()
        self.conv1 = ConvUnit(model, model.channels, 64, 7, stride=2, bias=True)
        self.conv2 = Thinned(model, 64, 64, 192)
        width = 192
        for name, (widths, pool) in BLOCKS.items():
            block = BlockA(model, width, widths, pool) if len(widths) == 6 else BlockB(model, width, widths)
            self.add_module(name, block)
            width = block.width
        self.fc = nn.Linear(width, model.num_classes)
        start_uniform(self, 0.01)

    def forward(self, x: Tensor) -> Tensor:
        x = max_in_steps_of_2(self.conv2(max_in_steps_of_2(self.conv1(x))))
        for name in BLOCKS:
            x = self.get_submodule(name)(x)
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))
