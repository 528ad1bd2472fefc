"""The policy `plateau`: a learning rate that drops when the loss no longer falls. Values and a step; pure, stdlib only.

Intel Caffe's (`sgd_solver.cpp` and `solver.cpp` of sara-nl/caffe, 610a2fa9), in the order of a single process: the loss of an
iteration is known before its rate is taken. The one difference: the mean over average_loss iterations is taken anew each time
and not kept as a running sum, so that it has no history of roundings.
"""

import math
from dataclasses import dataclass, replace

from stagerun.base.recipe import Solver
from stagerun.schedule.policies import Formula


@dataclass(frozen=True, slots=True)
class Plateau(Formula):
    """base_lr * gamma ^ drops

    As a function of the iteration alone, what plan knows: the rate before any drop.

    >>> Plateau(1.0, 0.5, (10,), 1)(100), Plateau(1.0, 0.5, (10,), 1).after(1)
    (1.0, 0.5)
    """

    suspect = "gamma"
    factor = True

    base_lr: float
    gamma: float
    plateau_winsize: tuple[int, ...]
    average_loss: int

    def __call__(self, iter: int) -> float:
        return self.base_lr

    def after(self, drops: int) -> float:
        return self.base_lr * math.pow(self.gamma, drops)


@dataclass(frozen=True, slots=True)
class PlateauState:
    """What `plateau` remembers between iterations: a part of every snapshot.

    `drops`: Caffe's current_step. `lowest`: the lowest mean so far (minimum_loss), None before there is one. `since`: the
    iteration of the last new lowest, or of the last drop (iter_last_event). `losses`: of the last iterations, average_loss at
    most, the newest last.
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
    after = replace(before, losses=(*before.losses, loss)[-solver.average_loss :])
    if iter + solver.policy_start_iter < solver.warmup_iter:
        return after
    mean = math.fsum(after.losses) / len(after.losses)
    if after.lowest is None or mean < after.lowest:
        after = replace(after, lowest=mean, since=iter)
    windows = solver.plateau_winsize
    if after.drops < len(windows) and iter >= after.since + windows[after.drops]:
        after = replace(after, drops=after.drops + 1, since=iter)
    return after
