"""rectangles and lighting: the distributions that their sources state, on any machine the same."""

import importlib
import math

import numpy as np
import pytest
from drawn import examples
from hypothesis import given
from hypothesis import strategies as st

from stagerun.base import order
from stagerun.base.recipe import RandomResizedCrop
from stagerun.data import transform
from stagerun.data.jpeg import Rectangle
from stagerun.models.vision import torchvision_models

N = 20_000

FIRST_RECTANGLES = [
    Rectangle(48, 56, 311, 294),
    Rectangle(43, 123, 245, 266),
    Rectangle(45, 46, 318, 330),
    Rectangle(0, 89, 357, 411),
]
FIRST_LIGHTING = [
    ("-0x1.afd67c0000000p+1", "-0x1.bc641c0000000p+1", "-0x1.b34e400000000p+1"),
    ("0x1.556b380000000p+1", "0x1.52816c0000000p+1", "0x1.5015920000000p+1"),
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
def test_rectangles_are_spread_like_torchvisions(param: RandomResizedCrop, height: int, width: int) -> None:
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
def test_rectangles_lie_inside(
    height: int, width: int, area: float, low: float, high: float, attempts: int, seed: int
) -> None:
    param = RandomResizedCrop(min_area_ratio=area, min_aspect_ratio=low, max_aspect_ratio=high, max_attempt=attempts)
    for p in drawn(param, height, width, 3, seed):
        assert p.height >= 1 and p.width >= 1 and p.top >= 0 and p.left >= 0
        assert p.top + p.height <= height and p.left + p.width <= width


@pytest.mark.parametrize(("height", "width"), [(40, 4000), (4000, 40), (3, 900), (100, 110)])
def test_where_none_fits_the_largest_allowed_one_is_cut_from_the_centre(height: int, width: int) -> None:
    """torchvision's own fallback: its attempts are made to fail by an area larger than the image."""
    param = RandomResizedCrop(min_area_ratio=1.5, max_area_ratio=2.0)
    other = theirs(param, height, width, 1)[0].tolist()
    assert drawn(param, height, width, 1)[0] == Rectangle(*other)


def test_ratios_are_the_exponentials_of_even_logarithms() -> None:
    coarse, fine = transform._ratios(0.75, 4 / 3)
    assert (len(coarse), len(fine), coarse[0], fine[0]) == (1024, 1024, 0.75, 1.0)
    for k in [*range(0, 2**20, 997), 2**20 - 1]:
        expected = 0.75 * math.exp(k / 2**20 * math.log((4 / 3) / 0.75))
        assert coarse[k >> 10] * fine[k & 1023] == pytest.approx(expected, rel=1e-13)
    assert transform._ratios(1.5, 1.5) == ([1.5] * 1024, [1.0] * 1024)


def test_drawn_rectangles_and_lighting_stay_as_they_are() -> None:
    """Values of this formula on any machine; a change here changes every training that draws them."""
    assert drawn(RandomResizedCrop(), 375, 500, 4) == FIRST_RECTANGLES
    rows = order.draws(1, np.arange(2, dtype=np.int64), transform.LIGHTING_NUMBERS)
    assert [tuple(x.hex() for x in transform.lighting(0.1, row)) for row in rows] == FIRST_LIGHTING


def test_thousandths_reach_both_ends_and_no_further() -> None:
    low, high = np.float32(0.75), np.float32(1) / np.float32(0.75)
    found = {float(transform.thousandths(k, low, high)) for k in range(5000)}
    assert len(found) == 584
    assert (min(found), max(found)) == (0.75, float(np.float32(1.333)))
    areas = {float(transform.thousandths(k, np.float32(0.08), np.float32(1))) for k in range(5000)}
    assert len(areas) == 921 and max(areas) == 1.0 and min(areas) == pytest.approx(0.08, abs=1e-7)


def test_lighting_has_the_covariance_of_its_components() -> None:
    """sum over components of (std * 255 * eigenvalue)**2 * v v^T, rows and columns B, G, R; mean 0."""
    rows = order.draws(3, np.arange(N, dtype=np.int64), transform.LIGHTING_NUMBERS)
    offsets = np.array([transform.lighting(0.1, row) for row in rows])
    assert np.array_equal(offsets, offsets.astype(np.float32))
    vectors, values = np.array(transform._EIGENVECTORS)[::-1], np.array(transform._EIGENVALUES)
    expected = (vectors * (25.5 * values) ** 2) @ vectors.T
    assert np.cov(offsets.T) == pytest.approx(expected, rel=0.05)
    assert np.abs(offsets.mean(axis=0)).max() < 4 * math.sqrt(expected.max() / N)
    assert transform.lighting(0.0, rows[0]) == (0.0, 0.0, 0.0)


def test_the_components_are_at_right_angles() -> None:
    vectors = np.array(transform._EIGENVECTORS)
    assert vectors.T @ vectors == pytest.approx(np.eye(3), abs=2e-4)


def test_normals_are_normal() -> None:
    rows = order.draws(5, np.arange(N // 2, dtype=np.int64), 2).tolist()
    values = np.sort(np.array([transform.normals(*row) for row in rows]).ravel())
    expected = np.array([0.5 * (1 + math.erf(v / math.sqrt(2))) for v in values])
    assert np.abs(expected - (np.arange(N) + 0.5) / N).max() < 1.95 / math.sqrt(N)
    # The smallest and the largest number of all: no logarithm of 0.
    for a in (0, 2**64 - 1):
        assert all(math.isfinite(x) and abs(x) < 9 for x in transform.normals(a, a))


@given(st.floats(1e-300, 1e300))
def test_our_logarithm_is_the_librarys_to_the_last_bits(x: float) -> None:
    assert transform._log(x) == pytest.approx(math.log(x), rel=1e-15, abs=1e-18)


@given(st.floats(0, 1, exclude_max=True))
def test_our_cosine_and_sine_are_the_librarys_to_the_last_bits(turn: float) -> None:
    cosine, sine = transform._cos_sin(turn)
    assert cosine == pytest.approx(math.cos(2 * math.pi * turn), abs=2e-15)
    assert sine == pytest.approx(math.sin(2 * math.pi * turn), abs=2e-15)
