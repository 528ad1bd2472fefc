"""Caffe's learning-rate policies: one frozen class each, called with the iteration, counted from 0 at the start of the stage.

The names and formulas are those of `sgd_solver.cpp` of sara-nl/caffe, 610a2fa9. stagerun's own policies are in `shapes`. Pure,
stdlib only.
"""

import bisect
import math
from dataclasses import dataclass
from typing import ClassVar, Protocol


class Policy(Protocol):
    def __call__(self, iter: int) -> float: ...


@dataclass(frozen=True, slots=True)
class Formula:
    """A policy that a schedule can name. A subclass's fields are fields of Solver of the same name; checks, notes and the search
    for corners follow from them, and from these:

    `suspect` is the field to point at where the rate is impossible. `factor`: gamma is a factor, at least 0, and not a rate.
    """

    suspect: ClassVar[str] = "base_lr"
    factor: ClassVar[bool] = False

    def __call__(self, iter: int) -> float:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Fixed(Formula):
    """base_lr

    >>> Fixed(0.1)(7)
    0.1
    """

    base_lr: float

    def __call__(self, iter: int) -> float:
        return self.base_lr


@dataclass(frozen=True, slots=True)
class Step(Formula):
    """base_lr * gamma ^ floor(iter / stepsize)

    >>> [Step(1.0, 0.5, 10)(i) for i in (0, 9, 10, 20)]
    [1.0, 1.0, 0.5, 0.25]
    """

    suspect = "gamma"
    factor = True

    base_lr: float
    gamma: float
    stepsize: int

    def __call__(self, iter: int) -> float:
        return self.base_lr * math.pow(self.gamma, iter // self.stepsize)


@dataclass(frozen=True, slots=True)
class Exp(Formula):
    """base_lr * gamma ^ iter

    >>> Exp(1.0, 0.5)(2)
    0.25
    """

    suspect = "gamma"
    factor = True

    base_lr: float
    gamma: float

    def __call__(self, iter: int) -> float:
        return self.base_lr * math.pow(self.gamma, iter)


@dataclass(frozen=True, slots=True)
class Inv(Formula):
    """base_lr * (1 + gamma * iter) ^ -power

    >>> Inv(1.0, 1.0, 1.0)(3)
    0.25
    """

    suspect = "gamma"

    base_lr: float
    gamma: float
    power: float

    def __call__(self, iter: int) -> float:
        return self.base_lr * math.pow(1.0 + self.gamma * iter, -self.power)


@dataclass(frozen=True, slots=True)
class MultiStep(Formula):
    """base_lr * gamma ^ (number of stepvalues <= iter); stepvalue grows

    >>> [MultiStep(1.0, 0.5, (10, 30))(i) for i in (9, 10, 29, 30)]
    [1.0, 0.5, 0.5, 0.25]
    """

    suspect = "gamma"
    factor = True

    base_lr: float
    gamma: float
    stepvalue: tuple[int, ...]

    def __call__(self, iter: int) -> float:
        return self.base_lr * math.pow(self.gamma, bisect.bisect_right(self.stepvalue, iter))


@dataclass(frozen=True, slots=True)
class Poly(Formula):
    """base_lr * (1 - iter / max_iter) ^ power

    >>> Poly(1.0, 2.0, 10)(5)
    0.25
    """

    suspect = "policy_start_iter"  # below zero only beyond its end

    base_lr: float
    power: float
    max_iter: int

    def __call__(self, iter: int) -> float:
        return self.base_lr * math.pow(1.0 - iter / self.max_iter, self.power)


@dataclass(frozen=True, slots=True)
class PolyCyc(Formula):
    """base_lr * (1 - iter / lr_iter) ^ power, where the stage usually ends before lr_iter

    Beyond lr_iter the base is negative: an even power rises again, an odd one is below zero, a broken one gives no number
    (ValueError).

    >>> PolyCyc(1.0, 2.0, 20)(10)
    0.25
    """

    suspect = "lr_iter"

    base_lr: float
    power: float
    lr_iter: int

    def __call__(self, iter: int) -> float:
        return self.base_lr * math.pow(1.0 - iter / self.lr_iter, self.power)


@dataclass(frozen=True, slots=True)
class Sigmoid(Formula):
    """base_lr / (1 + exp(-gamma * (iter - stepsize)))

    >>> Sigmoid(1.0, 0.1, 50)(50)
    0.5
    """

    suspect = "gamma"

    base_lr: float
    gamma: float
    stepsize: int

    def __call__(self, iter: int) -> float:
        x = self.gamma * (iter - self.stepsize)
        if x < -700:  # exp would overflow a double; the value is below 1e-304 times base_lr
            return 0.0
        return self.base_lr / (1.0 + math.exp(-x))


CAFFES: dict[str, type[Formula]] = {
    "fixed": Fixed,
    "step": Step,
    "exp": Exp,
    "inv": Inv,
    "multistep": MultiStep,
    "poly": Poly,
    "poly_cyc": PolyCyc,
    "sigmoid": Sigmoid,
}


@dataclass(frozen=True, slots=True)
class WarmUp:
    """iter < warmup_iter: (iter * base_lr + (warmup_iter - iter) * warmup_start_lr) / warmup_iter, then `after(iter)`

    The policy is read at the absolute iteration, so a falling one drops at the joint (SURFsara's rule). For `decay_from:
    WARMUP_END` it is a Shifted one.

    >>> [WarmUp(Poly(1.0, 1.0, 10), 1.0, 2, 0.0)(i) for i in (0, 1, 2)]
    [0.0, 0.5, 0.8]
    """

    after: Policy
    base_lr: float
    warmup_iter: int
    warmup_start_lr: float

    def __call__(self, iter: int) -> float:
        if iter < self.warmup_iter:
            ramp = iter * self.base_lr + (self.warmup_iter - iter) * self.warmup_start_lr
            return ramp / self.warmup_iter
        return self.after(iter)


@dataclass(frozen=True, slots=True)
class Shifted:
    """policy(iter + by)

    >>> Shifted(Poly(1.0, 1.0, 10), -5)(10)
    0.5
    """

    policy: Policy
    by: int

    def __call__(self, iter: int) -> float:
        return self.policy(iter + self.by)
