"""Decisions by the results so far: the policy `plateau`, which drops the learning rate when the loss stops falling, and `early_stop`. Pure, stdlib
only.

`plateau` is as in Intel Caffe (`sgd_solver.cpp` and `solver.cpp` of sara-nl/caffe, 610a2fa9), in the order of a single process: the loss of an iteration
decides its rate. But the mean over average_loss iterations is not a running sum, so that it doesn't accumulate roundings.
"""

import math
from dataclasses import dataclass, replace

from stagerun.base.recipe import EarlyStop, Metric, Solver


@dataclass(frozen=True, slots=True)
class PlateauState:
    """The state of `plateau` between iterations, saved in every snapshot. In Caffe: current_step, minimum_loss,
    iter_last_event. `lowest`: the lowest mean so far. `since`: the iteration of the last new lowest, or of the last
    drop. `losses`: of the last iterations, at most average_loss, the newest last."""

    drops: int = 0
    lowest: float | None = None
    since: int = 0
    losses: tuple[float, ...] = ()


FRESH = PlateauState()


def follow_losses(before: PlateauState, solver: Solver, iter: int, loss: float) -> PlateauState:
    """Return the state that sets the rate of iteration `iter`. `loss`: its mean over the global batch, the same on every rank.

    In a warm-up, losses are only collected.

    >>> solver = Solver(base_lr=1.0, lr_policy="plateau", gamma=0.5, plateau_winsize=(2,), max_iter=9, batch_size=1,
    ...                 device_batch_size=1, random_seed=0, test_batch_size=1)
    >>> state, drops = FRESH, []
    >>> for iter, loss in enumerate([3.0, 2.0, 2.5, 2.5, 2.5]):
    ...     state = follow_losses(state, solver, iter, loss)
    ...     drops.append(state.drops)
    >>> drops
    [0, 0, 0, 1, 1]
    """
    drops, lowest, since = before.drops, before.lowest, before.since
    losses = (*before.losses, loss)[-solver.average_loss :]
    if iter + solver.policy_start_iter >= solver.warmup_iter:
        mean = math.fsum(losses) / len(losses)
        if lowest is None or mean < lowest:
            lowest, since = mean, iter
        if drops < len(solver.plateau_winsize) and iter >= since + solver.plateau_winsize[drops]:
            drops, since = drops + 1, iter
    return PlateauState(drops, lowest, since, losses)


# -- `early_stop`, decided after each evaluation


@dataclass(frozen=True, slots=True)
class BestSoFar:
    """The evaluations so far. `best`: the best one, after `at` updates; `tested`: the updates before the newest one. `ended`: the stage ends."""

    best: float | None = None
    at: int = 0
    tested: int = 0
    ended: bool = False


NOTHING_YET = BestSoFar()


def follow_tests(before: BestSoFar, how: EarlyStop, iter: int, value: float) -> BestSoFar:
    """Return the state after the evaluation of iteration `iter`. A value that is not finite is never better.

    >>> how, state = EarlyStop(metric=Metric.TOP1, patience_iter=20, min_delta=0.5), NOTHING_YET
    >>> for iter, top1 in enumerate([70.0, 71.0, 71.4, 71.5, 71.2], start=1):
    ...     state = follow_tests(state, how, 10 * iter, top1)
    ...     print(state.at, state.ended)
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
