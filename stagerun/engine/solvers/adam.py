"""Adam in Caffe's form, AdamW and LAMB as their authors published them.

All three keep running averages M of the gradient and V of its square, and count in t the updates that these have seen, with
the present one. The count is each parameter's own: a parameter that the stage before had frozen starts at zero beside others
whose averages were carried over.

Where momentum moves, m^t is the power of its present value, as in torch, and not the product of all values so far: the correction
is off by as much as momentum has moved since the average began, and that is forgotten as m^t goes to zero.
"""

import math

import torch

from stagerun.engine.solvers.base import Group, Tensors, WeightUpdate, lengths, where_both
from stagerun.knobs import Knobs


class Averages(WeightUpdate):
    """M = m*M + (1-m)*x    V = momentum2*V + (1-momentum2)*x*x    with x = h (Adam) or g (AdamW, LAMB)"""

    @torch.no_grad()
    def update(self, knobs: Knobs) -> None:
        self.t.add_(1)
        super().update(knobs)

    def _average(self, group: Group, x: Tensors, m: float) -> None:
        mean, squares, beta2 = group.history["mean"], group.history["squares"], self.settings.momentum2
        torch._foreach_lerp_(mean, x, 1 - m)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, x, x, value=1 - beta2)

    def _missing(self, group: Group, m: float) -> list[tuple[float, float]]:
        """(1 - m^t, 1 - momentum2^t) of each parameter: how much of M and V is not yet the zeros they started from."""
        counts = self.t.tolist()
        return [(1 - m ** counts[place], 1 - self.settings.momentum2 ** counts[place]) for place in group.places]


class Adam(Averages):
    """w -= r * sqrt(1-momentum2^t)/(1-m^t) * M / (sqrt(V) + delta)

    `adam_solver.cpp`: delta stands outside the correction, and weight decay in the gradient. Kingma and Ba
    (arXiv:1412.6980), the form at the end of section 2.
    """

    def _move(self, group: Group, g: Tensors, rate: float, decay: float, knobs: Knobs) -> None:
        self._regularise(group, g, decay)
        self._average(group, g, knobs.momentum)
        steps = [-rate * math.sqrt(second) / first for first, second in self._missing(group, knobs.momentum)]
        torch._foreach_copy_(g, group.history["squares"])  # in the gradients' place, to spare the memory
        torch._foreach_sqrt_(g)
        torch._foreach_add_(g, self.settings.delta)
        torch._foreach_addcdiv_(group.w, group.history["mean"], g, steps)


class AdamW(Averages):
    """w -= r * (u + d*w) with u = M/(1-m^t) / (sqrt(V/(1-momentum2^t)) + delta)

    Loshchilov and Hutter, Decoupled Weight Decay Regularization (arXiv:1711.05101), with weight decay times the learning
    rate, as torch has it. torch's fused kernel does this arithmetic in one pass over memory.
    """

    def _move(self, group: Group, g: Tensors, rate: float, decay: float, knobs: Knobs) -> None:
        mean, squares = group.history["mean"], group.history["squares"]
        counts = self.t.to(torch.float32).unbind()
        torch._fused_adamw_(
            group.w,
            _laid_out_alike(g, group.w),
            mean,
            squares,
            [],
            [counts[place] for place in group.places],
            lr=rate,
            beta1=knobs.momentum,
            beta2=self.settings.momentum2,
            weight_decay=decay,
            eps=self.settings.delta,
            amsgrad=False,
            maximize=False,
        )


class LAMB(Averages):
    """w -= r * q*(u + d*w) with u as AdamW's and q = |w| / |u + d*w|, and 1 where either is 0 or `adapt` is false

    You et al., Large Batch Optimization for Deep Learning (arXiv:1904.00962), algorithm 2 with its bias correction and phi the
    identity.
    """

    def _move(self, group: Group, g: Tensors, rate: float, decay: float, knobs: Knobs) -> None:
        self._average(group, g, knobs.momentum)
        missing = self._missing(group, knobs.momentum)
        divisor = torch._foreach_div(group.history["squares"], [second for _, second in missing])
        torch._foreach_sqrt_(divisor)
        torch._foreach_add_(divisor, self.settings.delta)
        step = g  # in the gradients' place, to spare the memory
        torch._foreach_copy_(step, group.history["mean"])
        torch._foreach_div_(step, [first for first, _ in missing])
        torch._foreach_div_(step, divisor)
        if decay:
            torch._foreach_add_(step, group.w, alpha=decay)
        if group.adapt:
            w, u = lengths(group.w), lengths(step)
            torch._foreach_mul_(step, where_both(w, u, w / u))
        torch._foreach_add_(group.w, step, alpha=-rate)


def _laid_out_alike(g: Tensors, w: Tensors) -> Tensors:
    """The gradients with the weights' strides: the fused kernel walks through memory without looking at them."""
    return [a if a.stride() == b.stride() else torch.empty_like(b).copy_(a) for a, b in zip(g, w, strict=True)]
