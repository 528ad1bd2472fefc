"""Networks for images of 28 or 32 pixels."""

from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from stagerun.base.recipe import Model
from stagerun.models.layers import FAN_OUT, Chain, batch_norm, conv, conv_unit, start


class Residual(Chain):
    """x + units(x), without a ReLU after the sum."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Scaled(nn.Linear):
    """fc times 0.125, which keeps the logits small at the first steps of a high learning rate."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 0.125


def units(model: Model, widths: dict[str, int], first_stride: int = 1) -> Chain:
    """Units of a 3x3 convolution without bias, BatchNorm and ReLU, by name and width; `residual...`: two with a shortcut; `max...`: 2x2
    maxima. Then the maximum over the map, and fc without biases, times 0.125. Weights start as torch draws them, scales at one."""
    layers, width = dict[str, nn.Module](), model.channels
    for name, wanted in widths.items():
        if name.startswith("max"):
            layers[name] = nn.MaxPool2d(wanted)
        elif name.startswith("residual"):
            layers[name] = Residual(res1=conv_unit(model, width, wanted, 3), res2=conv_unit(model, wanted, wanted, 3))
        else:
            layers[name] = conv_unit(model, width, wanted, 3, first_stride if not layers else 1)
            width = wanted
    fc = Scaled(width, model.num_classes, bias=False)
    return Chain(**layers, whole=nn.AdaptiveMaxPool2d(1), flat=nn.Flatten(), fc=fc)


def resnet9(model: Model) -> Chain:
    """ResNet-9 of cifar10-fast. Maps of an image of 32x32: 32x32 up to layer1, then 16x16, 8x8 and 4x4.

    6,573,120 parameters with 3 channels and 10 classes. The published network ends with a 4x4 maximum, which for 32 pixels is the one over
    the map. Source: davidcpage/cifar10-fast: dawn.py.
    """
    widths = {"prep": 64, "layer1": 128, "max1": 2, "residual1": 128, "layer2": 256, "max2": 2}
    return units(model, widths | {"layer3": 512, "max3": 2, "residual3": 512})


def alexnet_bn(model: Model) -> Chain:
    """An AlexNet with BatchNorm. Maps of an image of 32x32: 8x8 behind max0, then 4x4 and 2x2.

    2,255,296 parameters with 3 channels and 10 classes. The published network ends with a 2x2 maximum, which for 32 pixels is the one over
    the map. Source: sands-lab/layer-wise-aaai20: CIFAR10/dawn.py, where it is called `alexnet`.
    """
    widths = {"prep": 64, "max0": 2, "layer1": 192, "max1": 2, "layer2": 384, "layer3": 256, "layer4": 256, "max4": 2}
    return units(model, widths, first_stride=2)


class Block(nn.Module):
    """relu(bn(conv(relu(bn(conv(x))))) + shortcut(x)), 3x3; the shortcut is a strided 1x1 where the shape changes.

    The last scale starts at zero, so that a block starts as its shortcut.
    """

    def __init__(self, model: Model, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = conv(width_in, width, 3, stride)
        self.bn1 = batch_norm(model, width)
        self.conv2 = conv(width, width, 3)
        self.bn2 = batch_norm(model, width)
        self.shortcut = nn.Sequential()
        if width_in != width or stride != 1:
            self.shortcut = nn.Sequential(conv(width_in, width, 1, stride), batch_norm(model, width))
        nn.init.zeros_(self.bn2.weight)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x), inplace=True)


def resnet_small(model: Model) -> Chain:
    """
                                                 output for 28x28x1   multiply-adds
        conv1   3x3, 32, 2x2 max, BN, ReLU       14x14x32             0.23 M
        layer1  3x3, 3x3                         14x14x32             3.61 M
        layer2  3x3/2, 3x3                       7x7x64               2.81 M
        layer3  3x3/2, 3x3                       4x4x128              3.67 M
        2x2 mean, fc                                                  0.01 M

    10.3 M multiply-adds and 312 k parameters with 1 channel and 10 classes. Two choices suit small centred pictures that are
    seen for a few epochs only: pooling before the first BatchNorm makes that four times as cheap, and the mean keeps a map of
    2x2, which tells fc where a feature is. Convolutions start from normal(0, sqrt(2 / fan_out)), fc from normal(0, 0.01).
    """
    net = Chain(
        conv1=conv(model.channels, 32, 3),
        max1=nn.MaxPool2d(2),
        bn1=batch_norm(model, 32),
        relu1=nn.ReLU(inplace=True),
        layer1=Block(model, 32, 32, 1),
        layer2=Block(model, 32, 64, 2),
        layer3=Block(model, 64, 128, 2),
        mean=nn.AdaptiveAvgPool2d(2),
        flat=nn.Flatten(),
        fc=nn.Linear(128 * 2 * 2, model.num_classes),
    )
    start(net, FAN_OUT, partial(nn.init.normal_, std=0.01))
    return net


class WideBlock(nn.Module):
    """conv(relu(bn(conv(relu(bn(x)))))) + x, 3x3. Where the shape changes a strided 1x1 of relu(bn(x)) takes the place of x."""

    def __init__(self, model: Model, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.bn1 = batch_norm(model, width_in)
        self.conv1 = conv(width_in, width, 3, stride)
        self.bn2 = batch_norm(model, width)
        self.conv2 = conv(width, width, 3)
        self.shortcut = conv(width_in, width, 1, stride) if width_in != width else None

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(x), inplace=True)
        x = x if self.shortcut is None else self.shortcut(y)
        return self.conv2(F.relu(self.bn2(self.conv1(y)), inplace=True)) + x


def wide_resnet(model: Model) -> Chain:
    """`wrn_DEPTH_WIDTH`, with n = (DEPTH - 4) / 6 blocks in a group:

                                            output for 32x32x3
        conv1    3x3, 16                    32x32x16
        layer1   n blocks, 16 WIDTH         32x32x160 of WRN-28-10
        layer2   n blocks, 32 WIDTH, /2     16x16x320
        layer3   n blocks, 64 WIDTH, /2     8x8x640
        BN, ReLU, mean over the map, fc

    Parameters with 3 channels and 10 classes: 8,949,210 (40-4), 10,961,370 (16-8) and 36,479,194 (28-10). Without dropout. As in the authors'
    code (szagoruyko/wide-residual-networks) convolutions start from normal(0, sqrt(2 / fan_out)), scales at one, the biases of fc at zero.
    Source: Zagoruyko and Komodakis, Wide Residual Networks, 2016 (arXiv:1605.07146).
    """
    depth, width = map(int, model.name.split("_")[1:])

    def group(width_in: int, width: int, stride: int) -> nn.Sequential:
        rest = (WideBlock(model, width, width, 1) for _ in range((depth - 4) // 6 - 1))
        return nn.Sequential(WideBlock(model, width_in, width, stride), *rest)

    net = Chain(
        conv1=conv(model.channels, 16, 3),
        layer1=group(16, 16 * width, 1),
        layer2=group(16 * width, 32 * width, 2),
        layer3=group(32 * width, 64 * width, 2),
        bn=batch_norm(model, 64 * width),
        relu=nn.ReLU(inplace=True),
        mean=nn.AdaptiveAvgPool2d(1),
        flat=nn.Flatten(),
        fc=nn.Linear(64 * width, model.num_classes),
    )
    start(net, FAN_OUT)
    return net
