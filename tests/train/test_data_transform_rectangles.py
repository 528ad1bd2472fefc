"""Rectangles: the distributions that their sources state, on any machine the same."""

import importlib
import math

import numpy as np
import pytest
from drawn import examples
from facade import RandomResizedCrop, Rectangle, order, torchvision_models, transform
from hypothesis import given
from hypothesis import strategies as st

N = 20_000

FIRST_RECTANGLES = [
    Rectangle(48, 56, 311, 294),
    Rectangle(43, 123, 245, 266),
    Rectangle(45, 46, 318, 330),
    Rectangle(0, 89, 357, 411),
]


def drawn(param: RandomResizedCrop, height: int, width: int, n: int, seed: int = 1) -> list[Rectangle]:
    needed = transform.TORCHVISION_NUMBERS * param.max_attempt
    rows = order.draws(seed, np.arange(n, dtype=np.int64), needed)
    return [transform.torchvision_rectangle(param, row, height, width) for row in rows]


def theirs(param: RandomResizedCrop, height: int, width: int, n: int) -> np.ndarray:
    import torch

    torchvision_models()  # imports torchvision beside any build of torch
    transforms = importlib.import_module("torchvision.transforms")
    image = torch.empty(1, height, width)
    scale = [param.min_area_ratio, param.max_area_ratio]
    ratio = [param.min_aspect_ratio, param.max_aspect_ratio]
    torch.manual_seed(1)
    return np.array([transforms.RandomResizedCrop.get_params(image, scale, ratio) for _ in range(n)])


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """Kolmogorov's and Smirnov's: the largest difference of two distribution functions."""
    places = np.unique(np.concatenate([a, b]))
    below = [np.searchsorted(np.sort(x), places, side="right") / len(x) for x in (a, b)]
    return float(np.abs(below[0] - below[1]).max())


@pytest.mark.parametrize(
    ("param", "height", "width"),
    [
        (RandomResizedCrop(), 375, 500),
        (RandomResizedCrop(min_area_ratio=0.5, min_aspect_ratio=0.5, max_aspect_ratio=3.0), 400, 150),
    ],
)
def test_rectangles_are_spread_like_torchvisions(param, height, width):
    n = N if width == 500 else N // 4
    ours = np.array([(p.top, p.left, p.height, p.width) for p in drawn(param, height, width, n)])
    other = theirs(param, height, width, n)
    most = 1.95 * math.sqrt(2 / n)  # passed by 1 in 1000 pairs of samples of one distribution
    for what in (
        lambda x: x[:, 0],
        lambda x: x[:, 1],
        lambda x: x[:, 2],
        lambda x: x[:, 3],
        lambda x: x[:, 2] * x[:, 3],
        lambda x: x[:, 3] / x[:, 2],
        lambda x: x[:, 0] + x[:, 2],
    ):
        assert distance(what(ours), what(other)) < most


@examples(200)
@given(
    st.integers(1, 600),
    st.integers(1, 600),
    st.floats(0.001, 1),
    st.floats(0.05, 1),
    st.floats(1, 20),
    st.integers(1, 4),
    st.integers(0, 2**63),
)
def test_rectangles_lie_inside(height, width, area, low, high, attempts, seed):
    param = RandomResizedCrop(min_area_ratio=area, min_aspect_ratio=low, max_aspect_ratio=high, max_attempt=attempts)
    for p in drawn(param, height, width, 3, seed):
        assert p.height >= 1 and p.width >= 1 and p.top >= 0 and p.left >= 0
        assert p.top + p.height <= height and p.left + p.width <= width


@pytest.mark.parametrize(("height", "width"), [(40, 4000), (4000, 40), (3, 900), (100, 110)])
def test_where_none_fits_the_largest_allowed_one_is_cut_from_the_centre(height, width):
    """torchvision's own fallback: its attempts are made to fail by an area larger than the image."""
    param = RandomResizedCrop(min_area_ratio=1.5, max_area_ratio=2.0)
    other = theirs(param, height, width, 1)[0].tolist()
    assert drawn(param, height, width, 1)[0] == Rectangle(*other)


def test_drawn_rectangles_stay_as_they_are():
    """Values of this formula on any machine; a change here changes every training that draws them."""
    assert drawn(RandomResizedCrop(), 375, 500, 4) == FIRST_RECTANGLES
