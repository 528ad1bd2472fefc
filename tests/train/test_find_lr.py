"""`stagerun rehearse --find-lr`: the suggestion from the losses of a sweep."""

import math
import random

import pytest
from facade import trials

Point, following, suggestion = trials.Point, trials.following, trials.suggestion


def made(losses: list[float]) -> list[trials.Point]:
    """Points with these smoothed losses, at rates 1e-5, 1e-4.9 and so on."""
    return [Point(10 ** (-5 + i / 10), loss, loss) for i, loss in enumerate(losses)]


def test_the_smoothed_loss_is_the_mean_with_weights_that_fade():
    points: list[trials.Point] = []
    for loss in (losses := [3.0, 1.0, 2.0]):
        points.append(following(points, 0.1, loss))
    weights = [0.98**2, 0.98, 1.0]
    expected = sum(w * loss for w, loss in zip(weights, losses, strict=True)) / sum(weights)
    assert math.isclose(points[-1].smoothed, expected)
    assert points[0].smoothed == pytest.approx(3.0)


def test_the_steepest_fall_is_sought_before_the_lowest_loss():
    # Flat, a slope, a steeper one, the lowest at 18, then up, and down from there more steeply than ever.
    losses = [2.0] * 10 + [1.9, 1.8, 1.5, 1.2, 1.1, 1.05, 1.03, 1.01, 1.0, 1.2, 3.0, 1.5, 1.2] + [1.3] * 5
    steepest, tenth, doubt = suggestion(made(losses), len(losses))
    assert steepest in (pytest.approx(10**-3.9), pytest.approx(10**-3.8))  # 1.8 -> 1.5 -> 1.2
    assert tenth == pytest.approx(10 ** (-5 + 1.8) / 10) and doubt == ""


def test_doubts_about_a_sweep_are_said():
    falling, rising = [2.0 - i / 100 for i in range(60)], [1.0 + i / 100 for i in range(60)]
    *_, doubt = suggestion(made(falling), 60)
    assert doubt == "the loss was still falling at the last rate: take a larger --last-rate"
    assert suggestion(made(rising), 60) == (
        None, None, "the loss never fell: take a smaller --first-rate, or more --iters"
    )  # fmt: skip
    steepest, tenth, doubt = suggestion(made(falling[:9]), 60)
    assert steepest is tenth is None and doubt.startswith("9 iterations gave too little for a suggestion")


@pytest.mark.parametrize("iterations, fall, told", [(30, 0.0, False), (30, 0.05, False), (200, 0.5, True)])
def test_a_fall_that_may_be_chance_suggests_nothing(iterations, fall, told):
    drawn, points = random.Random(1), list[Point]()
    for i in range(iterations):
        x = i / iterations
        loss = 2.3 - fall * (x > 0.5) + 2 * (x > 0.8) + drawn.gauss(0, 0.1)
        points.append(following(points, 1e-7 * 1e8 ** (i / (iterations - 1)), loss))
    steepest, tenth, doubt = suggestion(points, iterations)
    assert (steepest is not None) == (tenth is not None) == told
    assert bool(doubt) != told and (told or "by no more than chance" in doubt)
