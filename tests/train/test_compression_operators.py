"""Every operator of compressed gradients against its formula, written once more with numpy; and what a reducer relies on, whatever the method:
equal bits on all ranks, residuals, sizes, averages, and that nothing goes unnoticed."""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
import pytest
import torch
from compressing import DRAW, drive, make, numbers, one, same
from facade import Draw, Memory, Method
from hypothesis import given
from hypothesis import strategies as st


def uniform(n: int) -> np.ndarray:
    return DRAW.of(0).uniform(torch.device("cpu"))(n).numpy()


@st.composite
def vectors(draw: st.DrawFn) -> np.ndarray:
    """Short, of either type, rich in zeros, ties and numbers that are hardly there."""
    dtype = draw(st.sampled_from(["f4", "f8"]))
    width = 32 if dtype == "f4" else 64
    tiny = float(np.finfo(dtype).smallest_subnormal)
    number = st.sampled_from([0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 127.0, tiny, -tiny, 3 * tiny, 1e-30, 1e15]) | st.floats(
        -1e3, 1e3, width=width
    )
    return np.array(draw(st.lists(number, min_size=1, max_size=70)), dtype)


ratios = st.sampled_from([0.001, 0.01, 0.1, 0.3, 0.5, 0.9, 1.0])


# -- formulas ---------------------------------------------------------------------------------------------------------


def top_k(c: np.ndarray, ratio: float) -> np.ndarray:
    keep = np.argsort(-np.abs(c), kind="stable")[: max(1, math.floor(len(c) * Fraction(repr(ratio))))]
    d = np.zeros_like(c)
    d[keep] = c[keep]
    return d


@given(vectors(), ratios)
def test_top_k(c, ratio):
    assert same(one(Method.TOP_K, c, ratio=ratio), top_k(c, ratio))


@pytest.mark.long
def test_top_k_where_a_sample_misleads():
    c = numbers(1 << 18)
    c[:: (1 << 18) // (1 << 15) | 1] *= 1000  # all that is sampled
    assert same(one(Method.TOP_K, c, ratio=0.5), top_k(c, 0.5))
    c = numbers(1 << 18)
    c[1:5] = np.nan, np.inf, -np.inf, np.nan
    found = one(Method.TOP_K, c, ratio=0.01)
    assert np.array_equal(found[1:5], c[1:5], equal_nan=True)


@given(vectors(), st.sampled_from([1e-45, 0.001, 0.5, 2000.0]))
def test_thresholds(c, threshold):
    keep = np.abs(c) >= np.asarray(threshold, c.dtype)
    assert same(one(Method.THRESHOLD, c, threshold=threshold), np.where(keep, c, 0).astype(c.dtype))


@given(vectors(), ratios)
def test_random_k(c, ratio):
    n = len(c)
    k = max(1, math.floor(n * Fraction(repr(ratio))))
    places = one(Method.RANDOM_K, np.ones(n, c.dtype), ratio=ratio, memory=Memory.RESIDUAL) == 1
    assert places.sum() == k
    assert same(one(Method.RANDOM_K, c, ratio=ratio, memory=Memory.RESIDUAL), np.where(places, c, 0).astype(c.dtype))
    assert same(one(Method.RANDOM_K, c, ratio=ratio), np.where(places, c * c.dtype.type(n / k), 0).astype(c.dtype))


@given(vectors())
def test_terngrad(c):
    wide = c.astype("f8")
    top = np.abs(wide).max()
    sigma = top * math.sqrt(np.mean((wide / (top or 1)) ** 2))
    s = min(top, 2.5 * sigma)
    found = one(Method.TERNGRAD, c)
    if len(c) == 1:
        assert same(found, c)
        return
    share = np.minimum(np.abs(wide), s) / (s or 1)
    sure = np.abs(share - uniform(len(c))) > 1e-5
    if s < 1e3 * np.finfo(c.dtype).smallest_subnormal:  # s itself is rounded by much
        sure[:] = False
    wanted = s * np.sign(wide) * (uniform(len(c)) < share)
    np.testing.assert_allclose(found[sure], wanted[sure], rtol=1e-6)
    assert len(set(np.abs(found))) <= 2


@given(vectors(), st.sampled_from([1, 4, 127, 255, 256, 32767]))
def test_qsgd(c, s):
    wide, u = c.astype("f8"), uniform(len(c))
    found, bucket = one(Method.QSGD, c, qstates=s), 512
    for at in range(0, len(c), bucket):
        part, got = wide[at : at + bucket], found[at : at + bucket].astype("f8")
        top = np.abs(part).max() or 1.0
        norm = top * math.sqrt(np.sum((part / top) ** 2))
        if norm == 0:
            assert not got.any()
            continue
        # A denormal norm is rounded by much.
        rounded = max(1e-6, np.finfo(c.dtype).smallest_subnormal / norm) if norm < 1e-300 or c.dtype == "f4" else 1e-12
        level = np.abs(part) / norm * s
        wanted = norm * np.sign(part) * np.floor(level + u[at : at + bucket]) / s
        off = level + u[at : at + bucket]
        sure = np.abs(off - np.round(off)) > 1e-6 + 2 * rounded * s
        tiny = np.finfo(c.dtype).smallest_subnormal
        np.testing.assert_allclose(got[sure], wanted[sure], rtol=4 * rounded, atol=2 * tiny)
        np.testing.assert_allclose(got, part, rtol=4 * rounded, atol=norm / s * (1 + 4 * rounded * s) + 2 * tiny)


@given(vectors())
def test_rounded_numbers(c):
    bits = c.astype("f4").view("u4").astype("u8")
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    assert same(one(Method.BF16, c), bits.astype("u4").view("f4").astype(c.dtype))
    assert same(one(Method.NONE, c), c)


@pytest.mark.parametrize("shape", [(8, 6), (40, 30, 3, 3), (5, 40_000)])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_power_sgd(shape, dtype):
    rows, columns, rank = shape[0], math.prod(shape[1:]), 2
    own = [numbers(rows * columns, dtype, seed) for seed in (1, 2, 3)]
    operator = make(Method.POWER_SGD, shape, rank=rank, memory=Memory.RESIDUAL)
    _, _, _, state = drive(operator, own)
    assert state is not None
    before = state.clone()
    out, residuals, sizes, _ = drive(operator, own, Draw(7, 12, -1, 3), state, ranks=2)
    assert torch.equal(before, state) and sizes == list(operator.sizes(rows * columns, np.dtype(dtype).itemsize))
    matrices = [v.astype("f8").reshape(rows, columns) for v in own]
    p = np.linalg.qr(sum(matrices) @ before.numpy().astype("f8"))[0]
    close = {"rtol": 0, "atol": 1e-6 if dtype == "f4" else 1e-14}
    np.testing.assert_allclose(out, (p @ p.T @ sum(matrices)).ravel(), **close)
    for m, r in zip(matrices, residuals, strict=True):
        np.testing.assert_allclose(r, (m - p @ p.T @ m).ravel(), **close)


def test_power_sgd_finds_a_matrix_of_its_rank_and_recovers_from_zeros():
    generator = np.random.default_rng(3)
    low = (generator.normal(size=(20, 2)) @ generator.normal(size=(2, 30))).astype("f4").ravel()
    operator = make(Method.POWER_SGD, (20, 30), rank=2)
    state = None
    for c in (low, np.zeros_like(low), low * np.float32(1e-30), low):
        out, _, _, state = drive(operator, [c], state=state)
        np.testing.assert_allclose(out, c, atol=1e-4 * np.abs(c).max())
    wide = make(Method.POWER_SGD, (20, 30), rank=5)  # more than the matrix has
    np.testing.assert_allclose(drive(wide, [low])[0], low, atol=1e-4)


def test_power_sgd_of_what_is_no_larger_matrix_is_dense():
    for shape, rank in (((64,), 4), ((), 1), ((3, 100), 4), ((4, 4), 2), ((10, 1, 1), 1)):
        c = numbers(math.prod(shape))
        out, _, sizes, state = drive(make(Method.POWER_SGD, shape, rank=rank), [c])
        assert same(out, c) and state is None and sizes == [c.nbytes]


# -- whatever the method

ALL = [m for m in Method if m is not Method.AUTO]


def kinds(methods: Sequence[Method] = ALL) -> Callable:
    return pytest.mark.parametrize("method", methods, ids=lambda method: method.name)


def shape_of(method: Method, n: int) -> tuple[int, ...]:
    return (n // 10, 10) if method is Method.POWER_SGD else (n,)


@kinds()
@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("n", [1, 2, 3, 9, 600, pytest.param(70_000, marks=pytest.mark.long)])
def test_sums_residuals_and_sizes(method, dtype, n):
    """Any shares of the senders give the same bits; sums are added in the order of senders; c = d + residual as computed."""
    own = [numbers(n, dtype, seed) for seed in range(4)]
    operator = make(method, shape_of(method, n) if n >= 600 else (n,), memory=Memory.RESIDUAL)
    out, residuals, sizes, _ = drive(operator, own)
    for ranks in (2, 3, 4):
        again, others, _, _ = drive(operator, own, ranks=ranks)
        assert same(out, again) and all(same(a, b) for a, b in zip(residuals, others, strict=True))
    stated = operator.sizes(n, np.dtype(dtype).itemsize)
    assert len(stated) == len(sizes) and sum(sizes) <= n * np.dtype(dtype).itemsize
    assert all(s is None or s == size for s, size in zip(stated, sizes, strict=True))
    if len(sizes) > 1:
        return
    decoded = [c - r for c, r in zip(own, residuals, strict=True)]
    total = np.zeros(n, dtype)
    for i, (c, r) in enumerate(zip(own, residuals, strict=True)):
        # The others send nothing, so that `out` is this one's share.
        alone = drive(operator, [c if j == i else np.zeros(n, dtype) for j in range(4)])[0]
        assert same(c - alone, r)
        np.testing.assert_allclose(alone, decoded[i], atol=1e-6)
        total += alone
    assert same(out, total)


@kinds()
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("n", [1, 2, 70, 700, 40_000])
def test_what_is_not_finite_is_noticed(method, bad, n):
    operator = make(method, shape_of(method, n) if n >= 600 else (n,), memory=Memory.RESIDUAL)
    for place in {0, n // 2, n - 1}:
        c = numbers(n)
        c[place] = bad
        out = drive(operator, [numbers(n), c], ranks=2)[0]
        assert not np.isfinite(out).all()
    assert np.isfinite(drive(operator, [numbers(n)] * 2)[0]).all()


def test_random_numbers_have_their_keys():
    keys = [DRAW, Draw(8, 11, -1, 3), Draw(7, 12, -1, 3), Draw(7, 11, 0, 3), Draw(7, 11, -1, 4)]
    cpu = torch.device("cpu")
    assert len({tuple(k.uniform(cpu)(4).tolist()) for k in keys}) == len(keys)
    whole, parts = DRAW.uniform(cpu)(101), DRAW.uniform(cpu)
    assert torch.equal(whole, torch.cat([parts(40), parts(40), parts(21)]))
    # A resumed run and other ranks depend on them.
    assert (whole[:3] * 2**24).int().tolist() == [13234454, 14818459, 10564529]


def test_random_k_draws_every_place_as_often():
    """What makes it unbiased: the rest is its formula."""
    operator, ones, rounds = make(Method.RANDOM_K, (20,), ratio=0.1), np.ones(20, "f4"), 1000
    drawn = sum(drive(operator, [ones], Draw(1, i, -1, 0))[0] > 0 for i in range(rounds))
    assert np.abs(drawn - 0.1 * rounds).max() < 5 * math.sqrt(0.1 * 0.9 * rounds)
