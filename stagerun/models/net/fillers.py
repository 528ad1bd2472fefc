"""What Caffe's fillers draw besides those of `models.layers`, from torch's global random state."""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from stagerun.base.net import Filler
from stagerun.models import layers


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
