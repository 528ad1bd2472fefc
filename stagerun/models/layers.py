"""Parts of networks: BatchNorm whose statistics are moved from outside, the unit of convolution, BatchNorm and ReLU, and Caffe's fillers
(caffe/filler.hpp), which draw from torch's global random state."""

import math
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from stagerun.base.recipe import Filler, Model, VarianceNorm


class KeptStatistics(_BatchNorm):
    """BatchNorm with the statistics of the device batch, left in `batch_mean` and `batch_var` (unbiased, with m/(m-1),
    as in Caffe). `running_mean` and `running_var` do not move here: after the reduction, the engine moves them by the
    mean over all logical workers and Caffe's `moving_average_fraction`, `moving_average_passes` times in an iteration
    (0: once for each of its device batches)."""

    moving_average_fraction: float
    moving_average_passes = 1
    batch_mean: Tensor
    batch_var: Tensor
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
        # Momentum 1 makes torch overwrite the buffers with the batch's statistics, at no extra cost.
        return F.batch_norm(x, self.batch_mean, self.batch_var, self.weight, self.bias, True, 1.0, self.eps)


class BatchNorm2d(KeptStatistics, nn.BatchNorm2d):
    """BatchNorm of stagerun's networks."""

    def __init__(self, features: int, moving_average_fraction: float | None = None, eps: float | None = None) -> None:
        super().__init__(features, eps=1e-5 if eps is None else eps, momentum=None)
        keep_statistics(self, 0.9 if moving_average_fraction is None else moving_average_fraction)


class _BatchNorm1d(KeptStatistics, nn.BatchNorm1d):
    pass


class _BatchNorm3d(KeptStatistics, nn.BatchNorm3d):
    pass


_OURS: dict[type, type] = {nn.BatchNorm1d: _BatchNorm1d, nn.BatchNorm2d: BatchNorm2d, nn.BatchNorm3d: _BatchNorm3d}
_STATISTICS = (("running_mean", "batch_mean"), ("running_var", "batch_var"))


def norms(model: nn.Module) -> list[KeptStatistics]:
    """Return the layers whose statistics are moved from outside."""
    return [m for m in model.modules() if "batch_mean" in m._buffers]  # type: ignore[misc]


def keep_statistics(layer: _BatchNorm, fraction: float | None) -> None:
    """Make a BatchNorm leave its statistics in buffers as KeptStatistics does. `fraction` None: by the layer's momentum. torch's classes become
    stagerun's; a class with another forward keeps it, with the batch's buffers in place of the running ones, and a momentum of 1."""
    if "batch_mean" in layer._buffers:  # already done
        return
    by_momentum = 1.0 if layer.momentum is None else 1 - layer.momentum
    layer.moving_average_fraction = by_momentum if fraction is None else fraction  # type: ignore[assignment]
    for running, batch in _STATISTICS:
        layer.register_buffer(batch, torch.zeros_like(getattr(layer, running)), persistent=False)
    if (ours := _OURS.get(type(layer))) is not None:
        layer.__class__ = ours
    elif not isinstance(layer, KeptStatistics):
        layer.__dict__ |= {"forward": partial(_forward, layer, layer.forward), "moving_average_passes": 1}


def _forward(layer: _BatchNorm, forward: Callable[..., Any], *args: Any) -> Any:
    if not layer.training:
        return forward(*args)
    buffers: dict[str, Any] = layer._buffers
    before, momentum, counter = dict(buffers), layer.momentum, layer.num_batches_tracked
    buffers["num_batches_tracked"] = None if counter is None else counter.clone()
    buffers |= {running: buffers[batch] for running, batch in _STATISTICS}
    layer.momentum = 1.0
    try:
        return forward(*args)
    finally:
        for running, batch in _STATISTICS:
            if buffers[running] is not before[batch]:  # the layer assigned its statistics, instead of changing them
                before[batch].copy_(buffers[running].detach())
        layer.momentum = momentum
        buffers.update(before)


def batch_norm(model: Model, width: int) -> BatchNorm2d:
    return BatchNorm2d(width, model.moving_average_fraction, model.eps)


class Chain(nn.Sequential):
    """A sequence of layers by name, which prefixes the names of parameters."""

    def __init__(self, **layers: nn.Module) -> None:
        super().__init__(OrderedDict(layers))


def conv(width_in: int, width: int, kernel: int, stride: int = 1, bias: bool = False) -> nn.Conv2d:
    """Return a convolution, padded so that a stride of 1 keeps the map's size and a stride of 2 gives half, rounded up."""
    return nn.Conv2d(width_in, width, kernel, stride, kernel // 2, bias=bias)


def conv_unit(model: Model, width_in: int, width: int, kernel: int, stride: int = 1, bias: bool = False) -> Chain:
    """Return relu(bn(conv(x)))."""
    return Chain(
        conv=conv(width_in, width, kernel, stride, bias), bn=batch_norm(model, width), relu=nn.ReLU(inplace=True)
    )


FAN_OUT = partial(nn.init.kaiming_normal_, mode="fan_out", nonlinearity="relu")
Start = Callable[[Tensor], object]


def start(net: nn.Module, conv: Start, fc: Start | None = None) -> None:
    """Fill weights of convolutions and linear layers by these rules, in the order of the layers; fc None: unchanged. Biases start at zero."""
    for layer in net.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            if rule := conv if isinstance(layer, nn.Conv2d) else fc:
                rule(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def fan(shape: torch.Size, norm: VarianceNorm) -> float:
    """Return n of `xavier` and `msra` for a weight [outputs, inputs / groups, ...] or a bias [outputs]. As in Caffe:
    FAN_IN is the size over the first dimension, FAN_OUT over the second (for a bias the whole size)."""
    inputs = shape.numel() / shape[0]
    outputs = shape.numel() / (shape[1] if len(shape) > 1 else 1)
    return {
        VarianceNorm.FAN_IN: inputs,
        VarianceNorm.FAN_OUT: outputs,
        VarianceNorm.AVERAGE: (inputs + outputs) / 2,
    }[norm]


def _xavier(tensor: Tensor, filler: Filler) -> None:
    """Fill uniformly with variance 1 / n."""
    limit = math.sqrt(3 / fan(tensor.shape, filler.variance_norm))
    tensor.uniform_(-limit, limit)


FILLERS: dict[str, Callable[[Tensor, Filler], Any]] = {
    "constant": lambda tensor, filler: tensor.fill_(filler.value),
    "gaussian": lambda tensor, filler: tensor.normal_(filler.mean, filler.std),
    "uniform": lambda tensor, filler: tensor.uniform_(filler.min, filler.max),
    "xavier": _xavier,
    "msra": lambda tensor, filler: tensor.normal_(0, math.sqrt(2 / fan(tensor.shape, filler.variance_norm))),
}


@torch.no_grad()
def fill(tensor: Tensor, filler: Filler) -> None:
    """Overwrite the tensor."""
    FILLERS[filler.type](tensor, filler)
