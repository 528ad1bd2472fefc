"""Caffe's LRN across channels, with a backward pass of its own: autograd's needs three times the memory, and torch's local_response_norm
pools in three dimensions."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from stagerun.base.net import LRN


def across_channels(x: Tensor, s: LRN) -> Tensor:
    """x * d ** -beta, with d = k + alpha / n * the sum of the squares of n channels around each. In bfloat16 computed in float32."""
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    y: Tensor = _AcrossChannels.apply(wide, s.local_size, s.alpha, s.beta, s.k)
    return y.to(x.dtype)


class _AcrossChannels(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, alpha: float, beta: float, k: float) -> Tensor:
        d = _window_sum(x * x, size).mul_(alpha / size).add_(k)
        factor = _power(d, beta)
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


def _power(d: Tensor, beta: float) -> Tensor:
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
