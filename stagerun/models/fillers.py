"""Caffe's fillers: how a weight starts (caffe/filler.hpp). Drawn from torch's global random state."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from stagerun.recipe import Filler, VarianceNorm


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
