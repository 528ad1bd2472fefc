"""What the layers of a net hold: their parameters, and running statistics."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stagerun.models.layers import KeptStatistics


class Blobs(nn.Module):
    """Holds the parameters of a layer. `scales_norm`: it is the Scale after a BatchNorm."""

    scales_norm = False


class Statistics(KeptStatistics):
    """Those of a BatchNorm layer, and Intel's blobs where it has any. They begin at zero, as Caffe's do. `moving_average_passes` 0: every
    device batch is a pass."""

    moving_average_passes = 0

    def __init__(self, features: int, fraction: float) -> None:
        super().__init__(features, momentum=None, affine=False)
        self.moving_average_fraction = fraction
        self.running_var.zero_()
        self.register_buffer("batch_mean", torch.zeros(features), persistent=False)
        self.register_buffer("batch_var", torch.zeros(features), persistent=False)

    def normalised(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, keep: bool) -> Tensor:
        """By the statistics of the batch, which are kept if `keep`."""
        if (
            x.numel() == x.shape[1]
        ):  # a single number per channel, which torch refuses: its variance is 0, and has no correction
            if keep:
                self.batch_mean.copy_(x.detach().flatten())
                self.batch_var.zero_()
            zero = (x - x).transpose(1, -1)
            zero = zero if weight is None else zero * weight
            return (zero if bias is None else zero + bias).transpose(1, -1)
        if keep:
            return F.batch_norm(x, self.batch_mean, self.batch_var, weight, bias, True, 1.0, eps)
        return F.batch_norm(x, None, None, weight, bias, True, 0.0, eps)

    def normalised_globally(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, weight, bias, False, 0.0, eps)
