"""order.Sampled: classes in their shares, exactly, and the images of a class equally often, at any position."""

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from facade import order, shares

LABELS = np.repeat(np.arange(4), [1, 7, 60, 332])[np.random.default_rng(1).permutation(400)]
EVEN = shares([Fraction(1)] * 4, 400)


@pytest.mark.parametrize(
    ("weights", "images", "expected"),
    [
        ([1, 1, 1], 100, [34, 33, 33]),
        ([1, 2, 0, 4], 10, [1, 3, 0, 6]),
        (["0.1", "0.2", "0.7"], 10, [1, 2, 7]),
        ([1] * 10, 12406, [1241] * 6 + [1240] * 4),
    ],
)
def test_shares_are_within_one_and_sum_up(weights, images, expected):
    assert shares([Fraction(w) for w in weights], images) == expected


def test_every_epoch_has_each_class_exactly_as_often_as_its_share():
    one = order.Sampled(3, LABELS, [10, 0, 250, 140])
    for epoch in (0, 1, 17):
        found = LABELS[one.at(epoch * 400, 400)]
        assert np.bincount(found, minlength=4).tolist() == [10, 0, 250, 140]


def test_the_images_of_a_class_come_equally_often_within_one_and_none_twice_before_all():
    found = order.Sampled(5, LABELS, EVEN).at(0, 400 * 7)
    for label in range(4):
        own = found[LABELS[found] == label]
        times = np.bincount(own, minlength=400)[label == LABELS]
        assert times.max() - times.min() <= 1, label
    # The largest class: 100 of 332 in an epoch, and others in the next.
    assert len(set(found[: 400 * 3][LABELS[found[: 400 * 3]] == 3].tolist())) == 300


def test_any_cut_into_stretches_gives_the_same_images():
    one = order.Sampled(5, LABELS, EVEN)
    whole = one.at(0, 2000)
    cuts = [0, 1, 2, 64, 399, 400, 401, 1203, 1999, 2000]
    assert np.array_equal(np.concatenate([one.at(a, b - a) for a, b in pairwise(cuts)]), whole)
    assert np.array_equal(one.at(10**12, 5), order.Sampled(5, LABELS, EVEN).at(10**12, 5))


def test_the_orders_are_frozen():
    assert order.Sampled(1, LABELS, EVEN).at(0, 8).tolist() == [29, 194, 151, 194, 147, 149, 5, 148]


def test_records_without_a_label_are_never_drawn():
    labels = np.array([-1, 0, 1, 1, -1, 0])
    assert set(order.Sampled(1, labels, [3, 3]).at(0, 60).tolist()) == {1, 2, 3, 5}


def test_it_needs_shares_of_all_images_and_an_image_of_each_class():
    with pytest.raises(ValueError, match="shares of all"):
        order.Sampled(1, np.array([0, 1]), [1, 0])
    with pytest.raises(ValueError, match="an image of each"):
        order.Sampled(1, np.array([0, 0]), [1, 1])
