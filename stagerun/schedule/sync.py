"""When the replicas of a stage meet (`sync_param`): all learning rates are known beforehand, and so is every synchronisation. Pure."""

from fractions import Fraction
from functools import lru_cache
from math import floor

from stagerun.base.recipe import Solver, Sync, SyncRule, SyncStart
from stagerun.schedule.rates import learning_rate, warm_up_end

FOR_EVER = 1 << 62  # iterations


def parting(solver: Solver) -> int:
    """The iteration from which on replicas are updated each by itself."""
    assert solver.sync is not None
    return warm_up_end(solver) if solver.sync.start is SyncStart.WARMUP_END else 0


@lru_cache(maxsize=64)
def synchronisations(solver: Solver) -> tuple[int, ...]:
    """After how many updates of the stage the replicas are averaged: growing, the last at its end. Nothing for a stage without.

    Stages that branch off are not among them: a stage's bits don't hang on those that start from it.
    """
    sync = solver.sync
    if sync is None:
        return ()
    rate = learning_rate(solver) if sync.rule is SyncRule.QSR else None
    found, at = [], parting(solver)
    while at < solver.max_iter:
        length = sync.period if rate is None else qsr(sync, rate(at))
        at = min(at + length, solver.max_iter)
        found.append(at)
    return tuple(found)


def qsr(sync: Sync, lr: float) -> int:
    """Iterations until the next synchronisation, by the quadratic rule: max(period, floor((alpha / lr)^2)), Gu, Lyu, Arora, Zhang and
    Huang, A Quadratic Synchronization Rule for Distributed Deep Learning (arXiv:2310.14423), algorithm 2. `lr` is that of the next
    update.

    On the decimal numbers: 0.3 / 0.1 is 3.

    >>> from stagerun.base.recipe import SyncMethod
    >>> how = Sync(method=SyncMethod.LOCAL, replicas=4, rule=SyncRule.QSR, period=4, alpha=0.3)
    >>> [qsr(how, lr) for lr in (0.3, 0.1, 0.07)]
    [4, 9, 18]
    """
    assert sync.alpha is not None
    if lr == 0:
        return FOR_EVER
    return max(sync.period, min(FOR_EVER, floor((Fraction(repr(sync.alpha)) / Fraction(repr(lr))) ** 2)))
