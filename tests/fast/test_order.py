"""order: every image once per epoch, in an order that is fixed for ever and looks like chance."""

from itertools import pairwise

import numpy as np
import pytest
from facade import order


@pytest.mark.parametrize("images", [1, 2, 3, 7, 16, 255, 256, 257, 1000, 7919, 60000])
def test_an_epoch_has_every_record_once(images):
    for epoch in (0, 1, 5):
        found = order.EveryRecord(3, images, True).at(epoch * images, images)
        assert np.array_equal(np.sort(found), np.arange(images))


def test_orders_are_frozen():
    found = order.EveryRecord(1, 1000, True)
    assert found.at(0, 12).tolist() == [890, 35, 198, 191, 371, 233, 218, 529, 434, 789, 773, 792]
    assert found.at(995, 10).tolist() == [968, 502, 447, 553, 624, 905, 840, 796, 369, 216]
    assert order.EveryRecord(7, 5, True).at(0, 15).tolist() == [1, 3, 0, 2, 4, 0, 1, 4, 2, 3, 1, 3, 4, 2, 0]
    far = order.EveryRecord(2, 1281167, True).at(3 * 1281167, 6)
    assert far.tolist() == [341581, 1278312, 1271207, 1032959, 751673, 1104151]


def test_draws_and_dropout_seeds_are_frozen():
    drawn = order.draws(1, np.array([0, 1, 10**12]), 2)
    assert drawn.tolist() == [
        [0x715B8F09695611FD, 0xF937EF0C513668AF],
        [0x4A3F23C70B2AC7E8, 0x7DA33DD74F5A571D],
        [0xBC766D42F3006380, 0x6F179505872AA99B],
    ]
    assert (order.dropout_seed(1, 0), order.dropout_seed(1, 64)) == (2265308886254992880, 6326991734265137704)
    assert 0 <= order.dropout_seed(2**63 - 1, 2**62) < 2**63


def test_any_cut_into_stretches_gives_the_same_images():
    whole = order.EveryRecord(5, 101, True).at(0, 1000)
    cuts = [0, 1, 2, 64, 100, 101, 102, 350, 999, 1000]
    parts = [order.EveryRecord(5, 101, True).at(a, b - a) for a, b in pairwise(cuts)]
    assert np.array_equal(np.concatenate(parts), whole)


def test_without_shuffle_it_is_the_key_order_round_and_round():
    assert order.EveryRecord(1, 5, False).at(3, 7).tolist() == [3, 4, 0, 1, 2, 3, 4]


def test_of_a_billion_records_any_place_looks_like_chance():
    images = 10**9  # whose order as a table would be 8 GB
    parts = [order.EveryRecord(3, images, True).at(start, 1000) for start in (0, images // 2, 5 * images - 500)]
    found = np.concatenate(parts)
    assert found.min() >= 0 and found.max() < images
    assert len(set(found.tolist())) > 2995  # stretches of different epochs may share a few
    # Evenly over the range: chi-square of 30 equal parts, 29 degrees of freedom, 0.1 % point.
    counts = np.bincount(found * 30 // images, minlength=30)
    assert float(((counts - 100.0) ** 2 / 100.0).sum()) < 58.3
