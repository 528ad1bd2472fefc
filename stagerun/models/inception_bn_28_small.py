"""Inception-BN-28-small of MXNet's first distributed examples (November 2015), for CIFAR-10 in crops of 28 pixels."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stagerun import recipe
from stagerun.models.conv_unit import ConvUnit
from stagerun.models.fillers import fill
from stagerun.recipe import Filler


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
BLOCKS: dict[str, tuple[int, ...]] = {
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
    """Units of a convolution with bias, BatchNorm and ReLU: a 3x3 one of 96 channels, BLOCKS, the mean over the map, fc.

    Maps of 28x28 up to in3b, 14x14 up to in4d, 7x7 at the end. 1,652,826 parameters with 3 channels and 10 classes. Weights
    start evenly from -0.07 to 0.07. The published network ends with a 7x7 mean, which for 28 pixels is the one over the map.
    Source: apache/mxnet: example/distributed-training/{cifar10,train_cifar10}.py of November 2015.
    """

    def __init__(self, model: recipe.Model) -> None:
        super().__init__()
        self.conv1 = ConvUnit(model, model.channels, 96, 3, bias=True)
        width = 96
        for name, widths in BLOCKS.items():
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
        for name in BLOCKS:
            x = self.get_submodule(name)(x)
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))
