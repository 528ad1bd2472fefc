"""A small ResNet for images of 28 or 32 pixels, sized to train in minutes on a few cores."""

import torch.nn.functional as F
from torch import Tensor, nn

from stagerun import recipe
from stagerun.models.batch_norm import BatchNorm2d


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
