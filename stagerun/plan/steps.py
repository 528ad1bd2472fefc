"""The steps of a learning-rate policy. Pure."""

from collections.abc import Iterator
from typing import NamedTuple

from stagerun.base.recipe import DecayFrom, Solver
from stagerun.plan.described import JUMP
from stagerun.schedule import learning_rate, warm_up_end

# A change from one iteration to the next is a step if the changes around it are smaller than this share of it.
ISOLATED = 1 / 8
# A policy with more steps is like a slope.
MOST_STEPS = 300


class Step(NamedTuple):
    """`before` and `after`: rates of the updates before and at `iter`."""

    iter: int
    before: float
    after: float


def policy_steps(solver: Solver) -> Iterator[Step]:
    """Yield the steps that the policy itself makes, not that at the end of a warm-up."""
    rate, start = learning_rate(solver), warm_up_end(solver)
    shift = (solver.warmup_iter if solver.decay_from is DecayFrom.WARMUP_END else 0) - solver.policy_start_iter
    corners: list[float] = [*solver.stepvalue, *(knot.iter for knot in solver.knot), solver.lr_iter or 0]
    length = solver.max_iter + solver.policy_start_iter
    if solver.lr_policy == "step" and solver.stepsize and length // solver.stepsize <= MOST_STEPS:
        corners += range(0, length + 1, solver.stepsize)
    corners = [start, *(corner + shift for corner in corners)]
    for iter in sorted({int(corner) + more for corner in corners for more in (0, 1)} - {start}):
        if 2 <= iter < solver.max_iter - 1:
            one, before, after, two = (rate(i) for i in range(iter - 2, iter + 2))
            change, around = abs(after - before), max(abs(before - one), abs(two - after))
            if change > JUMP * max(before, after) and around < ISOLATED * change:
                yield Step(iter, before, after)
