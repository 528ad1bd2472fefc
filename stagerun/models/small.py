"""Published networks that torchvision lacks: for images of 28 or 32 pixels, and Inception-BN of MXNet's first distributed examples (November
2015), for crops of 28 and of 224 pixels."""

from collections.abc import Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stagerun.base.recipe import Filler, Model
from stagerun.models.layers import FAN_OUT, Chain, batch_norm, conv, conv_unit, fill, start


class Residual(Chain):
    """Computes x + units(x), without a ReLU after the sum."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Scaled(nn.Linear):
    """Computes fc times 0.125, which keeps the logits small in the first steps with a high learning rate."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 0.125


def units(model: Model, widths: dict[str, int], first_stride: int = 1) -> Chain:
    """Return units of a 3x3 convolution without bias, BatchNorm and ReLU, by name and width; `residual...`: two with a shortcut; `max...`: 2x2
    max pooling. Then the maximum over the map, and fc without biases, times 0.125. Weights start as torch draws them, scales at one."""
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
    """Return ResNet-9 of cifar10-fast. Maps for an image of 32x32: 32x32 up to layer1, then 16x16, 8x8 and 4x4.
    6,573,120 parameters with 3 channels and 10 classes. The published network ends with a 4x4 maximum, which for 32
    pixels is the maximum over the map. Source: davidcpage/cifar10-fast: dawn.py."""
    widths = {"prep": 64, "layer1": 128, "max1": 2, "residual1": 128, "layer2": 256, "max2": 2}
    return units(model, widths | {"layer3": 512, "max3": 2, "residual3": 512})


def alexnet_bn(model: Model) -> Chain:
    """Return an AlexNet with BatchNorm. Maps for an image of 32x32: 8x8 after max0, then 4x4 and 2x2. 2,255,296
    parameters with 3 channels and 10 classes. The published network ends with a 2x2 maximum, which for 32 pixels is the
    maximum over the map. Source: sands-lab/layer-wise-aaai20: CIFAR10/dawn.py, where it is called `alexnet`."""
    widths = {"prep": 64, "max0": 2, "layer1": 192, "max1": 2, "layer2": 384, "layer3": 256, "layer4": 256, "max4": 2}
    return units(model, widths, first_stride=2)


class Block(nn.Module):
    """Computes relu(bn(conv(relu(bn(conv(x))))) + shortcut(x)), 3x3; the shortcut is a strided 1x1 if the shape
    changes. The last scale starts at zero, so that a block starts as its shortcut."""

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

    10.3 M multiply-adds and 312 k parameters with 1 channel and 10 classes. Two choices suit small centred pictures and few epochs: pooling
    before the first BatchNorm makes that four times as cheap, and the mean keeps a map of 2x2, which tells fc where a feature is.
    Convolutions start from normal(0, sqrt(2 / fan_out)), fc from normal(0, 0.01).
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
    """Computes conv(relu(bn(conv(relu(bn(x)))))) + x, 3x3. If the shape changes, a strided 1x1 of relu(bn(x)) replaces x."""

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
    """Return `wrn_DEPTH_WIDTH`, with n = (DEPTH - 4) / 6 blocks in a group:

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


class Branches(Chain):
    """Layers in parallel on the same map, with their channels concatenated."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([layer(x) for layer in self], 1)


def halving_max() -> nn.Module:
    """Return 3x3 max pooling with stride 2, with the output size of a strided convolution. The first window starts at
    pixel 0 and the last one extends over the edge, as in MXNet's pooling of 2015. (Later versions of these networks pad
    by 1 and round down, which moves all windows by a pixel.)"""
    return nn.Sequential(nn.ConstantPad2d((0, 2, 0, 2), -torch.inf), nn.MaxPool2d(3, 2))


def thinned(
    model: Model, width_in: int, thin: int, width: int, *, double: bool = False, stride: int = 1
) -> nn.Sequential:
    """Return a 1x1 unit that reduces the channels, and one 3x3 unit, or two if `double`; the last one has the `stride`."""
    units = [conv_unit(model, width_in, thin, 1, bias=True)]
    if double:
        units.append(conv_unit(model, thin, width, 3, bias=True))
    units.append(conv_unit(model, width if double else thin, width, 3, stride=stride, bias=True))
    return nn.Sequential(*units)


def block(model: Model, width_in: int, widths: tuple[int, ...], pool: str) -> tuple[Branches, int]:
    """Return a block, and its number of channels. `pool`: of the pooling branch, `max` or `avg`."""
    unit, thin = partial(conv_unit, model, width_in, bias=True), partial(thinned, model, width_in)
    match widths:
        case width1, width3:
            return Branches(conv1x1=unit(width1, 1), conv3x3=unit(width3, 3)), width1 + width3
        case (width,):
            return Branches(conv3x3=unit(width, 3, stride=2), max=halving_max()), width + width_in
        case thin3, width3, thin33, width33:
            conv3x3, double3x3 = thin(thin3, width3, stride=2), thin(thin33, width33, double=True, stride=2)
            return Branches(conv3x3=conv3x3, double3x3=double3x3, max=halving_max()), width3 + width33 + width_in
    width1, thin3, width3, thin33, width33, projected = widths
    conv1x1, conv3x3, double3x3 = unit(width1, 1), thin(thin3, width3), thin(thin33, width33, double=True)
    # A mean at the edge counts the zeros around the map, as in MXNet.
    pooling = nn.MaxPool2d(3, 1, 1) if pool == "max" else nn.AvgPool2d(3, 1, 1)
    projection = Chain(pool=pooling, **dict(unit(projected, 1).named_children()))
    branches = Branches(conv1x1=conv1x1, conv3x3=conv3x3, double3x3=double3x3, projection=projection)
    return branches, width1 + width3 + width33 + projected


def inception(
    model: Model, first: dict[str, nn.Module], width: int, blocks: Mapping[str, tuple[int, ...]], limit: float
) -> Chain:
    """Return `first`, blocks, the mean over the map, fc. Weights start uniformly from -limit to limit, biases at zero, scales at one: MXNet's
    Uniform(limit)."""
    layers = dict(first)
    for name, widths in blocks.items():
        layers[name], width = block(model, width, widths, "max" if name == "in5b" else "avg")
    fc = nn.Linear(width, model.num_classes)
    net = Chain(**layers, mean=nn.AdaptiveAvgPool2d(1), flat=nn.Flatten(), fc=fc)
    uniform = partial(fill, filler=Filler(type="uniform", min=-limit, max=limit))
    start(net, uniform, uniform)
    return net


# Blocks are rows of widths: of (1x1, 3x3); of (3x3,), which halves the map; of (1x1, 3x3 thinned, 3x3, double 3x3 thinned, double 3x3, after the
# pooling); and of (3x3 thinned, 3x3, double 3x3 thinned, double 3x3), which halves it. `thinned` is a 1x1 before the 3x3.
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
    """Return units of a convolution with bias, BatchNorm and ReLU: 3x3 with 96 channels, BLOCKS_28, the mean over the
    map, fc. Maps of 28x28 up to in3b, 14x14 up to in4d, 7x7 at the end. 1,652,826 parameters with 3 channels and 10
    classes. Weights start uniformly from -0.07 to 0.07. The published network ends with a 7x7 mean, which for 28 pixels
    is the mean over the map. Source: apache/mxnet: example/distributed-training/{cifar10,train_cifar10}.py of November
    2015."""
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
    """Return units of a convolution with bias, BatchNorm and ReLU:

                                                   output for 224x224x3
        conv1          7x7/2 64, 3x3/2 max         56x56x64
        conv2          1x1 64, 3x3 192, 3x3/2 max  28x28x192
        in3a to in3c   BLOCKS                      14x14x576
        in4a to in4e                               7x7x1024
        in5a, in5b                                 7x7x1024
        mean over the map, fc

    The pooling branch of a block is a mean, in in5b a maximum. 11,295,240 parameters with 3 channels and 1000 classes. Weights start uniformly
    from -0.01 to 0.01. The published network ends with a 7x7 mean, which for 224 pixels is the mean over the map. Source: apache/mxnet:
    example/distributed-training/{imagenet,train_imagenet}.py of November 2015, after arXiv:1502.03167.
    """
    first = {
        "conv1": conv_unit(model, model.channels, 64, 7, stride=2, bias=True),
        "max1": halving_max(),
        "conv2": thinned(model, 64, 64, 192),
        "max2": halving_max(),
    }
    return inception(model, first, 192, BLOCKS, 0.01)
