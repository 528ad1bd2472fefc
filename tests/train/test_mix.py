"""mixup, cutmix and label smoothing: as published, drawn from (seed, position)."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from facade import Mixture, losses

Box = losses.Box
CPU = torch.device("cpu")


FROZEN_MIXUP = (0.7939110398292542, [1, 3, 5, 4, 2, 0])
FROZEN_CUTMIX = (0.849609375, [1, 3, 5, 4, 2, 0], Box(0, 0, 11, 14))

# ---- what is drawn


@pytest.mark.parametrize("alpha", [0.1, 0.2, 0.8, 1.0, 2.5, 40.0])
def test_the_share_is_of_the_beta_distribution(alpha):
    made, count = losses.Mixing(1, alpha, 0.0), 2500
    drawn = [made.draw(position, 1, 8, 8) for position in range(count)]
    found = np.sort([m.share for m in drawn if m is not None])
    assert found[0] >= 0 and found[-1] <= 1
    variance = 1 / (4 * (2 * alpha + 1))
    assert abs(found.mean() - 0.5) < 5 * math.sqrt(variance / count)
    assert abs(found.var() - variance) < 0.1 * variance
    # Kolmogorov and Smirnov, against numpy's own generator; 1.95 is the distance at one in a thousand.
    theirs = np.sort(np.random.default_rng(5).beta(alpha, alpha, 10 * count))
    grid = np.concatenate([found, theirs])
    below = [np.searchsorted(x, grid, side="right") / len(x) for x in (found, theirs)]
    # Steps of 2^-24 pile up what is closer to 0 and 1 than that.
    inner = (grid > 1e-6) & (grid < 1 - 1e-6)
    assert np.abs(below[0] - below[1])[inner].max() < 1.95 * math.sqrt((1 + 0.1) / count)


def test_one_of_the_two_evenly_where_both_are_set():
    drawn = [losses.Mixing(1, 0.2, 1.0).draw(4 * i, 4, 32, 32) for i in range(2000)]
    boxes = sum(m is not None and m.box is not None for m in drawn)
    assert abs(boxes - 1000) < 5 * math.sqrt(500)
    assert all(m is not None and m.box is None for m in (losses.Mixing(1, 0.2, 0).draw(i, 2, 8, 8) for i in range(50)))
    assert all(
        m is not None and m.box is not None for m in (losses.Mixing(1, 0, 1).draw(i, 2, 8, 8) for i in range(50))
    )
    assert losses.Mixing(1, 0.0, 0.0).draw(0, 4, 32, 32) is None


def test_what_was_drawn_stays_so():
    """Part of what a snapshot means: these values are for ever."""
    mixup, cutmix = losses.Mixing(1, 0.2, 0.0).draw(512, 6, 32, 32), losses.Mixing(1, 0.0, 1.0).draw(512, 6, 32, 32)
    assert mixup is not None and cutmix is not None
    assert (mixup.share, mixup.partners.tolist()) == FROZEN_MIXUP
    assert (cutmix.share, cutmix.partners.tolist(), cutmix.box) == FROZEN_CUTMIX


def test_rectangles_are_those_of_the_paper():
    """Half the sides of an image of 32 x 64 for a share of 3/4; at the edge what lies outside is cut off."""
    assert losses.rectangle(0.75, 0.5, 0.5, 32, 64) == Box(8, 16, 24, 48)
    assert losses.rectangle(0.75, 0.0, 0.999, 32, 64) == Box(0, 47, 8, 64)
    assert losses.rectangle(1.0, 0.3, 0.3, 32, 64) == Box(9, 19, 9, 19)
    assert losses.rectangle(0.0, 0.5, 0.5, 32, 64) == Box(0, 0, 32, 64)


def test_the_share_of_cutmix_is_the_area_that_is_left():
    areas = []
    for position in range(300):
        drawn = losses.Mixing(2, 0.0, 1.0).draw(position, 2, 20, 30)
        assert drawn is not None and drawn.box is not None
        box = drawn.box
        assert 0 <= box.top <= box.bottom <= 20 and 0 <= box.left <= box.right <= 30
        areas.append((box.bottom - box.top) * (box.right - box.left) / 600)
        assert drawn.share == 1 - areas[-1]
    assert min(areas) == 0 and max(areas) > 0.7


# ---- what is done with it


def mixed(share: float, partners: list[int], box: Box | None = None) -> Mixture:
    found = losses.placed(Mixture(share, torch.tensor(partners), box), CPU)
    assert found is not None
    return found


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_images_are_laid_over_each_other(layout):
    x = torch.randn(4, 3, 5, 6).to(memory_format=layout)
    before = x.clone()
    losses.blend(x, mixed(0.25, [2, 0, 3, 1]))
    torch.testing.assert_close(x, 0.25 * before + 0.75 * before[[2, 0, 3, 1]])
    assert x.is_contiguous(memory_format=layout)


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_a_rectangle_of_the_partner_shows(layout):
    x = torch.randn(4, 3, 5, 6).to(memory_format=layout)
    expected, partners = x.clone(), [1, 0, 3, 2]
    expected[:, :, 1:4, 2:5] = x[partners][:, :, 1:4, 2:5]
    losses.blend(x, mixed(0.7, partners, Box(1, 2, 4, 5)))
    assert torch.equal(x, expected)
    losses.blend(x, mixed(1.0, partners, Box(2, 2, 2, 5)))
    assert torch.equal(x, expected), "an empty rectangle changes nothing"


def test_the_loss_is_that_of_mixed_and_smoothed_labels():
    torch.manual_seed(1)
    logits, labels = torch.randn(5, 4, dtype=torch.float64), torch.tensor([0, 3, 1, 1, 2])
    partners, share, smoothing = [1, 2, 3, 4, 0], 0.3, 0.1
    target = share * F.one_hot(labels, 4) + (1 - share) * F.one_hot(labels[partners], 4)
    target = (1 - smoothing) * target + smoothing / 4
    expected = -(target * logits.log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(losses.training_loss(logits, labels, smoothing, mixed(share, partners)), expected)
    assert torch.equal(losses.training_loss(logits, labels, 0.0, None), F.cross_entropy(logits, labels))


# ---- weights of classes


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_class_weights_are_a_factor_on_each_images_loss(smoothing):
    logits, labels = torch.randn(6, 4, dtype=torch.float64), torch.tensor([0, 1, 1, 3, 2, 0])
    weight = torch.tensor([0.5, 2.0, 0.0, 3.0], dtype=torch.float64)
    each = F.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="none")
    found = losses.training_loss(logits, labels, smoothing, None, weight)
    assert torch.allclose(found, sum(weight[y] * loss for y, loss in zip(labels, each, strict=True)) / 6)

    partners = np.array([3, 0, 5, 4, 1, 2])
    mixed = losses.placed(Mixture(0.25, torch.from_numpy(partners)), CPU)
    others = F.cross_entropy(logits, labels[partners], label_smoothing=smoothing, reduction="none")
    wanted = (0.25 * weight[labels] * each + 0.75 * weight[labels[partners]] * others).mean()
    assert torch.allclose(losses.training_loss(logits, labels, smoothing, mixed, weight), wanted)
