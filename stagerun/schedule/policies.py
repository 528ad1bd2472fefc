"""The learning-rate policies: one function each, of the iteration, counted from 0, and of the fields of Solver that its parameters name.

A new policy is a function and a row of POLICIES, and its line in the comment of `lr_policy` in protos/stagerun.proto, which `stagerun help`
shows. A field that Solver lacks is a line there, and one in `recipe.Solver`.

The names and formulas up to `plateau` are Caffe's (`sgd_solver.cpp` of sara-nl/caffe, 610a2fa9); the others are stagerun's. Those that end at
max_iter stay at their end from there on, for stages that `policy_start_iter` lets begin further on. Pure, stdlib only.
"""

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass

from stagerun.base.recipe import Knot


def fixed(iter: int, base_lr: float) -> float:
    """base_lr

    >>> fixed(7, 0.1)
    0.1
    """
    return base_lr


def step(iter: int, base_lr: float, gamma: float, stepsize: int) -> float:
    """base_lr * gamma ^ floor(iter / stepsize)

    >>> [step(i, 1.0, 0.5, 10) for i in (0, 9, 10, 20)]
    [1.0, 1.0, 0.5, 0.25]
    """
    return base_lr * math.pow(gamma, iter // stepsize)


def exp(iter: int, base_lr: float, gamma: float) -> float:
    """base_lr * gamma ^ iter

    >>> exp(2, 1.0, 0.5)
    0.25
    """
    return base_lr * math.pow(gamma, iter)


def inv(iter: int, base_lr: float, gamma: float, power: float) -> float:
    """base_lr * (1 + gamma * iter) ^ -power

    >>> inv(3, 1.0, 1.0, 1.0)
    0.25
    """
    return base_lr * math.pow(1.0 + gamma * iter, -power)


def multistep(iter: int, base_lr: float, gamma: float, stepvalue: tuple[int, ...]) -> float:
    """base_lr * gamma ^ (number of stepvalues <= iter); stepvalue grows

    >>> [multistep(i, 1.0, 0.5, (10, 30)) for i in (9, 10, 29, 30)]
    [1.0, 0.5, 0.5, 0.25]
    """
    return base_lr * math.pow(gamma, bisect.bisect_right(stepvalue, iter))


def poly(iter: int, base_lr: float, power: float, max_iter: int) -> float:
    """base_lr * (1 - iter / max_iter) ^ power

    >>> poly(5, 1.0, 2.0, 10)
    0.25
    """
    return base_lr * math.pow(1.0 - iter / max_iter, power)


def poly_cyc(iter: int, base_lr: float, power: float, lr_iter: int) -> float:
    """base_lr * (1 - iter / lr_iter) ^ power, where the stage usually ends before lr_iter

    Beyond lr_iter the base is negative: an even power rises again, an odd one is below zero, a broken one gives no number (ValueError).

    >>> poly_cyc(10, 1.0, 2.0, 20)
    0.25
    """
    return poly(iter, base_lr, power, lr_iter)


def sigmoid(iter: int, base_lr: float, gamma: float, stepsize: int) -> float:
    """base_lr / (1 + exp(-gamma * (iter - stepsize)))

    >>> sigmoid(50, 1.0, 0.1, 50)
    0.5
    """
    x = gamma * (iter - stepsize)
    if x < -700:  # exp would overflow a double; the value is below 1e-304 times base_lr
        return 0.0
    return base_lr / (1.0 + math.exp(-x))


def plateau(
    iter: int, base_lr: float, gamma: float, plateau_winsize: tuple[int, ...], average_loss: int, *, drops: int = 0
) -> float:
    """base_lr * gamma ^ drops

    `drops` follows from the losses (`schedule.plateau`). Of the iteration alone, which is what plan knows, it is 0.

    >>> plateau(100, 1.0, 0.5, (10,), 1), plateau(100, 1.0, 0.5, (10,), 1, drops=1)
    (1.0, 0.5)
    """
    return base_lr * math.pow(gamma, drops)


# The lines and waves are computed from the nearer end, so that what is left of a rate just before zero has all of its digits.


def between(a: float, b: float, of_a: float, of_b: float) -> float:
    """of_a * a + of_b * b, where of_a + of_b is 1 but for rounding: exactly `a` where b is the same, never below both.

    >>> between(0.3, 0.3, 0.9, 0.1), between(1.0, 0.0, 1e-30, 1.0)
    (0.3, 1e-30)
    """
    return a + (b - a) * of_b if a <= b else b + (a - b) * of_a


def line(a: float, b: float, gone: float, whole: float) -> float:
    """On the straight line that goes from `a` to `b` in `whole` iterations, after `gone` of them."""
    return between(a, b, (whole - gone) / whole, gone / whole)


def linear(iter: int, base_lr: float, end_lr: float, max_iter: int) -> float:
    """base_lr + (end_lr - base_lr) * iter / max_iter

    >>> [linear(i, 1.0, 0.5, 4) for i in range(6)]
    [1.0, 0.875, 0.75, 0.625, 0.5, 0.5]
    """
    return end_lr if iter >= max_iter else line(base_lr, end_lr, iter, max_iter)


def cosine(iter: int, base_lr: float, end_lr: float, max_iter: int) -> float:
    """end_lr + (base_lr - end_lr) * (1 + cos(pi * iter / max_iter)) / 2

    Loshchilov and Hutter, SGDR (arXiv:1608.03983), equation 5, without restarts: those are stages.

    >>> [round(cosine(i, 1.0, 0.0, 4), 4) for i in range(5)]
    [1.0, 0.8536, 0.5, 0.1464, 0.0]
    """
    if iter >= max_iter:
        return end_lr
    # (1 + cos(x)) / 2 is the squared sine of (pi - x) / 2.
    left = math.sin(math.pi * (max_iter - iter) / (2 * max_iter)) ** 2
    return between(base_lr, end_lr, left, math.sin(math.pi * iter / (2 * max_iter)) ** 2)


def one_minus_sqrt(iter: int, base_lr: float, end_lr: float, max_iter: int) -> float:
    """end_lr + (base_lr - end_lr) * (1 - sqrt(iter / max_iter))

    The cooldown of Hägele et al., Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations (arXiv:2405.18392).

    >>> [one_minus_sqrt(i, 1.0, 0.0, 4) for i in (0, 1, 4)]
    [1.0, 0.5, 0.0]
    """
    if iter >= max_iter:
        return end_lr
    root = math.sqrt(iter / max_iter)
    left = (max_iter - iter) / max_iter / (1 + root)  # 1 - root
    return between(base_lr, end_lr, left, root)


def exp_epoch(iter: int, base_lr: float, gamma: float, epoch_iter: float) -> float:
    """base_lr * gamma ^ (iter / epoch_iter), where an epoch has epoch_iter iterations, no whole number of them in general

    >>> exp_epoch(5, 1.0, 0.25, 2.5)
    0.0625
    """
    return base_lr * math.pow(gamma, iter / epoch_iter)


def piecewise_linear(iter: int, base_lr: float, knot: tuple[Knot, ...]) -> float:
    """base_lr * factor, with straight lines from knot to knot; before the first and after the last it stays

    Of two knots at one place the first ends a line, and the second counts from there on.

    >>> knots = (Knot(iter=1, factor=0), Knot(iter=3, factor=1), Knot(iter=3, factor=0.5))
    >>> [piecewise_linear(i, 2.0, knots) for i in range(5)]
    [0.0, 0.0, 1.0, 1.0, 1.0]
    """
    passed = bisect.bisect_right([k.iter for k in knot], iter)
    if passed in (0, len(knot)):
        return base_lr * knot[max(passed - 1, 0)].factor
    a, b = knot[passed - 1], knot[passed]
    return base_lr * line(a.factor, b.factor, iter - a.iter, b.iter - a.iter)


@dataclass(frozen=True, slots=True)
class Policy:
    """`suspect` is the field to point at where the rate is impossible. `factor`: gamma is a factor, at least 0, and not a rate."""

    formula: Callable[..., float]
    suspect: str = "base_lr"
    factor: bool = False


POLICIES = {
    "fixed": Policy(fixed),
    "step": Policy(step, suspect="gamma", factor=True),
    "exp": Policy(exp, suspect="gamma", factor=True),
    "inv": Policy(inv, suspect="gamma"),
    "multistep": Policy(multistep, suspect="gamma", factor=True),
    "poly": Policy(poly, suspect="policy_start_iter"),  # below zero only beyond its end
    "poly_cyc": Policy(poly_cyc, suspect="lr_iter"),
    "sigmoid": Policy(sigmoid, suspect="gamma"),
    "plateau": Policy(plateau, suspect="gamma", factor=True),
    "linear": Policy(linear),
    "cosine": Policy(cosine),
    "one_minus_sqrt": Policy(one_minus_sqrt),
    "exp_epoch": Policy(exp_epoch, suspect="gamma", factor=True),
    "piecewise_linear": Policy(piecewise_linear, suspect="knot"),
}
