"""What Caffe's layers compute, in numpy and by loops: forward, and backward from the gradient of the top. Restated from BVLC's sources; the
settings are those of `base.net`.

Each function gets settings, bottoms, blobs and the top's gradient, and answers (top, gradients of the bottoms, gradients of the blobs).
"""

import math
from itertools import pairwise, product

import numpy as np

from stagerun.base import net
from stagerun.base.net import Method, Operation


def convolution(s, x, w, g):
    """One multiplication at a time."""
    (n, c, high, wide), (kh, kw) = x[0].shape, s.kernel
    (sh, sw), (ph, pw), (dh, dw) = s.stride, s.pad, s.dilation
    weight, per = w[0], w[0].shape[1]
    if s.transposed:
        out = per * s.group
        rows, columns = (sh * (high - 1) + dh * (kh - 1) + 1 - 2 * ph, sw * (wide - 1) + dw * (kw - 1) + 1 - 2 * pw)
        taken, made, group = c // s.group, per, s.group
    else:
        out = weight.shape[0]
        rows, columns = ((high + 2 * ph - dh * (kh - 1) - 1) // sh + 1, (wide + 2 * pw - dw * (kw - 1) - 1) // sw + 1)
        taken, made, group = per, out // s.group, s.group
    top, dx, dw_ = np.zeros((n, out, rows, columns)), np.zeros_like(x[0]), np.zeros_like(weight)
    if len(w) > 1:
        top += w[1][:, None, None]
    g = np.zeros_like(top) if g is None else g
    # Of a Deconvolution the small map is the bottom, of a Convolution the top.
    small = (high, wide) if s.transposed else (rows, columns)
    large = (rows, columns) if s.transposed else (high, wide)
    for i, j, a, b in product(range(small[0]), range(small[1]), range(kh), range(kw)):
        p, q = i * sh - ph + a * dh, j * sw - pw + b * dw
        if not (0 <= p < large[0] and 0 <= q < large[1]):
            continue
        for k in range(group):
            ins, outs = slice(k * taken, (k + 1) * taken), slice(k * made, (k + 1) * made)
            if s.transposed:
                kernel = weight[ins, :, a, b]  # [inputs, outputs of the group]
                top[:, outs, p, q] += x[0][:, ins, i, j] @ kernel
                dx[:, ins, i, j] += g[:, outs, p, q] @ kernel.T
                dw_[ins, :, a, b] += x[0][:, ins, i, j].T @ g[:, outs, p, q]
            else:
                kernel = weight[outs, :, a, b]
                top[:, outs, i, j] += x[0][:, ins, p, q] @ kernel.T
                dx[:, ins, p, q] += g[:, outs, i, j] @ kernel
                dw_[outs, :, a, b] += g[:, outs, i, j].T @ x[0][:, ins, p, q]
    return top, [dx], [dw_, g.sum((0, 2, 3))][: len(w)]


def inner_product(s, x, w, g):
    flat = x[0].reshape(*x[0].shape[: s.axis], -1)
    weight = w[0].T if s.transpose else w[0]
    top = flat @ weight.T + (w[1] if len(w) > 1 else 0)
    rows, ins = g.reshape(-1, g.shape[-1]), flat.reshape(-1, flat.shape[-1])
    dw = rows.T @ ins
    return top, [(g @ weight).reshape(x[0].shape)], [dw.T if s.transpose else dw, rows.sum(0)][: len(w)]


def pooled(size, kernel, stride, pad, ceil, padded):
    """`padded`: on this side or the other."""
    count = (math.ceil if ceil else math.floor)((size + 2 * pad - kernel) / stride) + 1
    if padded and (count - 1) * stride >= size + pad:
        count -= 1
    return count


def pooling(s, x, w, g):
    high, wide = x[0].shape[2:]
    (kh, kw), (sh, sw), (ph, pw) = (s.kernel or (high, wide)), s.stride, s.pad
    padded = ph > 0 or pw > 0
    rows, columns = pooled(high, kh, sh, ph, s.ceil, padded), pooled(wide, kw, sw, pw, s.ceil, padded)
    top, dx = np.zeros((*x[0].shape[:2], rows, columns)), np.zeros_like(x[0])
    g = np.zeros_like(top) if g is None else g
    for n, c, i, j in product(*map(range, top.shape)):
        h, v = i * sh - ph, j * sw - pw
        h_end, v_end = min(h + kh, high + ph), min(v + kw, wide + pw)
        size = (h_end - h) * (v_end - v)
        h, v, h_end, v_end = max(h, 0), max(v, 0), min(h_end, high), min(v_end, wide)
        if s.method is Method.AVE:
            top[n, c, i, j] = x[0][n, c, h:h_end, v:v_end].sum() / size
            dx[n, c, h:h_end, v:v_end] += g[n, c, i, j] / size
            continue
        best, place = -3.4e38, None
        for a, b in product(range(h, h_end), range(v, v_end)):
            if x[0][n, c, a, b] > best:
                best, place = x[0][n, c, a, b], (a, b)
        top[n, c, i, j] = best
        dx[n, c, place[0], place[1]] += g[n, c, i, j]
    return top, [dx], []


def lrn(s, x, w, g):
    (x,) = x
    half, size = (s.local_size - 1) // 2, s.local_size
    if s.within:
        pool = net.Pooling(method=Method.AVE, kernel=(size, size), pad=(half, half))
        average, _, _ = pooling(pool, [x * x], [], None)
        base = 1 + s.alpha * average
        factor = base**-s.beta
        # Eltwise PROD, Power, Pooling and Power of 2, each backward.
        d_average = g * x * s.alpha * -s.beta * factor / base
        _, (d_square,), _ = pooling(pool, [x * x], [], d_average)
        return x * factor, [g * factor + d_square * 2 * x], []
    channels = x.shape[1]
    scale, ratio = np.full_like(x, s.k), np.zeros_like(x)
    for c in range(channels):
        window = slice(max(c - half, 0), min(c + half + 1, channels))
        scale[:, c] += s.alpha / size * (x[:, window] ** 2).sum(1)
    top = x * scale**-s.beta
    for c in range(channels):
        window = slice(max(c - half, 0), min(c + half + 1, channels))
        ratio[:, c] = (g[:, window] * top[:, window] / scale[:, window]).sum(1)
    return top, [g * scale**-s.beta - 2 * s.alpha * s.beta / size * x * ratio], []


def _axes(x, values, axis):
    """The axes of x that `values` doesn't have."""
    return tuple(i for i in range(x.ndim) if not axis <= i < axis + values.ndim)


def scale(s, x, w, g):
    blobs = list(w)
    factor = x[1] if len(x) > 1 else blobs.pop(0)
    wide = np.expand_dims(factor, _axes(x[0], factor, s.axis))
    top = x[0] * wide
    d_factor = (g * x[0]).sum(_axes(x[0], factor, s.axis))
    ends = []
    if blobs:
        top = top + np.expand_dims(blobs[0], _axes(x[0], blobs[0], s.axis))
        ends = [g.sum(_axes(x[0], blobs[0], s.axis))]
    if len(x) > 1:
        return top, [g * wide, d_factor], ends
    return top, [g * wide], [d_factor, *ends]


def bias(s, x, w, g):
    values = x[1] if len(x) > 1 else w[0]
    top = x[0] + np.expand_dims(values, _axes(x[0], values, s.axis))
    d_values = g.sum(_axes(x[0], values, s.axis))
    return (top, [g, d_values], []) if len(x) > 1 else (top, [g], [d_values])


def relu(s, x, w, g):
    slope = s.negative_slope
    return np.maximum(x[0], 0) + slope * np.minimum(x[0], 0), [g * ((x[0] > 0) + slope * (x[0] <= 0))], []


def prelu(s, x, w, g):
    (x,) = x
    shared = w[0].ndim == 0
    slope = w[0] if shared else w[0].reshape(1, -1, *[1] * (x.ndim - 2))
    d_slope = g * x * (x <= 0)
    d_slope = d_slope.sum() if shared else d_slope.sum((0, *range(2, x.ndim)))
    return np.maximum(x, 0) + slope * np.minimum(x, 0), [g * ((x > 0) + slope * (x <= 0))], [d_slope]


def elu(s, x, w, g):
    top = np.maximum(x[0], 0) + s.alpha * (np.exp(np.minimum(x[0], 0)) - 1)
    return top, [g * ((x[0] > 0) + (s.alpha + top) * (x[0] <= 0))], []


def sigmoid(s, x, w, g):
    top = 1 / (1 + np.exp(-x[0]))
    return top, [g * top * (1 - top)], []


def tanh(s, x, w, g):
    top = np.tanh(x[0])
    return top, [g * (1 - top * top)], []


def power(s, x, w, g):
    (x,), slope = x, s.power * s.scale
    if slope == 0:
        return np.full_like(x, 1 if s.power == 0 else s.shift**s.power), [np.zeros_like(x)], []
    base = s.shift + s.scale * x
    top = base**s.power
    if s.power == 1:
        return top, [g * slope], []
    return top, [g * slope * (base if s.power == 2 else top / base)], []


def concat(s, x, w, g):
    ends = np.cumsum([part.shape[s.axis] for part in x])[:-1]
    return np.concatenate(x, s.axis), np.split(g, ends, s.axis), []


def slice_(s, x, tops):
    """SliceLayer: the tops, value by value along the axis."""
    size = x.shape[s.axis]
    edges = [0, *(s.points or [size // tops * i for i in range(1, tops)]), size]
    return [x.take(range(a, b), s.axis) for a, b in pairwise(edges)]


def eltwise(s, x, w, g):
    if s.operation is Operation.SUM:
        coeff = s.coeff or (1.0,) * len(x)
        return sum(c * one for c, one in zip(coeff, x, strict=True)), [c * g for c in coeff], []
    if s.operation is Operation.PROD:
        top = np.prod(x, axis=0)
        return top, [g * np.prod([o for j, o in enumerate(x) if j != i], axis=0) for i in range(len(x))], []
    top, mask = np.where(x[0] > x[1], x[0], x[1]), np.where(x[0] > x[1], 0, 1)
    for i, one in enumerate(x[2:], 2):
        mask = np.where(one > top, i, mask)
        top = np.where(one > top, one, top)
    return top, [g * (mask == i) for i in range(len(x))], []


def softmax(s, x, w, g):
    shifted = np.exp(x[0] - x[0].max(s.axis, keepdims=True))
    top = shifted / shifted.sum(s.axis, keepdims=True)
    return top, [top * (g - (g * top).sum(s.axis, keepdims=True))], []


def batch_norm(x, g, eps):
    """(top, gradient of the bottom, mean, variance as the running one gets it)."""
    axes = (0, *range(2, x.ndim))
    m = x.size // x.shape[1]
    mean = x.mean(axes, keepdims=True)
    variance = ((x - mean) ** 2).mean(axes, keepdims=True)
    root = np.sqrt(variance + eps)
    top = (x - mean) / root
    dx = (g - g.mean(axes, keepdims=True) - (g * top).mean(axes, keepdims=True) * top) / root
    return top, dx, mean.ravel(), variance.ravel() * (m / (m - 1) if m > 1 else 1)


def softmax_loss(s, logits, labels):
    """(the loss times its weight, gradient of the logits)."""
    probabilities, _, _ = softmax(net.Softmax(), [logits], [], np.zeros_like(logits))
    loss, count, d = 0.0, 0, probabilities.copy()
    for i, label in enumerate(labels):
        if s.ignore_label is not None and label == s.ignore_label:
            d[i] = 0
            continue
        loss -= math.log(probabilities[i, label])
        d[i, label] -= 1
        count += 1
    over = {
        net.Normalization.FULL: len(labels),
        net.Normalization.BATCH_SIZE: len(labels),
        net.Normalization.VALID: count,
        net.Normalization.PRE_FIXED: s.pre_fixed_normalizer,
        net.Normalization.NONE: 1,
    }[s.normalization]
    over = max(1.0, over)
    return s.loss_weight * loss / over, s.loss_weight * d / over
