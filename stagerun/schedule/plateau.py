"""When the policy `plateau` drops the learning rate: where the loss no longer falls. Values and a step; pure, stdlib only.

Intel Caffe's (`sgd_solver.cpp` and `solver.cpp` of sara-nl/caffe, 610a2fa9), in the order of a single process: the loss of an iteration is
known before its rate is taken. But the mean over average_loss iterations is no running sum, so that it has no history of roundings.
"""

import math
from dataclasses import dataclass

from stagerun.base.recipe import Solver


@dataclass(frozen=True, slots=True)
class PlateauState:
    """What `plateau` remembers between iterations: a part of every snapshot. In Caffe: current_step, minimum_loss, iter_last_event.

    `lowest`: the lowest mean so far. `since`: the iteration of the last new lowest, or of the last drop. `losses`: of the last
    iterations, average_loss at most, the newest last.
    """

    drops: int = 0
    lowest: float | None = None
    since: int = 0
    losses: tuple[float, ...] = ()


FRESH = PlateauState()


def follow(before: PlateauState, solver: Solver, iter: int, loss: float) -> PlateauState:
    """The state that gives iteration `iter` its rate, which has `loss`: mean over the global batch, the same on every rank.

    In a warm-up, losses are collected and nothing else happens.

    >>> solver = Solver(base_lr=1.0, lr_policy="plateau", gamma=0.5, plateau_winsize=(2,), max_iter=9, batch_size=1,
    ...                 device_batch_size=1, random_seed=0, test_batch_size=1)
    >>> state, drops = FRESH, []
    >>> for iter, loss in enumerate([3.0, 2.0, 2.5, 2.5, 2.5]):
    ...     state = follow(state, solver, iter, loss)
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
