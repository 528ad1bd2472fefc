"""Networks for images of 28 or 32 pixels: ResNet-9 of cifar10-fast, an AlexNet with BatchNorm, and a small ResNet sized to train in
minutes on a few cores."""

import torch.nn.functional as F
from torch import Tensor, nn

from stagerun.base import recipe
from stagerun.models.layers import BatchNorm2d, ConvUnit

# What the logits are multiplied by, which keeps them small at the first steps of a high learning rate.
LOGIT_SCALE = 0.125


class Residual(nn.Module):
    """x + unit(unit(x)), without a ReLU after the sum."""

    def __init__(self, model: recipe.Model, width: int) -> None:
        super().__init__()
        self.res1 = ConvUnit(model, width, width, 3)
        self.res2 = ConvUnit(model, width, width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.res2(self.res1(x))


class ResNet9(nn.Module):
    """Units of a 3x3 convolution without bias, BatchNorm and ReLU:

                                        output for 32x32x3
        prep      64                    32x32x64
        layer1    128, 2x2 max          16x16x128
        residual1 128, 128              16x16x128
        layer2    256, 2x2 max          8x8x256
        layer3    512, 2x2 max          4x4x512
        residual3 512, 512              4x4x512
        max over the map, fc without biases, times 0.125

    6,573,120 parameters with 3 channels and 10 classes. Weights start as torch draws them, scales at one. The published
    network ends with a 4x4 maximum, which for 32 pixels is the one over the map. Source: davidcpage/cifar10-fast: dawn.py.
    """

    def __init__(self, model: recipe.Model) -> None:
        super().__init__()
        self.prep = ConvUnit(model, model.channels, 64, 3)
        self.layer1 = ConvUnit(model, 64, 128, 3)
        self.residual1 = Residual(model, 128)
        self.layer2 = ConvUnit(model, 128, 256, 3)
        self.layer3 = ConvUnit(model, 256, 512, 3)
        self.residual3 = Residual(model, 512)
        self.fc = nn.Linear(512, model.num_classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.residual1(F.max_pool2d(self.layer1(self.prep(x)), 2))
        x = F.max_pool2d(self.layer2(x), 2)
        x = self.residual3(F.max_pool2d(self.layer3(x), 2))
        return self.fc(F.adaptive_max_pool2d(x, 1).flatten(1)) * LOGIT_SCALE


class AlexNetBN(nn.Module):
    """Units of a 3x3 convolution without bias, BatchNorm and ReLU:

                                           output for 32x32x3
        prep      64, 3x3/2, 2x2 max       8x8x64
        layer1    192, 2x2 max             4x4x192
        layer2    384                      4x4x384
        layer3    256                      4x4x256
        layer4    256, 2x2 max             2x2x256
        max over the map, fc without biases, times 0.125

    2,255,296 parameters with 3 channels and 10 classes. Weights start as torch draws them, scales at one. The published
    network ends with a 2x2 maximum, which for 32 pixels is the one over the map. Source: sands-lab/layer-wise-aaai20:
    CIFAR10/dawn.py, where it is called `alexnet`.
    """

    def __init__(self, model: recipe.Model) -> None:
        super().__init__()
        self.prep = ConvUnit(model, model.channels, 64, 3, stride=2)
        self.layer1 = ConvUnit(model, 64, 192, 3)
        self.layer2 = ConvUnit(model, 192, 384, 3)
        self.layer3 = ConvUnit(model, 384, 256, 3)
        self.layer4 = ConvUnit(model, 256, 256, 3)
        self.fc = nn.Linear(256, model.num_classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.prep(x), 2)
        x = F.max_pool2d(self.layer1(x), 2)
        x = F.max_pool2d(self.layer4(self.layer3(self.layer2(x))), 2)
        return self.fc(F.adaptive_max_pool2d(x, 1).flatten(1)) * LOGIT_SCALE


class Block(nn.Module):
    """relu(bn(conv(relu(bn(conv(x))))) + shortcut(x)), 3x3; the shortcut is a strided 1x1 where the shape changes.

    The last scale starts at zero, so that a block starts as its shortcut.
    """

    def __init__(self, model: recipe.Model, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.bn1 = batch_norm(model, width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = batch_norm(model, width)
        self.shortcut = nn.Sequential()
        if width_in != width or stride != 1:
            self.shortcut = nn.Sequential(nn.Conv2d(width_in, width, 1, stride, bias=False), batch_norm(model, width))
        nn.init.zeros_(self.bn2.weight)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x), inplace=True)


class ResNetSmall(nn.Module):
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

    def __init__(self, model: recipe.Model) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(model.channels, 32, 3, 1, 1, bias=False)
        self.bn1 = batch_norm(model, 32)
        self.layer1 = Block(model, 32, 32, 1)
        self.layer2 = Block(model, 32, 64, 2)
        self.layer3 = Block(model, 64, 128, 2)
        self.fc = nn.Linear(128 * 2 * 2, model.num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        nn.init.normal_(self.fc.weight, std=0.01)
        nn.init.zeros_(self.fc.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(F.max_pool2d(self.conv1(x), 2)), inplace=True)
        x = F.adaptive_avg_pool2d(self.layer3(self.layer2(self.layer1(x))), 2)
        return self.fc(x.flatten(1))


def batch_norm(model: recipe.Model, width: int) -> BatchNorm2d:
    return BatchNorm2d(width, model.moving_average_fraction, model.eps)
