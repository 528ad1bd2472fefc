"""What the layers of a net hold: parameters, with what Caffe's fillers draw for them besides those of `models.layers`, and running
statistics."""

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stagerun.base.net import Filler
from stagerun.models import layers
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


# -- fillers draw from torch's global random state


def _gaussian(tensor: Tensor, filler: Filler) -> None:
    """With `sparse` an output keeps each of its weights with probability sparse / outputs, as Caffe computes it."""
    layers.FILLERS["gaussian"](tensor, filler)
    if filler.sparse >= 0:
        tensor.mul_(torch.empty_like(tensor).bernoulli_(min(filler.sparse / tensor.shape[0], 1.0)))


def _positive_unitball(tensor: Tensor, filler: Filler) -> None:
    """Positive numbers, whose sum is 1 for each output."""
    rows = tensor.uniform_(0, 1).view(tensor.shape[0], -1)
    rows.div_(rows.sum(1, keepdim=True))


def _bilinear(tensor: Tensor, filler: Filler) -> None:
    """Interpolation, by which a Deconvolution enlarges: the same square of weights for all maps."""
    width = tensor.shape[-1]
    half = math.ceil(width / 2)
    near = 1 - (torch.arange(width, dtype=tensor.dtype) / half - (width - 1) / (2 * half)).abs()
    tensor.copy_((near[:, None] * near).expand_as(tensor))


FILLERS: Mapping[str, Callable[[Tensor, Filler], None]] = {
    **layers.FILLERS,
    "gaussian": _gaussian,
    "positive_unitball": _positive_unitball,
    "bilinear": _bilinear,
}


@torch.no_grad()
def fill(tensor: Tensor, filler: Filler) -> None:
    """Overwrites the tensor. Fans are counted from a blob's own shape, as Caffe does: also of a Deconvolution, whose first axis has the
    inputs, and of a transposed InnerProduct."""
    FILLERS[filler.type](tensor.view(1) if tensor.ndim == 0 else tensor, filler)
