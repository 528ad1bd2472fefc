"""The unit that several networks are built from: convolution, BatchNorm, ReLU."""

import torch.nn.functional as F
from torch import Tensor, nn

from stagerun import recipe
from stagerun.models.batch_norm import BatchNorm2d


class ConvUnit(nn.Module):
    """relu(bn(conv(x))); an odd kernel, padded so that a step of 1 keeps the map's size and a step of 2 gives half, rounded up."""

    def __init__(
        self, model: recipe.Model, width_in: int, width: int, kernel: int, *, stride: int = 1, bias: bool = False
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width_in, width, kernel, stride, kernel // 2, bias=bias)
        self.bn = BatchNorm2d(width, model.moving_average_fraction, model.eps)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)), inplace=True)
