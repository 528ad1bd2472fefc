"""What networks are built from: BatchNorm whose statistics are moved from outside, the unit of convolution, BatchNorm and ReLU, and
Caffe's fillers (caffe/filler.hpp), which draw from torch's global random state."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stagerun.base import recipe
from stagerun.base.recipe import Filler, VarianceNorm


class BatchNorm2d(nn.BatchNorm2d):
    """Normalises with the statistics of the device batch and leaves them in `batch_mean` and `batch_var`.

    `batch_mean` [features] and `batch_var` [features] (unbiased, with m/(m-1), as Caffe) are those of the last forward pass
    in training; `running_mean` and `running_var` do not move here, because they follow the mean over all logical
    workers, known only after the reduction. `moving_average_fraction` is Caffe's.
    """

    batch_mean: Tensor
    batch_var: Tensor
    # torch declares these optional, for layers that keep no statistics; ours always does.
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, features: int, moving_average_fraction: float | None = None, eps: float | None = None) -> None:
        super().__init__(features, eps=1e-5 if eps is None else eps, momentum=None)
        self.moving_average_fraction = 0.9 if moving_average_fraction is None else moving_average_fraction
        self.register_buffer("batch_mean", torch.zeros(features), persistent=False)
        self.register_buffer("batch_var", torch.zeros(features), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
        # Momentum 1 makes torch write the batch's own statistics over the buffers, at no cost beyond the pass itself.
        return F.batch_norm(x, self.batch_mean, self.batch_var, self.weight, self.bias, True, 1.0, self.eps)


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


def fan(shape: torch.Size, norm: VarianceNorm) -> float:
    """n of `xavier` and `msra` for a weight [outputs, inputs / groups, ...] or a bias [outputs].

    As Caffe counts: FAN_IN is the size over the first dimension, FAN_OUT over the second (of a bias: all of it).
    """
    inputs = shape.numel() / shape[0]
    outputs = shape.numel() / (shape[1] if len(shape) > 1 else 1)
    return {
        VarianceNorm.FAN_IN: inputs,
        VarianceNorm.FAN_OUT: outputs,
        VarianceNorm.AVERAGE: (inputs + outputs) / 2,
    }[norm]


def _constant(tensor: Tensor, filler: Filler) -> None:
    tensor.fill_(filler.value)


def _gaussian(tensor: Tensor, filler: Filler) -> None:
    tensor.normal_(filler.mean, filler.std)


def _uniform(tensor: Tensor, filler: Filler) -> None:
    tensor.uniform_(filler.min, filler.max)


def _xavier(tensor: Tensor, filler: Filler) -> None:
    """Uniform with variance 1 / n."""
    limit = math.sqrt(3 / fan(tensor.shape, filler.variance_norm))
    tensor.uniform_(-limit, limit)


def _msra(tensor: Tensor, filler: Filler) -> None:
    """Gaussian with variance 2 / n."""
    tensor.normal_(0, math.sqrt(2 / fan(tensor.shape, filler.variance_norm)))


FILLERS: dict[str, Callable[[Tensor, Filler], None]] = {
    "constant": _constant,
    "gaussian": _gaussian,
    "uniform": _uniform,
    "xavier": _xavier,
    "msra": _msra,
}


@torch.no_grad()
def fill(tensor: Tensor, filler: Filler) -> None:
    """Overwrites the tensor."""
    FILLERS[filler.type](tensor, filler)
