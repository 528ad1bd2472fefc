"""The weights with which an average of one stage's snapshots imitates a decay of the rate. Pure, stdlib only.

Let a stage train at a constant rate from theta_0, after t_0 iterations, by what the updates between snapshots add: d_j = theta_j - theta_(j-1).
A rate that is s(t_j) as large in the j-th stretch would come to theta_0 + sum s(t_j) d_j, gradients taken as they were. By parts
that is sum c_j theta_j, with c_j = s(t_j) - s(t_(j+1)), s(t_0) = 1 and s(t_(n+1)) = 0: weights that add up to 1 (Tian et al.,
arXiv:2507.17634, where c_0 = 1 - w_1, c_j = w_j - w_(j+1), c_k = w_k). `t_(n+1)`, where the rate would be 0, lies one mean
step behind the last snapshot, so that each one counts. A new shape is a row of DECAYS.
"""

from collections.abc import Sequence
from itertools import pairwise

from stagerun.schedule.policies import cosine, linear, one_minus_sqrt

DECAYS = {"linear": linear, "cosine": cosine, "one_minus_sqrt": one_minus_sqrt}


def weights(shape: str | None, iters: Sequence[int]) -> tuple[float, ...]:
    """One for each snapshot, after so many iterations, which grow; without a shape all are the same. KeyError for an unknown shape.

    >>> weights("linear", [100, 200, 300, 400]), weights("one_minus_sqrt", [6000, 6500])[1]
    ((0.25, 0.25, 0.25, 0.25), 0.2928932188134525)
    >>> [round(weight, 6) for weight in weights("cosine", [10, 11, 40, 100])]  # by hand: the rate reaches 0 at 130
    [0.000171, 0.146275, 0.707107, 0.146447]
    >>> weights(None, [5, 7]), weights("cosine", [9])
    ((0.5, 0.5), (1.0,))
    """
    n = len(iters)
    if shape is None or n == 1:
        return (1 / n,) * n
    # Multiplied by n - 1, all places are whole numbers.
    places = [(iter - iters[0]) * (n - 1) for iter in iters]
    length = (iters[-1] - iters[0]) * n
    rates = [*(DECAYS[shape](place, base_lr=1.0, end_lr=0.0, max_iter=length) for place in places), 0.0]
    return tuple(a - b for a, b in pairwise(rates))
