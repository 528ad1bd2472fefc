"""The weight update: Caffe's solvers, and torch's form of momentum. Formulas: CAFFE.md 3.2 of the design notes,
`sgd_solver.cpp` and `nesterov_solver.cpp` of sara-nl/caffe (610a2fa9).

With g the gradient of the mean loss over the global batch, d = weight_decay * decay_mult, r = lr * lr_mult:

    SGD       CAFFE   V = m*V + r*(g + d*w)           w -= V
              TORCH   V = m*V + (g + d*w)             w -= r*V
    Nesterov  CAFFE   V' = m*V + r*(g + d*w)          w -= (1+m)*V' - m*V
              TORCH   V' = m*V + (g + d*w)            w -= r*((g + d*w) + m*V')

The two forms differ wherever the learning rate moves: in Caffe's, V holds steps, not gradients.
"""

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from stagerun.engine.parameters import Parameter
from stagerun.knobs import Knobs
from stagerun.recipe import MomentumForm


class MomentumSolver:
    """`history` maps each trained parameter's name to its V, of the parameter's shape and dtype, zero at first."""

    def __init__(self, parameters: Sequence[Parameter], type: str, form: MomentumForm) -> None:
        self.parameters = list(parameters)
        self.nesterov = type == "Nesterov"
        self.form = form
        self.history: dict[str, Tensor] = {p.name: torch.zeros_like(p.tensor) for p in parameters}

        def multipliers(p: Parameter) -> tuple[float, float]:
            return p.lr_mult, p.decay_mult

        ordered = sorted(self.parameters, key=multipliers)
        self._groups = [(key, list(members)) for key, members in groupby(ordered, key=multipliers)]

    @torch.no_grad()
    def update(self, knobs: Knobs) -> None:
        """One weight update from the parameters' `.grad`, which may be changed by it."""
        for (lr_mult, decay_mult), members in self._groups:
            w = [p.tensor for p in members]
            g = [p.tensor.grad for p in members]
            v = [self.history[p.name] for p in members]
            rate, decay, m = knobs.lr * lr_mult, knobs.weight_decay * decay_mult, knobs.momentum
            step = self._caffe if self.form is MomentumForm.CAFFE else self._torch
            step(w, g, v, rate, decay, m)

    def _caffe(self, w: list, g: list, v: list, rate: float, decay: float, m: float) -> None:
        if decay:
            torch._foreach_add_(g, w, alpha=decay)
        if self.nesterov:
            torch._foreach_add_(w, v, alpha=m)
        torch._foreach_mul_(v, m)
        torch._foreach_add_(v, g, alpha=rate)
        if self.nesterov:
            torch._foreach_add_(w, v, alpha=-(1 + m))
        else:
            torch._foreach_sub_(w, v)

    def _torch(self, w: list, g: list, v: list, rate: float, decay: float, m: float) -> None:
        if decay:
            torch._foreach_add_(g, w, alpha=decay)
        torch._foreach_mul_(v, m)
        torch._foreach_add_(v, g)
        if self.nesterov:
            torch._foreach_add_(g, v, alpha=m)
            torch._foreach_add_(w, g, alpha=-rate)
        else:
            torch._foreach_add_(w, v, alpha=-rate)
