"""The policies that Caffe has not: one frozen class each, called with the iteration, counted from 0.

A new policy is a class and a row of SHAPES here, and its line in the comment of `lr_policy` in protos/stagerun.proto, which
`stagerun help` shows; what else needs to be known of it, `Formula` says. A field that Solver lacks is a line there, and one in
`recipe.Solver`.

A policy that ends at max_iter stays at its end from there on, which is met where `policy_start_iter` lets the stage begin further on. The
lines and waves are computed from the nearer end, so that what is left of a rate just before zero has all of its digits. Pure, stdlib only.
"""

import bisect
import math
from dataclasses import dataclass

from stagerun.base.recipe import Knot
from stagerun.schedule.policies import Formula


def between(a: float, b: float, of_a: float, of_b: float) -> float:
    """of_a * a + of_b * b, where of_a + of_b is 1 but for rounding: exactly `a` where b is the same, never below both.

    >>> between(0.3, 0.3, 0.9, 0.1), between(1.0, 0.0, 1e-30, 1.0)
    (0.3, 1e-30)
    """
    return a + (b - a) * of_b if a <= b else b + (a - b) * of_a


def line(a: float, b: float, gone: float, whole: float) -> float:
    """On the straight line that goes from `a` to `b` in `whole` iterations, after `gone` of them."""
    return between(a, b, (whole - gone) / whole, gone / whole)


def wave(a: float, b: float, gone: float, whole: float) -> float:
    """On the half cosine from `a` to `b`; (1 + cos(x)) / 2 is the squared sine of (pi - x) / 2."""
    of_a = math.sin(math.pi * (whole - gone) / (2 * whole)) ** 2
    return between(a, b, of_a, math.sin(math.pi * gone / (2 * whole)) ** 2)


@dataclass(frozen=True, slots=True)
class Linear(Formula):
    """base_lr + (end_lr - base_lr) * iter / max_iter

    >>> [Linear(1.0, 0.5, 4)(i) for i in range(6)]
    [1.0, 0.875, 0.75, 0.625, 0.5, 0.5]
    """

    base_lr: float
    end_lr: float
    max_iter: int

    def __call__(self, iter: int) -> float:
        return self.end_lr if iter >= self.max_iter else line(self.base_lr, self.end_lr, iter, self.max_iter)


@dataclass(frozen=True, slots=True)
class Cosine(Formula):
    """end_lr + (base_lr - end_lr) * (1 + cos(pi * iter / max_iter)) / 2

    Loshchilov and Hutter, SGDR (arXiv:1608.03983), equation 5, without restarts: those are stages.

    >>> [round(Cosine(1.0, 0.0, 4)(i), 4) for i in range(5)]
    [1.0, 0.8536, 0.5, 0.1464, 0.0]
    """

    base_lr: float
    end_lr: float
    max_iter: int

    def __call__(self, iter: int) -> float:
        return self.end_lr if iter >= self.max_iter else wave(self.base_lr, self.end_lr, iter, self.max_iter)


@dataclass(frozen=True, slots=True)
class OneMinusSqrt(Formula):
    """end_lr + (base_lr - end_lr) * (1 - sqrt(iter / max_iter))

    The cooldown of Hägele et al., Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations (arXiv:2405.18392).

    >>> [OneMinusSqrt(1.0, 0.0, 4)(i) for i in (0, 1, 4)]
    [1.0, 0.5, 0.0]
    """

    base_lr: float
    end_lr: float
    max_iter: int

    def __call__(self, iter: int) -> float:
        if iter >= self.max_iter:
            return self.end_lr
        root = math.sqrt(iter / self.max_iter)
        left = (self.max_iter - iter) / self.max_iter / (1 + root)  # 1 - root
        return between(self.base_lr, self.end_lr, left, root)


@dataclass(frozen=True, slots=True)
class ExpEpoch(Formula):
    """base_lr * gamma ^ (iter / epoch_iter), where an epoch has epoch_iter iterations, no whole number of them in general

    >>> ExpEpoch(1.0, 0.25, 2.5)(5)
    0.0625
    """

    suspect = "gamma"
    factor = True
    base_lr: float
    gamma: float
    epoch_iter: float

    def __call__(self, iter: int) -> float:
        return self.base_lr * math.pow(self.gamma, iter / self.epoch_iter)


@dataclass(frozen=True, slots=True)
class PiecewiseLinear(Formula):
    """base_lr * factor, with straight lines from knot to knot; before the first and after the last it stays

    Of two knots at one place the first ends a line, and the second counts from there on.

    >>> rate = PiecewiseLinear(2.0, (Knot(iter=1, factor=0), Knot(iter=3, factor=1), Knot(iter=3, factor=0.5)))
    >>> [rate(i) for i in range(5)]
    [0.0, 0.0, 1.0, 1.0, 1.0]
    """

    suspect = "knot"
    base_lr: float
    knot: tuple[Knot, ...]

    def __call__(self, iter: int) -> float:
        passed = bisect.bisect_right([knot.iter for knot in self.knot], iter)
        if passed in (0, len(self.knot)):
            return self.base_lr * self.knot[max(passed - 1, 0)].factor
        a, b = self.knot[passed - 1], self.knot[passed]
        return self.base_lr * line(a.factor, b.factor, iter - a.iter, b.iter - a.iter)


SHAPES: dict[str, type[Formula]] = {
    "linear": Linear,
    "cosine": Cosine,
    "one_minus_sqrt": OneMinusSqrt,
    "exp_epoch": ExpEpoch,
    "piecewise_linear": PiecewiseLinear,
}
