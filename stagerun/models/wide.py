"""Wide ResNets for images of 32 pixels: Zagoruyko and Komodakis, Wide Residual Networks, 2016 (arXiv:1605.07146)."""

import torch.nn.functional as F
from torch import Tensor, nn

from stagerun.base import recipe
from stagerun.models.layers import BatchNorm2d


class WideBlock(nn.Module):
    """conv(relu(bn(conv(relu(bn(x)))))) + x, 3x3. Where the shape changes a strided 1x1 of relu(bn(x)) takes the place of x."""

    def __init__(self, model: recipe.Model, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.bn1 = _batch_norm(model, width_in)
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.bn2 = _batch_norm(model, width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.shortcut = nn.Conv2d(width_in, width, 1, stride, bias=False) if width_in != width else None

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(x), inplace=True)
        x = x if self.shortcut is None else self.shortcut(y)
        return self.conv2(F.relu(self.bn2(self.conv1(y)), inplace=True)) + x


class WideResNet(nn.Module):
    """WRN-DEPTH-WIDTH of the paper, with n = (DEPTH - 4) / 6 blocks in a group:

                                            output for 32x32x3
        conv1    3x3, 16                    32x32x16
        layer1   n blocks, 16 WIDTH         32x32x160 of WRN-28-10
        layer2   n blocks, 32 WIDTH, /2     16x16x320
        layer3   n blocks, 64 WIDTH, /2     8x8x640
        BN, ReLU, mean over the map, fc

    Parameters with 3 channels and 10 classes: 8,949,210 (40-4), 10,961,370 (16-8) and 36,479,194 (28-10). Without dropout. As in the authors'
    code (szagoruyko/wide-residual-networks) convolutions start from normal(0, sqrt(2 / fan_out)), scales at one, the biases of fc at zero.
    """

    def __init__(self, model: recipe.Model, depth: int, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(model.channels, 16, 3, 1, 1, bias=False)
        widths = [16, 16 * width, 32 * width, 64 * width]
        blocks = (depth - 4) // 6
        self.layer1 = _group(model, widths[0], widths[1], blocks, 1)
        self.layer2 = _group(model, widths[1], widths[2], blocks, 2)
        self.layer3 = _group(model, widths[2], widths[3], blocks, 2)
        self.bn = _batch_norm(model, widths[3])
        self.fc = nn.Linear(widths[3], model.num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(self.fc.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(self.conv1(x))))
        x = F.relu(self.bn(x), inplace=True)
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


def wide_resnet(model: recipe.Model) -> WideResNet:
    """The one that the model's name says: `wrn_28_10`."""
    _, depth, width = model.name.split("_")
    return WideResNet(model, int(depth), int(width))


def _group(model: recipe.Model, width_in: int, width: int, blocks: int, stride: int) -> nn.Sequential:
    first = WideBlock(model, width_in, width, stride)
    return nn.Sequential(first, *(WideBlock(model, width, width, 1) for _ in range(blocks - 1)))


def _batch_norm(model: recipe.Model, width: int) -> BatchNorm2d:
    return BatchNorm2d(width, model.moving_average_fraction, model.eps)
