"""What each layer of Caffe's computes, forward and, by autograd, backward: one function a layer, and one row of `FUNCTIONS`. Its losses.

A function gets the layer's settings, its bottoms and its blobs, and answers with its tops. Images are axis 0. Sources:
BVLC/caffe, src/caffe/layers. Where Caffe's own gradient is wrong, since a later layer has overwritten in place what it reads, that of here
is right.
"""

from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from stagerun.caffe import layers, map_layers
from stagerun.caffe.layers import LRN, SoftmaxWithLoss
from stagerun.caffe.reading import text


class WrongSize(Exception):
    """Images of this size don't fit the layer: how it says so."""


def _convolution(s: map_layers.Convolution, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if s.transposed:
        return F.conv_transpose2d(x, weight, bias, s.stride, s.pad, groups=s.group, dilation=s.dilation)
    return F.conv2d(x, weight, bias, s.stride, s.pad, s.dilation, s.group)


def _inner_product(s: layers.InnerProduct, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    weight = weight.t() if s.transpose else weight
    flat = x.flatten(s.axis)
    if flat.shape[-1] != weight.shape[1]:
        raise WrongSize(f"takes {weight.shape[1]} numbers of an image, and gets {text(tuple(x.shape[1:]))}")
    return F.linear(flat, weight, bias)


def _pooling(s: map_layers.Pooling, x: Tensor) -> Tensor:
    """The first of equal numbers is the largest. A mean is over the window with its padding, but for what lies beyond that."""
    largest = s.method == "MAX"
    if s.kernel is None:
        return F.max_pool2d(x, (x.shape[2], x.shape[3])) if largest else x.mean((2, 3), keepdim=True)
    pool = F.max_pool2d if largest else F.avg_pool2d
    return pool(x, s.kernel, s.stride, s.pad, ceil_mode=s.ceil)


def _lrn(s: LRN, x: Tensor) -> Tensor:
    """x * d ** -beta, with d = k + alpha / n * the sum of the squares of n channels around each; in bfloat16 computed in float32. Within a
    channel d = 1 + alpha * the mean of the squares in a square of the map."""
    if s.within:
        squares = F.avg_pool2d(x * x, s.local_size, 1, s.local_size // 2)
        return x * (1 + s.alpha * squares) ** -s.beta
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    y: Tensor = _AcrossChannels.apply(wide, s)
    return y.to(x.dtype)


class _AcrossChannels(torch.autograd.Function):
    """With a backward pass of its own: autograd's needs three times the memory, and torch's local_response_norm pools in three dimensions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, s: LRN) -> Tensor:
        d = _window_sum(x * x, s.local_size).mul_(s.alpha / s.local_size).add_(s.k)
        if s.beta == 0.75:  # as in most nets; roots take a fifth of the time
            root = d.rsqrt()
            factor = root.sqrt().mul_(root)
        else:
            factor = d**-s.beta
        ctx.save_for_backward(x, d, factor)
        ctx.settings = s
        return x * factor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (x, d, factor), s = ctx.saved_tensors, ctx.settings
        direct = g * factor
        around = _window_sum((direct * x).div_(d), s.local_size)
        return torch.addcmul(direct, x, around, value=-(2 * s.alpha * s.beta / s.local_size)), None


def _window_sum(x: Tensor, size: int) -> Tensor:
    """Over `size` channels around each, as far as there are so many."""
    total = x.clone()
    for away in range(1, min(size // 2, x.shape[1] - 1) + 1):
        total[:, away:] += x[:, :-away]
        total[:, :-away] += x[:, away:]
    return total


def _scale(s: layers.Scale, x: Tensor, factor: Tensor, bias: Tensor | None = None) -> Tensor:
    factor = _along(factor, x, s.axis)
    return x * factor if bias is None else torch.addcmul(_along(bias, x, s.axis), x, factor)


def _along(values: Tensor, maps: Tensor, axis: int) -> Tensor:
    """`values` as long as `maps`, beginning at its `axis`."""
    return values.reshape(*values.shape, *[1] * (maps.ndim - axis - values.ndim))


def _power(s: layers.Power, x: Tensor) -> Tensor:
    if s.power * s.scale == 0:  # a constant, without a gradient
        return x * 0 + (s.shift**s.power if s.power else 1.0)
    scaled = x if (s.scale, s.shift) == (1, 0) else s.scale * x + s.shift
    return scaled if s.power == 1 else scaled**s.power


def _slice(s: map_layers.Slice, x: Tensor) -> tuple[Tensor, ...]:
    size = x.shape[s.axis]
    if (s.points and s.points[-1] >= size) or (not s.points and size % s.parts):
        where = f"at {', '.join(map(str, s.points))}" if s.points else f"into {s.parts} of the same size"
        raise WrongSize(f"cuts axis {s.axis} {where}, and its bottom has {size} there")
    return x.tensor_split(s.points, s.axis) if s.points else x.split(size // s.parts, s.axis)


def _eltwise(s: map_layers.Eltwise, *x: Tensor) -> Tensor:
    """The gradient goes to the second of two equal bottoms; later ones must be larger."""
    if s.operation == "PROD":
        return reduce(torch.mul, x)
    if s.operation == "MAX":
        first = torch.where(x[0] > x[1], x[0], x[1])
        return reduce(lambda most, other: torch.where(other > most, other, most), x[2:], first)
    coeff = s.coeff or (1.0,) * len(x)
    total = x[0] if coeff[0] == 1 else coeff[0] * x[0]
    for other, factor in zip(x[1:], coeff[1:], strict=True):
        total = torch.add(total, other, alpha=factor)
    return total


def _reshape(s: map_layers.Reshape, x: Tensor) -> Tensor:
    sizes = (size or x.shape[i] for i, size in enumerate(s.sizes, s.axis))
    return x.reshape(*x.shape[: s.axis], *sizes, *x.shape[x.ndim - s.behind :])


# By settings; BatchNorm, which has a state, is in `network`, and layers that compute nothing in `steps`. Dropout in training divides what is
# kept by its share, with torch's random numbers, which the engine seeds for each device batch.
FUNCTIONS: Mapping[type, Callable[..., Tensor | tuple[Tensor, ...]]] = {
    map_layers.Convolution: _convolution,
    map_layers.Pooling: _pooling,
    map_layers.Concat: lambda s, *x: torch.cat(x, s.axis),
    map_layers.Slice: _slice,
    map_layers.Eltwise: _eltwise,
    map_layers.Reshape: _reshape,
    layers.InnerProduct: _inner_product,
    layers.LRN: _lrn,
    layers.Scale: _scale,
    layers.Bias: lambda s, x, values: x + _along(values, x, s.axis),
    layers.ReLU: lambda s, x: F.leaky_relu(x, s.negative_slope) if s.negative_slope else F.relu(x),
    layers.PReLU: lambda s, x, slope: F.prelu(x, slope.reshape(-1)),
    layers.ELU: lambda s, x: F.elu(x, s.alpha),
    layers.Sigmoid: lambda s, x: x.sigmoid(),
    layers.TanH: lambda s, x: x.tanh(),
    layers.Power: _power,
    layers.Dropout: lambda s, x: F.dropout(x, s.ratio),
    layers.Softmax: lambda s, x: x.softmax(s.axis),
    # A loss's second top, where another layer takes it; the loss itself is no map.
    layers.SoftmaxWithLoss: lambda s, x: (x.new_zeros(()), x.softmax(1)),
}


# -- losses


def loss_of(
    s: SoftmaxWithLoss, logits: Tensor, labels: Tensor, smoothing: float, class_weight: Tensor | None = None
) -> Tensor:
    """SoftmaxWithLoss, as Caffe normalises it, without its `loss_weight`. `smoothing` is the stage's, and counts before the layer's own. An
    image of `ignore_label` counts for nothing. What divides the sum is at least 1."""
    ignored = -100 if s.ignore_label is None else s.ignore_label  # torch's own: none
    smoothed = smoothing or s.label_smoothing
    each = F.cross_entropy(logits, labels, reduction="none", ignore_index=ignored, label_smoothing=smoothed)
    if class_weight is not None:
        each = each * class_weight.index_select(0, labels.clamp(0, logits.shape[1] - 1))
    if s.normalization == "VALID" and s.ignore_label is not None:
        return each.sum() / (labels != s.ignore_label).sum().clamp(min=1)
    fixed = {"NONE": 1.0, "PRE_FIXED": max(1.0, s.pre_fixed_normalizer)}
    return each.sum() / fixed.get(s.normalization, float(len(labels)))
