"""The weight update: one class per solver type, whose docstring is its formula.

In all of them, per parameter: g the gradient of the mean loss over the global batch; r = lr * lr_mult; m = momentum;
d = weight_decay * decay_mult; h = g + d*w, with `regularization_type: "L1"` g + d*sign(w); |x| the L2 norm of a parameter,
in its dtype. The history starts at zero. lr, m and weight_decay belong to the update (they move with their policies), all
else to the stage. Sources: the solvers of BVLC Caffe and sara-nl/caffe (610a2fa9), `sgd_solver.cpp`
and its neighbours; the papers named in the classes.

The averages of Adam, AdamW and LAMB, M of the gradient and V of its square, count in t the updates that they have seen, with the current
one. Each parameter has a count: a parameter that the previous stage had frozen starts at zero, while others' averages were carried over.
If momentum moves, m^t is the power of its current value, as in torch, and not the product of all values so far: the correction is off by
as much as momentum has moved since the average began, and that is forgotten as m^t goes to zero.

`torch._foreach_*` are in torch's reference in spite of their names ("Foreach Operations"). torch.optim, which is made of them, has neither Caffe's
forms nor layer-wise rates; what is the same in both calls torch.optim. tests/train/test_engine_solvers.py holds every formula against numpy,
and fails where torch changes one of them.

The two forms of momentum, Caffe's and torch's, differ wherever the learning rate moves: in Caffe's, V holds steps, in torch's gradients.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from stagerun.base.recipe import MomentumForm, Solver
from stagerun.engine.device import square_roots_, to_device
from stagerun.engine.parameters import Parameter
from stagerun.schedule import Knobs, slots_of

Tensors = list[Tensor]


class Group:
    """Parameters that are moved together. `w` and the lists in `history` are in the order of `members`, as are all values computed for
    them; `indices` are the members' in `WeightUpdate.parameters`."""

    def __init__(self, members: Sequence[tuple[int, Parameter]], history: Mapping[str, Mapping[str, Tensor]]) -> None:
        self.indices = [index for index, _ in members]
        self.members = [p for _, p in members]
        first = self.members[0]
        self.lr_mult, self.decay_mult, self.adapt = first.lr_mult, first.decay_mult, first.adapt
        self.w: Tensors = [p.tensor for p in self.members]
        self.history = {slot: [kept[p.name] for p in self.members] for slot, kept in history.items()}

    def gradients(self) -> Tensors:
        gradients = [p.tensor.grad for p in self.members]
        assert all(g is not None for g in gradients)
        return gradients  # type: ignore[return-value]


class WeightUpdate:
    """`history`: slot, from `schedule.slots_of` -> parameter name -> tensor, zero at first. Slot `t` is int64 [] on the host: the updates that
    the parameter's averages have seen. The others have the parameter's shape, dtype, layout and device."""

    def __init__(self, parameters: Sequence[Parameter], solver: Solver) -> None:
        self.parameters = list(parameters)
        self.settings = solver
        self.history: dict[str, dict[str, Tensor]] = {}
        self.t = torch.zeros(len(self.parameters), dtype=torch.int64, device="cpu")  # so that no GPU is waited for
        for slot in slots_of(solver.type, solver.momentum_form):
            if slot == "t":
                self.history[slot] = {p.name: self.t[index] for index, p in enumerate(self.parameters)}
            else:
                self.history[slot] = {p.name: torch.zeros_like(p.tensor) for p in self.parameters}

        def multipliers(member: tuple[int, Parameter]) -> tuple[float, float, bool]:
            return member[1].lr_mult, member[1].decay_mult, member[1].adapt

        ordered = sorted(enumerate(self.parameters), key=multipliers)
        self._groups = [Group(list(members), self.history) for _, members in groupby(ordered, key=multipliers)]

    @torch.no_grad()
    def update(self, knobs: Knobs) -> None:
        """Update the weights from the parameters' `.grad`, which it may change."""
        for group in self._groups:
            rate, decay = knobs.lr * group.lr_mult, knobs.weight_decay * group.decay_mult
            self._move(group, group.gradients(), rate, decay, knobs)

    def _move(self, group: Group, g: Tensors, rate: float, decay: float, knobs: Knobs) -> None:
        """Update one group. `rate` and `decay` are r and d of the formulas."""
        raise NotImplementedError

    def _regularise(self, group: Group, g: Tensors, decay: float) -> None:
        """Turn g into h: add the term of weight decay."""
        if decay:
            term = group.w if self.settings.regularization_type == "L2" else torch._foreach_sign(group.w)
            torch._foreach_add_(g, term, alpha=decay)


def lengths(tensors: Tensors) -> Tensor:
    """Return [n]: the L2 norm of each, in their dtype."""
    return torch.stack(torch._foreach_norm(tensors))


def where_both(a: Tensor, b: Tensor, ratio: Tensor) -> Tensors:
    """Return n scalars: `ratio` [n] where `a` [n] and `b` [n] are above zero, and 1 elsewhere."""
    return list(torch.where((a > 0) & (b > 0), ratio, torch.ones_like(ratio)).unbind())


class SGD(WeightUpdate):
    """CAFFE   V = m*V + r*h    w -= V
    TORCH   V = m*V + h      w -= r*V

    `sgd_solver.cpp`. With local_lr_auto (its GetLocalRate, fused path) r is lr * q with q = local_gw_ratio * |w| /
    (local_lr_passes*|g| + weight_decay*|w|), without decay_mult, and 1 where |w| or |g| is 0; it replaces lr_mult."""

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
        """Return r, and q of each parameter, from the gradient without weight decay; None: 1."""
        if not self.settings.local_lr_auto:
            return rate, None
        w, gradient = lengths(group.w), lengths(g)
        passes = self.settings.local_lr_passes
        ratio = self.settings.local_gw_ratio * w / (passes * gradient + knobs.weight_decay * w)
        return knobs.lr, where_both(w, gradient, ratio)


class LARS(SGD):
    """CAFFE   V = m*V + r*q*h    w -= V
    TORCH   V = m*V + h        w -= r*q*V

    with q = local_gw_ratio * |w| / (|g| + d*|w| + delta), and 1 where |w| or |g| is 0 or `adapt` is false. You, Gitman and
    Ginsburg, Large Batch Training of Convolutional Networks (arXiv:1708.03888), algorithm 1, which has no delta."""

    def _fit(self, group: Group, g: Tensors, rate: float, decay: float, knobs: Knobs) -> tuple[float, Tensors | None]:
        w, gradient = lengths(group.w), lengths(g)
        ratio = self.settings.local_gw_ratio * w / (gradient + decay * w + self.settings.delta)
        return rate, where_both(w, gradient, ratio)


class Nesterov(WeightUpdate):
    """CAFFE   V' = m*V + r*h    w -= (1+m)*V' - m*V
    TORCH   V' = m*V + h      w -= r*(h + m*V')

    `nesterov_solver.cpp`."""

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


class AdaGrad(WeightUpdate):
    """V += h*h    w -= r*h / (sqrt(V) + delta)

    `adagrad_solver.cpp`."""

    def _move(self, group: Group, g: Tensors, rate: float, decay: float, knobs: Knobs) -> None:
        v = group.history["sum_of_squares"]
        self._regularise(group, g, decay)
        torch._foreach_addcmul_(v, g, g)
        _divided_step(group.w, g, v, self.settings.delta, rate)


class RMSProp(WeightUpdate):
    """V = rms_decay*V + (1-rms_decay)*h*h    w -= r*h / (sqrt(V) + delta)

    `rmsprop_solver.cpp`."""

    def _move(self, group: Group, g: Tensors, rate: float, decay: float, knobs: Knobs) -> None:
        v, kept = group.history["squares"], self.settings.rms_decay
        self._regularise(group, g, decay)
        torch._foreach_mul_(v, kept)
        torch._foreach_addcmul_(v, g, g, value=1 - kept)
        _divided_step(group.w, g, v, self.settings.delta, rate)


class AdaDelta(WeightUpdate):
    """V = m*V + (1-m)*h*h    u = h * sqrt((D + delta) / (V + delta))    D = m*D + (1-m)*u*u    w -= r*u

    `adadelta_solver.cpp`; the paper (Zeiler, arXiv:1212.5701) has no r."""

    def _move(self, group: Group, g: Tensors, rate: float, decay: float, knobs: Knobs) -> None:
        v, d = group.history["squares"], group.history["squared_steps"]
        m, delta = knobs.momentum, self.settings.delta
        self._regularise(group, g, decay)
        torch._foreach_mul_(v, m)
        torch._foreach_addcmul_(v, g, g, value=1 - m)
        u = torch._foreach_add(d, delta)
        torch._foreach_div_(u, torch._foreach_add(v, delta))
        square_roots_(u)
        torch._foreach_mul_(u, g)
        torch._foreach_mul_(d, m)
        torch._foreach_addcmul_(d, u, u, value=1 - m)
        torch._foreach_add_(group.w, u, alpha=-rate)


def _divided_step(w: Tensors, g: Tensors, v: Tensors, delta: float, rate: float) -> None:
    """w -= rate * g / (sqrt(v) + delta)"""
    divisor = [one.clone() for one in v]
    square_roots_(divisor)
    torch._foreach_add_(divisor, delta)
    torch._foreach_addcdiv_(w, g, divisor, value=-rate)


class Averages(WeightUpdate):
    """M = m*M + (1-m)*x    V = momentum2*V + (1-momentum2)*x*x    with x = h (Adam) or g (AdamW, LAMB)"""

    def update(self, knobs: Knobs) -> None:
        self.t.add_(1)
        super().update(knobs)

    def _average(self, group: Group, x: Tensors, m: float) -> None:
        mean, squares, beta2 = group.history["mean"], group.history["squares"], self.settings.momentum2
        torch._foreach_lerp_(mean, x, 1 - m)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, x, x, value=1 - beta2)

    def _missing(self, group: Group, m: float) -> list[tuple[float, float]]:
        """Return (1 - m^t, 1 - momentum2^t) of each parameter: the parts of M and V that don't come from the initial zeros."""
        counts = self.t[group.indices].tolist()
        return [(1 - m**count, 1 - self.settings.momentum2**count) for count in counts]


class Adam(Averages):
    """w -= r * sqrt(1-momentum2^t)/(1-m^t) * M / (sqrt(V) + delta)

    `adam_solver.cpp`: delta stands outside the correction, and weight decay in the gradient. Kingma and Ba
    (arXiv:1412.6980), the form at the end of section 2."""

    def _move(self, group: Group, g: Tensors, rate: float, decay: float, knobs: Knobs) -> None:
        self._regularise(group, g, decay)
        self._average(group, g, knobs.momentum)
        steps = [-rate * math.sqrt(second) / first for first, second in self._missing(group, knobs.momentum)]
        torch._foreach_copy_(g, group.history["squares"])  # reuse the gradients' memory
        square_roots_(g)
        torch._foreach_add_(g, self.settings.delta)
        torch._foreach_addcdiv_(group.w, group.history["mean"], g, steps)


class AdamW(Averages):
    """w -= r * (u + d*w) with u = M/(1-m^t) / (sqrt(V/(1-momentum2^t)) + delta)

    Loshchilov and Hutter, Decoupled Weight Decay Regularization (arXiv:1711.05101), with weight decay times the learning
    rate, as torch has it. torch's fused kernel does this arithmetic in one pass over memory."""

    def _move(self, group: Group, g: Tensors, rate: float, decay: float, knobs: Knobs) -> None:
        # With the weights' strides, which the fused kernel ignores.
        pairs = zip(g, group.w, strict=True)
        g = [a if a.stride() == w.stride() else torch.empty_like(w).copy_(a) for a, w in pairs]
        adamw(
            group.w,
            g,
            group.history["mean"],
            group.history["squares"],
            [],
            list(to_device(self.t[group.indices].sub_(1).float(), group.w[0].device).unbind()),  # adamw adds 1
            fused=True,
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
    identity."""

    def _move(self, group: Group, g: Tensors, rate: float, decay: float, knobs: Knobs) -> None:
        self._average(group, g, knobs.momentum)
        missing = self._missing(group, knobs.momentum)
        divisor = torch._foreach_div(group.history["squares"], [second for _, second in missing])
        square_roots_(divisor)
        torch._foreach_add_(divisor, self.settings.delta)
        step = g  # reuse the gradients' memory
        torch._foreach_copy_(step, group.history["mean"])
        torch._foreach_div_(step, [first for first, _ in missing])
        torch._foreach_div_(step, divisor)
        if decay:
            torch._foreach_add_(step, group.w, alpha=decay)
        if group.adapt:
            w, u = lengths(group.w), lengths(step)
            torch._foreach_mul_(step, where_both(w, u, w / u))
        torch._foreach_add_(group.w, step, alpha=-rate)


# The type of a solver is the name of its class.
_CLASSES: tuple[type[WeightUpdate], ...] = SGD, Nesterov, AdaGrad, RMSProp, AdaDelta, Adam, AdamW, LARS, LAMB
UPDATES = {one.__name__: one for one in _CLASSES}


def make_update(parameters: Sequence[Parameter], solver: Solver) -> WeightUpdate:
    """Return the update of `solver.type` for these parameters, without history."""
    return UPDATES[solver.type](parameters, solver)
