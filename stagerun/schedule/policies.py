"""The learning-rate policies: a function each, of the iteration, counted from 0, and of the fields of Solver that its parameters name; and the
weights of averages that imitate a decay.

A new policy is a function and a row of POLICIES, and a line in the comment of `lr_policy` in protos/stagerun.proto, which `stagerun help`
shows. A new field is a line in that file, and one in `recipe.Solver`.

The names and formulas up to `plateau` are Caffe's (`sgd_solver.cpp` of sara-nl/caffe, 610a2fa9); the others are stagerun's. Policies that end at
max_iter keep their last value after it, for stages that `policy_start_iter` makes begin later. Pure, stdlib only.
"""

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

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
    """base_lr * gamma ^ (number of stepvalues <= iter); stepvalue ascends

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
    """base_lr * (1 - iter / lr_iter) ^ power; the stage usually ends before lr_iter

    Beyond lr_iter the base is negative: an even power rises again, an uneven one is below zero, a fraction is not a number (ValueError).

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

    `drops` follows from the losses (`schedule.improvement`). A plan, without losses, uses 0.

    >>> plateau(100, 1.0, 0.5, (10,), 1), plateau(100, 1.0, 0.5, (10,), 1, drops=1)
    (1.0, 0.5)
    """
    return base_lr * math.pow(gamma, drops)


# Lines and waves are computed from the nearer end, so that a rate just before zero has all its digits.


def between(a: float, b: float, of_a: float, of_b: float) -> float:
    """Return of_a * a + of_b * b, where of_a + of_b is 1 except for rounding: exactly `a` if b is the same, never below both.

    >>> between(0.3, 0.3, 0.9, 0.1), between(1.0, 0.0, 1e-30, 1.0)
    (0.3, 1e-30)
    """
    return a + (b - a) * of_b if a <= b else b + (a - b) * of_a


def line(a: float, b: float, gone: float, whole: float) -> float:
    """Return the value after `gone` iterations on a straight line from `a` to `b` in `whole` iterations."""
    return between(a, b, (whole - gone) / whole, gone / whole)


def linear(iter: int, base_lr: float, end_lr: float, max_iter: int) -> float:
    """base_lr + (end_lr - base_lr) * iter / max_iter

    >>> [linear(i, 1.0, 0.5, 4) for i in range(6)]
    [1.0, 0.875, 0.75, 0.625, 0.5, 0.5]
    """
    return end_lr if iter >= max_iter else line(base_lr, end_lr, iter, max_iter)


def cosine(iter: int, base_lr: float, end_lr: float, max_iter: int) -> float:
    """end_lr + (base_lr - end_lr) * (1 + cos(pi * iter / max_iter)) / 2

    Loshchilov and Hutter, SGDR (arXiv:1608.03983), equation 5, without restarts, which are stages.

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
    """base_lr * gamma ^ (iter / epoch_iter), for epochs of epoch_iter iterations, usually not a whole number

    >>> exp_epoch(5, 1.0, 0.25, 2.5)
    0.0625
    """
    return base_lr * math.pow(gamma, iter / epoch_iter)


def piecewise_linear(iter: int, base_lr: float, knot: tuple[Knot, ...]) -> float:
    """base_lr * factor, with straight lines from knot to knot; constant before the first and after the last

    Of two knots at one iteration the first ends a line, and the second counts from that iteration on.

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
    """A policy. `suspect`: the field to blame for an impossible rate. `factor`: gamma is a factor, at least 0, and not a rate."""

    formula: Callable[..., float]
    suspect: str = "base_lr"
    factor: bool = False


_by_factor = partial(Policy, suspect="gamma", factor=True)
POLICIES = {
    "fixed": Policy(fixed),
    "step": _by_factor(step),
    "exp": _by_factor(exp),
    "inv": Policy(inv, suspect="gamma"),
    "multistep": _by_factor(multistep),
    "poly": Policy(poly, suspect="policy_start_iter"),  # below zero only beyond its end
    "poly_cyc": Policy(poly_cyc, suspect="lr_iter"),
    "sigmoid": Policy(sigmoid, suspect="gamma"),
    "plateau": _by_factor(plateau),
    "linear": Policy(linear),
    "cosine": Policy(cosine),
    "one_minus_sqrt": Policy(one_minus_sqrt),
    "exp_epoch": _by_factor(exp_epoch),
    "piecewise_linear": Policy(piecewise_linear, suspect="knot"),
}


# -- the weights with which an average of one stage's snapshots imitates a decay of the rate
#
# Let a stage train at a constant rate from theta_0, after t_0 iterations; the updates between snapshots add d_j = theta_j - theta_(j-1). With
# the rate multiplied by s(t_j) in the j-th stretch, it would reach theta_0 + sum s(t_j) d_j, if the gradients stayed the same. By parts that is
# sum c_j theta_j, with c_j = s(t_j) - s(t_(j+1)), s(t_0) = 1 and s(t_(n+1)) = 0: weights that add up to 1 (Tian et al., arXiv:2507.17634, where
# c_0 = 1 - w_1, c_j = w_j - w_(j+1), c_k = w_k). `t_(n+1)`, where the rate would be 0, is one mean step after the last snapshot, so that each
# snapshot counts. A new shape is a row of DECAYS.

DECAYS = {"linear": linear, "cosine": cosine, "one_minus_sqrt": one_minus_sqrt}


def average_weights(shape: str | None, iters: Sequence[int]) -> tuple[float, ...]:
    """Return the weight of each snapshot. `iters`: their iterations, ascending; without a shape all are equal. KeyError for an unknown shape.

    >>> average_weights("linear", [100, 200, 300, 400]), average_weights("one_minus_sqrt", [6000, 6500])[1]
    ((0.25, 0.25, 0.25, 0.25), 0.2928932188134525)
    >>> [round(weight, 6) for weight in average_weights("cosine", [10, 11, 40, 100])]  # by hand: the rate reaches 0 at 130
    [0.000171, 0.146275, 0.707107, 0.146447]
    >>> average_weights(None, [5, 7]), average_weights("cosine", [9])
    ((0.5, 0.5), (1.0,))
    """
    n = len(iters)
    if shape is None or n == 1:
        return (1 / n,) * n
    # Multiplied by n - 1, all distances are whole numbers.
    distances = [(iter - iters[0]) * (n - 1) for iter in iters]
    length = (iters[-1] - iters[0]) * n
    rates = [*(DECAYS[shape](at, base_lr=1.0, end_lr=0.0, max_iter=length) for at in distances), 0.0]
    return tuple(a - b for a, b in pairwise(rates))
