"""`stagerun rehearse --find-lr`: the sweep as values, and mistakes in asking for one."""

import math
import random
from dataclasses import replace

import pytest
from facade import sweep


def made(losses: list[float], iterations: int = 0, ended: str = "") -> sweep.Sweep:
    """One whose smoothed losses are these, at rates 1e-5, 1e-4.9 and so on."""
    points = tuple(sweep.Point(10 ** (-5 + i / 10), loss, loss) for i, loss in enumerate(losses))
    return sweep.Sweep(
        schedule="s", stage="a", start="seed 1", batch_size=8, iterations=iterations or len(points), points=points,
        ended=ended,
    )  # fmt: skip


def test_the_smoothed_loss_is_the_mean_with_weights_that_fade():
    smoothing, losses = sweep.Smoothing(), [3.0, 1.0, 2.0]
    assert [smoothing.add(0.1, loss) for loss in losses] == [False] * 3
    weights = [0.98**2, 0.98, 1.0]
    expected = sum(w * loss for w, loss in zip(weights, losses, strict=True)) / sum(weights)
    assert math.isclose(smoothing.points[-1].smoothed, expected)
    assert smoothing.points[0].smoothed == pytest.approx(3.0)


def test_the_steepest_fall_is_sought_before_the_lowest_loss():
    # Flat, a slope, a steeper one, the lowest at 18, then up, and down from there more steeply than ever.
    losses = [2.0] * 10 + [1.9, 1.8, 1.5, 1.2, 1.1, 1.05, 1.03, 1.01, 1.0, 1.2, 3.0, 1.5, 1.2] + [1.3] * 5
    found = sweep.suggestion(made(losses))
    assert found.steepest in (pytest.approx(10**-3.9), pytest.approx(10**-3.8))  # 1.8 -> 1.5 -> 1.2
    assert found.tenth == pytest.approx(10 ** (-5 + 1.8) / 10)
    assert sweep.warnings(made(losses)) == []


def test_what_makes_a_sweep_worth_little_is_said():
    falling, rising = [2.0 - i / 100 for i in range(60)], [1.0 + i / 100 for i in range(60)]
    assert sweep.warnings(made(falling)) == ["the loss was still falling at the last rate: take a larger --last-rate"]
    assert sweep.warnings(made(rising)) == ["the loss never fell: take a smaller --first-rate, or more --iters"]
    assert sweep.suggestion(made(rising)).steepest is None
    few = made(falling[:9], iterations=60, ended="it was interrupted")
    assert [text.partition(":")[0] for text in sweep.warnings(few)] == [
        "the sweep ended early",
        "9 iterations gave too little for a suggestion",
    ]
    assert sweep.suggestion(few).tenth is None


@pytest.mark.parametrize("iterations, fall, told", [(30, 0.0, False), (30, 0.05, False), (200, 0.5, True)])
def test_a_fall_that_may_be_chance_suggests_nothing(iterations, fall, told):
    smoothing, drawn = sweep.Smoothing(), random.Random(1)
    for i in range(iterations):
        x = i / iterations
        smoothing.add(sweep.rate(i, 1e-7, 10, iterations), 2.3 - fall * (x > 0.5) + 2 * (x > 0.8) + drawn.gauss(0, 0.1))
    noisy = replace(made([]), points=tuple(smoothing.points), iterations=iterations)
    found, said = sweep.suggestion(noisy), sweep.warnings(noisy)
    assert (found.steepest is not None) == (found.tenth is not None) == told
    assert bool(said) != told and all("by no more than chance" in text for text in said)
