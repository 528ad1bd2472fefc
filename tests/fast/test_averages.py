"""The weights of an average that imitates a decay, against the decay itself."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from stagerun.schedule.averages import weights

# Of how much of the way is gone, as the papers write them.
SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda x: 1 - x,
    "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
    "one_minus_sqrt": lambda x: 1 - math.sqrt(x),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("iters", [range(6000, 8001, 500), [10, 11, 40, 100], [5, 6], range(1, 1001)])
def test_the_weights_come_to_what_the_decay_comes_to(shape: str, iters: list[int]) -> None:
    """Update by update: what each stretch added at the constant rate, times the decay where the stretch ends."""
    rng = np.random.default_rng(1)
    theta = rng.standard_normal((len(iters), 50)).cumsum(0)
    zero = iters[-1] + (iters[-1] - iters[0]) / (len(iters) - 1)
    decayed = theta[0].copy()
    for j in range(1, len(iters)):
        rate = SHAPES[shape]((iters[j] - iters[0]) / (zero - iters[0]))
        decayed += rate * (theta[j] - theta[j - 1])
    found = weights(shape, iters)
    assert sum(found) == pytest.approx(1, abs=1e-14) and min(found) > 0
    assert np.abs(np.array(found) @ theta - decayed).max() < 1e-12 * np.abs(theta).max()


def test_a_line_over_even_steps_is_the_plain_mean() -> None:
    assert weights("linear", range(100, 501, 100)) == pytest.approx(weights(None, range(100, 501, 100)), abs=1e-16)
