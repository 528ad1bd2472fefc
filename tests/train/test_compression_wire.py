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
def test_bytes_do_not_depend_on_threads_nor_on_alignment(method: Method) -> None:
    c = numbers(200_000)
    operator = make(method, shape_of(method, len(c)))

    def messages() -> list[np.ndarray]:
        vector, out, found = torch.from_numpy(c.copy()), torch.zeros(len(c)), []
        steps = operator.steps([vector], [0], DRAW, out)
        try:
            sent = next(steps)
            while True:
                found.append(sent[0].numpy().copy())
                shifted = torch.cat((torch.zeros(1, dtype=torch.uint8), sent[0]))[1:]
                sent = steps.send([shifted])
        except StopIteration:
            return [*found, out.numpy()]

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        first = messages()
        torch.set_num_threads(3)
        second = messages()
    finally:
        torch.set_num_threads(threads)
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    assert same(first[-1], drive(operator, [c])[0])


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


@pytest.mark.long
def test_unbiased() -> None:
    """The mean of 1000 draws is within 5 standard errors of c everywhere, by the variance of the formula, and so is the mean over all
    numbers of what is above or below in size."""
    c, rounds = numbers(600), 1000
    wide = np.abs(c.astype("f8"))
    norms = np.repeat([np.linalg.norm(wide[:512]), np.linalg.norm(wide[512:])], [512, 88])

    def rounded(step: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        chance = wide / step % 1
        return step, step**2 * chance * (1 - chance)

    cases = (
        (make(Method.QSGD, c.shape, qstates=4), *rounded(norms / 4)),
        (make(Method.RANDOM_K, c.shape, ratio=0.1), wide * 10, wide**2 * 9),
    )
    for operator, step, variance in cases:
        found = np.mean([drive(operator, [c], Draw(1, i, -1, 0))[0] for i in range(rounds)], axis=0, dtype="f8")
        error = (found - c) * np.sign(c)
        # Of what is hardly ever drawn, the number of times isn't normally distributed.
        assert (np.abs(error) <= 5 * np.sqrt(variance / rounds) + 8 * step / rounds).all()
        assert abs(error.sum()) <= 5 * math.sqrt(variance.sum() / rounds)
