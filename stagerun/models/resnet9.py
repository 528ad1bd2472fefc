"""ResNet-9 of cifar10-fast, for images of 32 pixels."""

import torch.nn.functional as F
from torch import Tensor, nn

from stagerun import recipe
from stagerun.models.conv_unit import ConvUnit

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
