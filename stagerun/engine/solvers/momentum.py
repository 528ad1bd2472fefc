"""SGD, Nesterov and LARS: momentum, in Caffe's form or in torch's.

The forms differ wherever the learning rate moves: in Caffe's, V holds steps, in torch's gradients.
"""

import torch

from stagerun.engine.solvers.base import Group, Tensors, WeightUpdate, lengths, where_both
from stagerun.knobs import Knobs
from stagerun.recipe import MomentumForm


class SGD(WeightUpdate):
    """CAFFE   V = m*V + r*h    w -= V
    TORCH   V = m*V + h      w -= r*V

    `sgd_solver.cpp`. With local_lr_auto (GetLocalRate there, fused path) r is lr * q with q = local_gw_ratio * |w| /
    (|g| + weight_decay*|w|), where decay_mult has no say, and 1 where |w| or |g| is 0; lr_mult is replaced by it.
    """

    def _move(self, group: Group, g: Tensors, rate: float, decay: float, knobs: Knobs) -> None:
        (v,) = group.history.values()
        fitted = None
        if group.adapt:
            rate, fitted = self._fit(group, g, rate, decay, knobs)
        self._regularise(group, g, decay)
        torch._foreach_mul_(v, knobs.momentum)
        if self.settings.momentum_form is MomentumForm.CAFFE:
            if fitted is not None:
                torch._foreach_mul_(g, fitted)
            torch._foreach_add_(v, g, alpha=rate)
            torch._foreach_sub_(group.w, v)
        else:
            torch._foreach_add_(v, g)
            step = v if fitted is None else list(torch._foreach_mul(v, fitted))
            torch._foreach_add_(group.w, step, alpha=-rate)

    def _fit(self, group: Group, g: Tensors, rate: float, decay: float, knobs: Knobs) -> tuple[float, Tensors | None]:
        """r, and q of each parameter, from the gradient without weight decay; None: 1."""
        if not self.settings.local_lr_auto:
            return rate, None
        w, gradient = lengths(group.w), lengths(g)
        ratio = self.settings.local_gw_ratio * w / (gradient + knobs.weight_decay * w)
        return knobs.lr, where_both(w, gradient, ratio)


class LARS(SGD):
    """CAFFE   V = m*V + r*q*h    w -= V
    TORCH   V = m*V + h        w -= r*q*V

    with q = local_gw_ratio * |w| / (|g| + d*|w| + delta), and 1 where |w| or |g| is 0 or `adapt` is false. You, Gitman and
    Ginsburg, Large Batch Training of Convolutional Networks (arXiv:1708.03888), algorithm 1, which has no delta.
    """

    def _fit(self, group: Group, g: Tensors, rate: float, decay: float, knobs: Knobs) -> tuple[float, Tensors | None]:
        w, gradient = lengths(group.w), lengths(g)
        ratio = self.settings.local_gw_ratio * w / (gradient + decay * w + self.settings.delta)
        return rate, where_both(w, gradient, ratio)


class Nesterov(WeightUpdate):
    """CAFFE   V' = m*V + r*h    w -= (1+m)*V' - m*V
    TORCH   V' = m*V + h      w -= r*(h + m*V')

    `nesterov_solver.cpp`.
    """

    def _move(self, group: Group, g: Tensors, rate: float, decay: float, knobs: Knobs) -> None:
        w, m = group.w, knobs.momentum
        (v,) = group.history.values()
        self._regularise(group, g, decay)
        if self.settings.momentum_form is MomentumForm.CAFFE:
            torch._foreach_add_(w, v, alpha=m)
            torch._foreach_mul_(v, m)
            torch._foreach_add_(v, g, alpha=rate)
            torch._foreach_add_(w, v, alpha=-(1 + m))
        else:
            torch._foreach_mul_(v, m)
            torch._foreach_add_(v, g)
            torch._foreach_add_(g, v, alpha=m)
            torch._foreach_add_(w, g, alpha=-rate)
