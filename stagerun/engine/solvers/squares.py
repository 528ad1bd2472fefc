"""AdaGrad, RMSProp and AdaDelta: each weight's step by the size that its gradients had, in Caffe's form."""

import torch

from stagerun.engine.solvers.base import Group, Tensors, WeightUpdate
from stagerun.knobs import Knobs


class AdaGrad(WeightUpdate):
    """V += h*h    w -= r*h / (sqrt(V) + delta)

    `adagrad_solver.cpp`.
    """

    def _move(self, group: Group, g: Tensors, rate: float, decay: float, knobs: Knobs) -> None:
        v = group.history["sum_of_squares"]
        self._regularise(group, g, decay)
        torch._foreach_addcmul_(v, g, g)
        _divided_step(group.w, g, v, self.settings.delta, rate)


class RMSProp(WeightUpdate):
    """V = rms_decay*V + (1-rms_decay)*h*h    w -= r*h / (sqrt(V) + delta)

    `rmsprop_solver.cpp`.
    """

    def _move(self, group: Group, g: Tensors, rate: float, decay: float, knobs: Knobs) -> None:
        v, kept = group.history["squares"], self.settings.rms_decay
        self._regularise(group, g, decay)
        torch._foreach_mul_(v, kept)
        torch._foreach_addcmul_(v, g, g, value=1 - kept)
        _divided_step(group.w, g, v, self.settings.delta, rate)


class AdaDelta(WeightUpdate):
    """V = m*V + (1-m)*h*h    u = h * sqrt((D + delta) / (V + delta))    D = m*D + (1-m)*u*u    w -= r*u

    `adadelta_solver.cpp`; the paper (Zeiler, arXiv:1212.5701) has no r.
    """

    def _move(self, group: Group, g: Tensors, rate: float, decay: float, knobs: Knobs) -> None:
        v, d = group.history["squares"], group.history["squared_steps"]
        m, delta = knobs.momentum, self.settings.delta
        self._regularise(group, g, decay)
        torch._foreach_mul_(v, m)
        torch._foreach_addcmul_(v, g, g, value=1 - m)
        u = torch._foreach_add(d, delta)
        torch._foreach_div_(u, torch._foreach_add(v, delta))
        torch._foreach_sqrt_(u)
        torch._foreach_mul_(u, g)
        torch._foreach_mul_(d, m)
        torch._foreach_addcmul_(d, u, u, value=1 - m)
        torch._foreach_add_(group.w, u, alpha=-rate)


def _divided_step(w: Tensors, g: Tensors, v: Tensors, delta: float, rate: float) -> None:
    """w -= rate * g / (sqrt(v) + delta)"""
    divisor = torch._foreach_sqrt(v)
    torch._foreach_add_(divisor, delta)
    torch._foreach_addcdiv_(w, g, divisor, value=-rate)
