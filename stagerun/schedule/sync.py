"""When the replicas of a stage meet (`sync_param`): all learning rates are known beforehand, and so is every synchronisation; and
the boundaries of a stage whose replicas never meet. Pure."""

from collections.abc import Collection
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
    """After how many updates of the stage the replicas are averaged: growing, the last at its end; () without replicas and with `ASYNC`.
    Stages that branch off are not among them: a stage's bits don't hang on those that start from it."""
    sync = solver.sync
    if sync is None or solver.asynchronous:
        return ()
    assert sync.period is not None
    rate = learning_rate(solver) if sync.rule is SyncRule.QSR else None
    found, at = [], parting(solver)
    while at < solver.max_iter:
        length = sync.period if rate is None else qsr(sync, rate(at))
        at = min(at + length, solver.max_iter)
        found.append(at)
    return tuple(found)


def boundaries(solver: Solver, branch_points: Collection[int]) -> tuple[int, ...]:
    """The iterations of a stage with `ASYNC` before which all pushes are applied, and none is under way: growing, the last at its end.

    >>> from stagerun.base.recipe import SyncMethod
    >>> how = Sync(method=SyncMethod.ASYNC, replicas=4, max_staleness=4)
    >>> rest = dict(base_lr=0.1, lr_policy="fixed", device_batch_size=1, batch_size=1, test_batch_size=1, random_seed=1, sync=how)
    >>> boundaries(Solver(max_iter=10, snapshot=4, test_interval=5, **rest), {7})
    (4, 5, 7, 8, 10)
    """
    every = [n for n in (solver.snapshot, solver.test_interval) if n]
    found = {i for n in every for i in range(n, solver.max_iter, n)} | set(branch_points)
    return (*sorted(i for i in found if i < solver.max_iter), solver.max_iter)


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
    assert sync.alpha is not None and sync.period is not None
    if lr == 0:
        return FOR_EVER
    return max(sync.period, min(FOR_EVER, floor((Fraction(repr(sync.alpha)) / Fraction(repr(lr))) ** 2)))
