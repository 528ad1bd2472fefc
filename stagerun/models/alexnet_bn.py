"""AlexNet with BatchNorm and one linear layer, for images of 32 pixels: of a study of compressed gradients (arXiv:1911.08250)."""

import torch.nn.functional as F
from torch import Tensor, nn

from stagerun import recipe
from stagerun.models.conv_unit import ConvUnit
from stagerun.models.resnet9 import LOGIT_SCALE


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
