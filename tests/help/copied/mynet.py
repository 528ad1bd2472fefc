"""stagerun's own `resnet_small` again, line by line, as a file of a user's."""

import torch.nn.functional as F
from blocks import Block
from torch import Tensor, nn


class ResNetSmall(nn.Module):
    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 32, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(32)
        self.layer1 = Block(32, 32, 1)
        self.layer2 = Block(32, 64, 2)
        self.layer3 = Block(64, 128, 2)
        self.fc = nn.Linear(128 * 2 * 2, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        nn.init.normal_(self.fc.weight, std=0.01)
        nn.init.zeros_(self.fc.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(F.max_pool2d(self.conv1(x), 2)), inplace=True)
        x = F.adaptive_avg_pool2d(self.layer3(self.layer2(self.layer1(x))), 2)
        return self.fc(x.flatten(1))


def build(num_classes: int, channels: int) -> nn.Module:
    return ResNetSmall(channels, num_classes)
