"""What each layer of Caffe's computes, forward and, by autograd, backward: one function a layer, and one row of `LAYERS`.

A function gets the layer's settings, the layer, its bottoms and its blobs, and answers with its tops. Images are axis 0. Sources:
BVLC/caffe, src/caffe/layers. Where Caffe's own gradient is wrong, since a later layer has overwritten in place what it reads, that of here
is right.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from stagerun.base import net
from stagerun.base.errors import UsageError
from stagerun.base.net import Layer, Method, Operation

Maps = Sequence[Tensor]
Function = Callable[[Any, Layer, Maps, Maps], Tensor | Sequence[Tensor]]
_CROP = "cut images with `crop_size` in transform_param and test_transform_param to the size that the net is for"


def _convolution(s: net.Convolution, layer: Layer, x: Maps, w: Maps) -> Tensor:
    bias = w[1] if len(w) > 1 else None
    if s.transposed:
        return F.conv_transpose2d(x[0], w[0], bias, s.stride, s.pad, groups=s.group, dilation=s.dilation)
    return F.conv2d(x[0], w[0], bias, s.stride, s.pad, s.dilation, s.group)


def _inner_product(s: net.InnerProduct, layer: Layer, x: Maps, w: Maps) -> Tensor:
    weight = w[0].t() if s.transpose else w[0]
    flat = x[0].flatten(s.axis)
    if flat.shape[-1] != weight.shape[1]:
        size = " x ".join(map(str, x[0].shape[1:]))
        raise UsageError(f"layer `{layer.name}` takes {weight.shape[1]} numbers of an image, and gets {size}", _CROP)
    return F.linear(flat, weight, w[1] if len(w) > 1 else None)


def _pooling(s: net.Pooling, layer: Layer, x: Maps, w: Maps) -> Tensor:
    """The first of equal numbers is the largest. A mean is over the window with its padding, but for what lies beyond that."""
    maps, largest = x[0], s.method is Method.MAX
    size = (maps.shape[2], maps.shape[3])
    if s.kernel is None:
        return F.max_pool2d(maps, size) if largest else maps.mean((2, 3), keepdim=True)
    pool = F.max_pool2d if largest else F.avg_pool2d
    if all(pad <= kernel // 2 for pad, kernel in zip(s.pad, s.kernel, strict=True)):
        return pool(maps, s.kernel, s.stride, s.pad, ceil_mode=s.ceil)
    # torch pads by half a window at most.
    (high, wide), value = s.pad, -math.inf if largest else 0.0
    found = pool(F.pad(maps, (wide, wide, high, high), value=value), s.kernel, s.stride, ceil_mode=s.ceil)
    rows, columns = (net.windows(s, side, size[side]) for side in (0, 1))
    return found[:, :, :rows, :columns]


def _lrn(s: net.LRN, layer: Layer, x: Maps, w: Maps) -> Tensor:
    """x / (k + alpha * the mean of the squares in a window of channels) ** beta. In a square of the map k is 1, whatever it says."""
    if not s.within:
        return _across_channels(x[0], s)
    squares = F.avg_pool2d(x[0] * x[0], s.local_size, 1, s.local_size // 2)
    return x[0] * (1 + s.alpha * squares) ** -s.beta


def _across_channels(x: Tensor, s: net.LRN) -> Tensor:
    """x * d ** -beta, with d = k + alpha / n * the sum of the squares of n channels around each. In bfloat16 computed in float32."""
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    y: Tensor = _AcrossChannels.apply(wide, s.local_size, s.alpha, s.beta, s.k)
    return y.to(x.dtype)


class _AcrossChannels(torch.autograd.Function):
    """With a backward pass of its own: autograd's needs three times the memory, and torch's local_response_norm pools in three dimensions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, alpha: float, beta: float, k: float) -> Tensor:
        d = _window_sum(x * x, size).mul_(alpha / size).add_(k)
        factor = _root(d, beta)
        ctx.save_for_backward(x, d, factor)
        ctx.size, ctx.slope = size, 2 * alpha * beta / size
        return x * factor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, d, factor = ctx.saved_tensors
        direct = g * factor
        around = _window_sum((direct * x).div_(d), ctx.size)
        return torch.addcmul(direct, x, around, value=-ctx.slope), None, None, None, None


def _root(d: Tensor, beta: float) -> Tensor:
    """d ** -beta; of 0.75, which most nets have, by roots, which take a fifth of the time."""
    if beta != 0.75:
        return d**-beta
    root = d.rsqrt()
    return root.sqrt().mul_(root)


def _window_sum(x: Tensor, size: int) -> Tensor:
    """Over `size` channels around each, as far as there are so many."""
    total = x.clone()
    for away in range(1, min(size // 2, x.shape[1] - 1) + 1):
        total[:, away:] += x[:, :-away]
        total[:, :-away] += x[:, away:]
    return total


def _scale(s: net.Scale, layer: Layer, x: Maps, w: Maps) -> Tensor:
    factor, *bias = (*x[1:], *w)
    factor = _along(factor, x[0], s.axis)
    return torch.addcmul(_along(bias[0], x[0], s.axis), x[0], factor) if bias else x[0] * factor


def _bias(s: net.Bias, layer: Layer, x: Maps, w: Maps) -> Tensor:
    return x[0] + _along((*x[1:], *w)[0], x[0], s.axis)


def _along(values: Tensor, maps: Tensor, axis: int) -> Tensor:
    """`values` as long as `maps`, beginning at its `axis`."""
    return values.reshape(*values.shape, *[1] * (maps.ndim - axis - values.ndim))


def _relu(s: net.ReLU, layer: Layer, x: Maps, w: Maps) -> Tensor:
    return F.leaky_relu(x[0], s.negative_slope) if s.negative_slope else F.relu(x[0])


def relu_in_place(s: net.ReLU, layer: Layer, x: Maps, w: Maps) -> Tensor:
    """Over its bottom, which nothing else needs."""
    return F.relu_(x[0])


def _prelu(s: net.PReLU, layer: Layer, x: Maps, w: Maps) -> Tensor:
    return F.prelu(x[0], w[0].reshape(-1))


def _elu(s: net.ELU, layer: Layer, x: Maps, w: Maps) -> Tensor:
    return F.elu(x[0], s.alpha)


def _sigmoid(s: net.Sigmoid, layer: Layer, x: Maps, w: Maps) -> Tensor:
    return x[0].sigmoid()


def _tanh(s: net.TanH, layer: Layer, x: Maps, w: Maps) -> Tensor:
    return x[0].tanh()


def _power(s: net.Power, layer: Layer, x: Maps, w: Maps) -> Tensor:
    if s.power * s.scale == 0:  # a constant, without a gradient
        return x[0] * 0 + (s.shift**s.power if s.power else 1.0)
    scaled = x[0] if (s.scale, s.shift) == (1, 0) else s.scale * x[0] + s.shift
    return scaled if s.power == 1 else scaled**s.power


def _dropout(s: net.Dropout, layer: Layer, x: Maps, w: Maps) -> Tensor:
    """In training, what is kept is divided by its share. Random numbers are torch's, which the engine seeds for each device batch."""
    return F.dropout(x[0], s.ratio)


def _concat(s: net.Concat, layer: Layer, x: Maps, w: Maps) -> Tensor:
    return torch.cat(list(x), s.axis)


def _slice(s: net.Slice, layer: Layer, x: Maps, w: Maps) -> Sequence[Tensor]:
    size, tops = x[0].shape[s.axis], len(layer.tops)
    if (s.points and s.points[-1] >= size) or (not s.points and size % tops):
        where = f"at {', '.join(map(str, s.points))}" if s.points else f"into {tops} of the same size"
        raise UsageError(f"layer `{layer.name}` cuts axis {s.axis} {where}, and its bottom has {size} there", _CROP)
    return x[0].tensor_split(s.points, s.axis) if s.points else x[0].split(size // tops, s.axis)


def _eltwise(s: net.Eltwise, layer: Layer, x: Maps, w: Maps) -> Tensor:
    """The gradient goes to the second of two equal bottoms; later ones must be larger."""
    if s.operation is Operation.PROD:
        return reduce(torch.mul, x)
    if s.operation is Operation.MAX:
        first = torch.where(x[0] > x[1], x[0], x[1])
        return reduce(lambda most, other: torch.where(other > most, other, most), x[2:], first)
    coeff = s.coeff or (1.0,) * len(x)
    total = x[0] if coeff[0] == 1 else coeff[0] * x[0]
    for other, factor in zip(x[1:], coeff[1:], strict=True):
        total = torch.add(total, other, alpha=factor)
    return total


def _reshape(s: net.Reshape, layer: Layer, x: Maps, w: Maps) -> Tensor:
    around = x[0].shape
    sizes = (size or around[s.axis + i] for i, size in enumerate(s.sizes))
    return x[0].reshape(*around[: s.axis], *sizes, *around[x[0].ndim - s.behind :])


def _softmax(s: net.Softmax, layer: Layer, x: Maps, w: Maps) -> Tensor:
    return x[0].softmax(s.axis)


def _softmax_of_loss(s: net.SoftmaxWithLoss, layer: Layer, x: Maps, w: Maps) -> Sequence[Tensor]:
    """A loss's second top, where another layer takes it; the loss itself is no map."""
    return x[0].new_zeros(()), x[0].softmax(1)


# By settings; BatchNorm, which has a state, is in `network`, and layers that compute nothing in `steps`.
LAYERS: Mapping[type, Function] = {
    net.Convolution: _convolution,
    net.InnerProduct: _inner_product,
    net.Pooling: _pooling,
    net.LRN: _lrn,
    net.Scale: _scale,
    net.Bias: _bias,
    net.ReLU: _relu,
    net.PReLU: _prelu,
    net.ELU: _elu,
    net.Sigmoid: _sigmoid,
    net.TanH: _tanh,
    net.Power: _power,
    net.Dropout: _dropout,
    net.Concat: _concat,
    net.Slice: _slice,
    net.Eltwise: _eltwise,
    net.Reshape: _reshape,
    net.Softmax: _softmax,
    net.SoftmaxWithLoss: _softmax_of_loss,
}
