"""What a reducer relies on, whatever the method: equal bits on all ranks, residuals, sizes, averages, and that nothing goes unnoticed."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from compressing import DRAW, drive, numbers, same
from facade import Draw, Memory, Method, make

ALL = [m for m in Method if m is not Method.AUTO]


def kinds(methods: Sequence[Method] = ALL) -> Callable:
    return pytest.mark.parametrize("method", methods, ids=lambda method: method.name)


def shape_of(method: Method, n: int) -> tuple[int, ...]:
    return (n // 10, 10) if method is Method.POWER_SGD else (n,)


@kinds()
@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("n", [1, 2, 3, 9, 600, pytest.param(70_000, marks=pytest.mark.long)])
def test_sums_residuals_and_sizes(method: Method, dtype: str, n: int) -> None:
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
def test_what_is_not_finite_is_noticed(method: Method, bad: float, n: int) -> None:
    operator = make(method, shape_of(method, n) if n >= 600 else (n,), memory=Memory.RESIDUAL)
    for place in {0, n // 2, n - 1}:
        c = numbers(n)
        c[place] = bad
        out = drive(operator, [numbers(n), c], ranks=2)[0]
        assert not np.isfinite(out).all()
    assert np.isfinite(drive(operator, [numbers(n)] * 2)[0]).all()


@pytest.mark.long
@kinds()
def test_bits_do_not_depend_on_threads(method: Method) -> None:
    c, threads, found = numbers(200_000), torch.get_num_threads(), []
    operator = make(method, shape_of(method, len(c)), memory=Memory.RESIDUAL)
    try:
        for number in (1, 3):
            torch.set_num_threads(number)
            found.append(drive(operator, [c]))
    finally:
        torch.set_num_threads(threads)
    (first, (left,), _, _), (second, (again,), _, _) = found
    assert same(first, second) and same(left, again)


@kinds([m for m in ALL if m not in (Method.NONE, Method.POWER_SGD)])
def test_a_message_of_another_length_is_refused(method: Method) -> None:
    c = numbers(1000)
    operator = make(method, (1000,))
    steps = operator.steps([torch.from_numpy(c)], [0], DRAW, torch.zeros(1000))
    (message,) = next(steps)
    with pytest.raises(ValueError, match="message"):
        steps.send([message[:-1]])


def test_random_numbers_have_their_keys() -> None:
    keys = [DRAW, Draw(8, 11, -1, 3), Draw(7, 12, -1, 3), Draw(7, 11, 0, 3), Draw(7, 11, -1, 4)]
    cpu = torch.device("cpu")
    assert len({tuple(k.uniform(cpu)(4).tolist()) for k in keys}) == len(keys)
    assert len({tuple(torch.rand(4, generator=k.generator()).tolist()) for k in keys}) == len(keys)
    whole, parts = DRAW.uniform(cpu)(101), DRAW.uniform(cpu)
    assert torch.equal(whole, torch.cat([parts(40), parts(40), parts(21)]))
    # A resumed run and other ranks depend on them.
    assert (whole[:3] * 2**24).int().tolist() == [13234454, 14818459, 10564529]


def test_random_k_draws_every_place_as_often() -> None:
    """What makes it unbiased: the rest is its formula."""
    operator, ones, rounds = make(Method.RANDOM_K, (20,), ratio=0.1), np.ones(20, "f4"), 1000
    drawn = sum(drive(operator, [ones], Draw(1, i, -1, 0))[0] > 0 for i in range(rounds))
    assert np.abs(drawn - 0.1 * rounds).max() < 5 * math.sqrt(0.1 * 0.9 * rounds)
