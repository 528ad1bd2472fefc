"""What Caffe's layers compute, restated from BVLC's sources: of settings of `caffe.layers`, bottoms and blobs, tensors in double, the top."""

import math
from functools import reduce
from itertools import pairwise, product

import numpy as np
import torch
from facade import layers, map_layers
from torch.nn.functional import pad


def convolution(s, x, w):
    """Tap by tap of the kernel."""
    (kh, kw), (sh, sw), (ph, pw), (dh, dw) = s.kernel, s.stride, s.pad, s.dilation
    tops = []
    for maps, weight in zip(x[0].chunk(s.group, 1), w[0].chunk(s.group), strict=True):
        large = pad(maps, (pw, pw, ph, ph))
        high, wide = (large.shape[2] - dh * (kh - 1) - 1) // sh + 1, (large.shape[3] - dw * (kw - 1) - 1) // sw + 1
        top = maps.new_zeros(len(maps), len(weight), high, wide)
        if s.transposed:  # the small map is the bottom
            high, wide = maps.shape[2:]
            size = sh * (high - 1) + dh * (kh - 1) + 1, sw * (wide - 1) + dw * (kw - 1) + 1
            large = maps.new_zeros(len(maps), weight.shape[1], *size)
        for a, b in product(range(kh), range(kw)):
            seen = (
                ...,
                slice(a * dh, a * dh + sh * (high - 1) + 1, sh),
                slice(b * dw, b * dw + sw * (wide - 1) + 1, sw),
            )
            if s.transposed:
                large[seen] += torch.einsum("nchw,co->nohw", maps, weight[:, :, a, b])
            else:
                top += torch.einsum("nchw,oc->nohw", large[seen], weight[:, :, a, b])
        tops.append(large[:, :, ph : large.shape[2] - ph, pw : large.shape[3] - pw] if s.transposed else top)
    return torch.cat(tops, 1) + (w[1][:, None, None] if len(w) > 1 else 0)


def inner_product(s, x, w):
    return x[0].flatten(s.axis) @ (w[0] if s.transpose else w[0].T) + (w[1] if len(w) > 1 else 0)


def pooled(size, kernel, stride, pad, ceil, padded):
    """`padded`: on this side or the other."""
    count = (math.ceil if ceil else math.floor)((size + 2 * pad - kernel) / stride) + 1
    if padded and (count - 1) * stride >= size + pad:
        count -= 1
    return count


def pooling(s, x, w):
    """Of equal numbers the first is the largest; AVE divides by the window with its pad, but not beyond."""
    high, wide = x[0].shape[2:]
    (kh, kw), (sh, sw), (ph, pw) = (s.kernel or (high, wide)), s.stride, s.pad
    rows, columns = (
        pooled(n, k, t, p, s.ceil, ph > 0 or pw > 0) for n, k, t, p in ((high, kh, sh, ph), (wide, kw, sw, pw))
    )
    tops = []
    for i, j in product(range(rows), range(columns)):
        h, v = i * sh - ph, j * sw - pw
        h_end, v_end = min(h + kh, high + ph), min(v + kw, wide + pw)
        window = x[0][:, :, max(h, 0) : h_end, max(v, 0) : v_end].flatten(2)
        if s.method == "AVE":
            tops.append(window.sum(2) / ((h_end - h) * (v_end - v)))
        else:
            tops.append(window.gather(2, window.argmax(2, keepdim=True))[..., 0])
    return torch.stack(tops, 2).reshape(*x[0].shape[:2], rows, columns)


def lrn(s, x, w):
    (x,), half = x, (s.local_size - 1) // 2
    if s.within:
        pool = map_layers.Pooling(method="AVE", kernel=(s.local_size, s.local_size), pad=(half, half))
        return x * (1 + s.alpha * pooling(pool, [x * x], [])) ** -s.beta
    windows = [x[:, max(c - half, 0) : c + half + 1] for c in range(x.shape[1])]
    scale = torch.stack([s.k + s.alpha / s.local_size * (window**2).sum(1) for window in windows], 1)
    return x * scale**-s.beta


def _wide(values, x, axis):
    """With the axes of x that `values` doesn't have."""
    return values.reshape(*[1] * axis, *values.shape, *[1] * (x.ndim - axis - values.ndim))


def scale(s, x, w):
    factor, *more = [*x[1:], *w]
    top = x[0] * _wide(factor, x[0], s.axis)
    return top + _wide(more[0], x[0], s.axis) if more else top


def bias(s, x, w):
    (values,) = [*x[1:], *w]
    return x[0] + _wide(values, x[0], s.axis)


def relu(s, x, w):
    return torch.where(x[0] > 0, x[0], s.negative_slope * x[0])


def prelu(s, x, w):
    return torch.where(x[0] > 0, x[0], _wide(w[0], x[0], min(1, w[0].ndim)) * x[0])


def elu(s, x, w):
    return torch.where(x[0] > 0, x[0], s.alpha * (x[0].exp() - 1))


def sigmoid(s, x, w):
    return 1 / (1 + (-x[0]).exp())


def tanh(s, x, w):
    return 2 / (1 + (-2 * x[0]).exp()) - 1


def power(s, x, w):
    if s.power * s.scale == 0:
        return 0 * x[0] + (1 if s.power == 0 else s.shift**s.power)
    return (s.shift + s.scale * x[0]) ** s.power


def concat(s, x, w):
    return torch.cat(x, s.axis)


def slice_(s, x, tops):
    """SliceLayer: the tops, value by value along the axis."""
    size = x.shape[s.axis]
    edges = [0, *(s.points or [size // tops * i for i in range(1, tops)]), size]
    return [x.take(range(a, b), s.axis) for a, b in pairwise(edges)]


def eltwise(s, x, w):
    """Of equal numbers the later of the first two is the largest, and no later one."""
    if s.operation == "SUM":
        return sum(c * one for c, one in zip(s.coeff or (1.0,) * len(x), x, strict=True))
    if s.operation == "PROD":
        return reduce(torch.mul, x)
    return reduce(lambda top, one: torch.where(one > top, one, top), x[2:], torch.where(x[0] > x[1], x[0], x[1]))


def softmax(s, x, w):
    shifted = (x[0] - x[0].amax(s.axis, keepdim=True).detach()).exp()
    return shifted / shifted.sum(s.axis, keepdim=True)


def softmax_loss(s, logits: np.ndarray, labels: np.ndarray) -> tuple[float, np.ndarray]:
    """(the loss times its weight, gradient of the logits)."""
    z = torch.tensor(logits, requires_grad=True)
    seen = [(i, label) for i, label in enumerate(labels) if s.ignore_label is None or label != s.ignore_label]
    loss = sum((-softmax(layers.Softmax(), [z], [])[i, label].log() for i, label in seen), 0 * z.sum())
    over = {
        "FULL": len(labels),
        "BATCH_SIZE": len(labels),
        "VALID": len(seen),
        "PRE_FIXED": s.pre_fixed_normalizer,
        "NONE": 1,
    }[s.normalization]
    loss = s.loss_weight * loss / max(1.0, over)
    loss.backward()
    return loss.item(), z.grad.numpy()
