"""When `early_stop` ends a stage: after each evaluation, from what it came to. Pure."""

import math
from dataclasses import dataclass, replace

from stagerun.base.recipe import EarlyStop, Metric


@dataclass(frozen=True, slots=True)
class BestSoFar:
    """`best`: the best evaluation so far, after `at` updates; `tested`: the updates before the newest one. `ended`: the stage ends there."""

    best: float | None = None
    at: int = 0
    tested: int = 0
    ended: bool = False


NOTHING_YET = BestSoFar()


def follow(before: BestSoFar, how: EarlyStop, iter: int, value: float) -> BestSoFar:
    """After the evaluation of iteration `iter`. A value that is not finite is never better.

    >>> how, found = EarlyStop(metric=Metric.TOP1, patience_iter=20, min_delta=0.5), NOTHING_YET
    >>> for iter, top1 in enumerate([70.0, 71.0, 71.4, 71.5, 71.2], start=1):
    ...     found = follow(found, how, 10 * iter, top1)
    ...     print(found.at, found.ended)
    10 False
    20 False
    20 False
    20 True
    20 True
    """
    sign = -1.0 if how.metric is Metric.LOSS else 1.0
    better = before.best is None or sign * value > sign * before.best + how.min_delta
    if math.isfinite(value) and better:
        return BestSoFar(value, iter, iter)
    return replace(before, tested=iter, ended=iter - before.at >= how.patience_iter)
