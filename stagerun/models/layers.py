"""What networks are built from: BatchNorm whose statistics are moved from outside, the unit of convolution, BatchNorm and ReLU, and
Caffe's fillers (caffe/filler.hpp), which draw from torch's global random state."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from stagerun.base import recipe
from stagerun.base.recipe import Filler, VarianceNorm


class KeptStatistics(_BatchNorm):
    """Normalises with the statistics of the device batch and leaves them in `batch_mean` and `batch_var`.

    `batch_mean` [features] and `batch_var` [features] (unbiased, with m/(m-1), as Caffe) are those of the last forward pass
    in training; `running_mean` and `running_var` do not move here, because they follow the mean over all logical
    workers, known only after the reduction. `moving_average_fraction` is Caffe's; `moving_average_passes` is how often they move in an
    iteration, 0 once for each of its device batches.
    """

    moving_average_fraction: float
    moving_average_passes = 1
    batch_mean: Tensor
    batch_var: Tensor
    # torch declares these optional, for layers that keep no statistics; ours always does.
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
        # Momentum 1 makes torch write the batch's own statistics over the buffers, at no cost beyond the pass itself.
        return F.batch_norm(x, self.batch_mean, self.batch_var, self.weight, self.bias, True, 1.0, self.eps)


class BatchNorm2d(KeptStatistics, nn.BatchNorm2d):
    """That of stagerun's own networks."""

    def __init__(self, features: int, moving_average_fraction: float | None = None, eps: float | None = None) -> None:
        super().__init__(features, eps=1e-5 if eps is None else eps, momentum=None)
        self.moving_average_fraction = 0.9 if moving_average_fraction is None else moving_average_fraction
        self.register_buffer("batch_mean", torch.zeros(features), persistent=False)
        self.register_buffer("batch_var", torch.zeros(features), persistent=False)


class _BatchNorm1d(KeptStatistics, nn.BatchNorm1d):
    pass


class _BatchNorm3d(KeptStatistics, nn.BatchNorm3d):
    pass


_OURS: dict[type, type] = {nn.BatchNorm1d: _BatchNorm1d, nn.BatchNorm2d: BatchNorm2d, nn.BatchNorm3d: _BatchNorm3d}
_STATISTICS = (("running_mean", "batch_mean"), ("running_var", "batch_var"))


def norms(model: nn.Module) -> list[KeptStatistics]:
    """The layers whose statistics are moved from outside."""
    return [m for m in model.modules() if "batch_mean" in m._buffers]  # type: ignore[misc]


def keep_statistics(layer: _BatchNorm, fraction: float | None) -> None:
    """From now on a BatchNorm of someone else's leaves its statistics as ours do. `fraction` None: as its own momentum says, None of which
    is the plain mean of all iterations.

    torch's own become ours. Of a class with a forward of its own that forward stays: it finds buffers for the batch where it looks
    for running ones, and a momentum of 1.
    """
    if "batch_mean" in layer._buffers:  # one of stagerun's
        return
    own = 1.0 if layer.momentum is None else 1 - layer.momentum
    layer.moving_average_fraction = own if fraction is None else fraction  # type: ignore[assignment]
    layer.moving_average_passes = 1  # type: ignore[assignment]
    for running, batch in _STATISTICS:
        layer.register_buffer(batch, torch.zeros_like(getattr(layer, running)), persistent=False)
    if (ours := _OURS.get(type(layer))) is not None:
        layer.__class__ = ours
        return
    layer.register_forward_pre_hook(_swap)
    layer.register_forward_hook(_swap_back, always_call=True)


def _swap(layer: nn.Module, inputs: object) -> None:
    if layer.training:
        buffers = layer._buffers
        counter = buffers["num_batches_tracked"]
        layer.__dict__["_own"] = layer.momentum, counter, [buffers[batch] for _, batch in _STATISTICS]
        layer.momentum = 1.0  # type: ignore[assignment]
        buffers["num_batches_tracked"] = None if counter is None else counter.clone()
        for running, batch in _STATISTICS:
            buffers[running], buffers[batch] = buffers[batch], buffers[running]


@torch.no_grad()
def _swap_back(layer: nn.Module, inputs: object, output: object) -> None:
    if (own := layer.__dict__.pop("_own", None)) is not None:
        buffers = layer._buffers
        layer.momentum, buffers["num_batches_tracked"], batches = own
        for (running, batch), kept in zip(_STATISTICS, batches, strict=True):
            if (found := buffers[running]) is not kept:  # the layer assigns its statistics, in place of changing them
                kept.copy_(found)
            buffers[running], buffers[batch] = buffers[batch], kept


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
