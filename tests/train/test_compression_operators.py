"""Every operator against its formula, written once more with numpy; and what the reducer relies on."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stagerun.base.recipe import Memory, Method
from stagerun.comm.compression import METHODS, Draw, Operator, make, sparse
from stagerun.comm.compression import operator as base

DRAW = Draw(7, 11, -1, 3)
ALL = list(METHODS)
VECTORS = [m for m in ALL if m is not Method.POWER_SGD]
RELEASED = [m for m in ALL if METHODS[m].released]
BITS = {np.dtype("f4"): np.uint32, np.dtype("f8"): np.uint64}


def drive(
    operator: Operator, vectors: Sequence[np.ndarray], draw: Draw = DRAW, state: Tensor | None = None, ranks: int = 1
) -> tuple[np.ndarray, list[np.ndarray], list[int], Tensor | None]:
    """What all ranks have at the end, which must be the same: the sum, the senders' residuals, bytes per sender and round, the state."""
    held = [torch.from_numpy(v.copy()) for v in vectors]
    shares = [range(len(held))[r::ranks] for r in range(ranks)]
    outs = [torch.zeros_like(held[0]) for _ in shares]
    running = [operator.steps([held[i] for i in s], s, draw, out, state) for s, out in zip(shares, outs, strict=True)]
    answers, sizes, ends = [next(g) for g in running], [], []
    while not ends:
        messages = {i: m for s, a in zip(shares, answers, strict=True) for i, m in zip(s, a, strict=True)}
        sizes.append(max(len(m) for m in messages.values()))
        assert all(m.dtype == torch.uint8 and m.dim() == 1 for m in messages.values())
        answers = []
        for generator in running:
            try:
                answers.append(generator.send([messages[i].clone() for i in range(len(held))]))
            except StopIteration as ended:
                ends.append(ended.value)
    assert all(same(outs[0].numpy(), o.numpy()) for o in outs)
    for end in ends:
        assert (end is None) == (ends[0] is None) and (end is None or same(end.numpy(), ends[0].numpy()))
    return outs[0].numpy(), [h.numpy() for h in held], sizes, ends[0]


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """To the bit, but for the sign of 0."""
    return a.dtype == b.dtype and np.array_equal((a + 0).view(BITS[a.dtype]), (b + 0).view(BITS[b.dtype]))


def one(method: Method, c: np.ndarray, **given: object) -> np.ndarray:
    return drive(make(method, c.shape, **given), [c])[0]  # type: ignore[arg-type]


def numbers(n: int, dtype: str = "f4", seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.01, n).astype(dtype)


def heavy(n: int, seed: int = 2) -> np.ndarray:
    return (np.random.default_rng(seed).standard_t(1.5, n) * 0.001).astype("f4")


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
LONG = [numbers(100_001), numbers(70_000, "f8"), heavy(65_536), np.repeat(numbers(50), 1500)]


# -- formulas ---------------------------------------------------------------------------------------------------------


def top_k(c: np.ndarray, ratio: float) -> np.ndarray:
    keep = np.argsort(-np.abs(c), kind="stable")[: max(1, math.floor(len(c) * ratio))]
    d = np.zeros_like(c)
    d[keep] = c[keep]
    return d


def top_k_released(c: np.ndarray, ratio: float) -> np.ndarray:
    nth = math.ceil(len(c) * (1 - ratio))
    least = np.sort(np.abs(c))[nth - 1] if nth else 0
    return np.where(np.abs(c) < least, 0, c).astype(c.dtype)


@given(vectors(), ratios)
@settings(deadline=None)
def test_top_k(c: np.ndarray, ratio: float) -> None:
    assert same(one(Method.TOP_K, c, ratio=ratio), top_k(c, ratio))
    assert same(one(Method.TOP_K, c, ratio=ratio, as_released=True), top_k_released(c, ratio))


@pytest.mark.parametrize("c", LONG)
@pytest.mark.parametrize("ratio", [0.0001, 0.01, 0.3, 0.5, 1.0])
def test_top_k_of_long_vectors(c: np.ndarray, ratio: float) -> None:
    assert same(one(Method.TOP_K, c, ratio=ratio), top_k(c, ratio))
    assert same(one(Method.TOP_K, c, ratio=ratio, as_released=True), top_k_released(c, ratio))


def test_top_k_where_a_sample_misleads() -> None:
    c = numbers(1 << 17)
    c[:: (1 << 17) // (1 << 15) | 1] *= 1000  # all that is sampled
    assert same(one(Method.TOP_K, c, ratio=0.5), top_k(c, 0.5))
    c = numbers(1 << 17)
    c[1:5] = np.nan, np.inf, -np.inf, np.nan
    found = one(Method.TOP_K, c, ratio=0.01)
    assert np.array_equal(found[1:5], c[1:5], equal_nan=True)


@given(vectors(), st.sampled_from([1e-45, 0.001, 0.5, 2000.0]))
@settings(deadline=None)
def test_thresholds(c: np.ndarray, threshold: float) -> None:
    keep = np.abs(c) >= np.asarray(threshold, c.dtype)
    assert same(one(Method.THRESHOLD, c, threshold=threshold), np.where(keep, c, 0).astype(c.dtype))
    keep = 2 * np.abs(c) >= np.abs(c).max()
    for released in (False, True):
        found = one(Method.ADAPTIVE_THRESHOLD, c, as_released=released)
        assert same(found, np.where(keep, c, 0).astype(c.dtype))


@pytest.mark.parametrize("c", LONG)
def test_thresholds_of_long_vectors(c: np.ndarray) -> None:
    for threshold in (0.0001, 0.01, 0.03):
        keep = np.abs(c) >= np.asarray(threshold, c.dtype)
        assert same(one(Method.THRESHOLD, c, threshold=threshold), np.where(keep, c, 0).astype(c.dtype))


@given(vectors(), ratios)
@settings(deadline=None)
def test_random_k(c: np.ndarray, ratio: float) -> None:
    n = len(c)
    k = max(1, math.floor(n * ratio))
    places = one(Method.RANDOM_K, np.ones(n, c.dtype), ratio=ratio, memory=Memory.RESIDUAL) == 1
    assert places.sum() == k
    assert same(one(Method.RANDOM_K, c, ratio=ratio, memory=Memory.RESIDUAL), np.where(places, c, 0).astype(c.dtype))
    assert same(one(Method.RANDOM_K, c, ratio=ratio), np.where(places, c * c.dtype.type(n / k), 0).astype(c.dtype))
    order = torch.randperm(n, generator=DRAW.of(0).generator()).numpy()
    found = one(Method.RANDOM_K, c, ratio=ratio, as_released=True)
    assert same(found, np.where(order < n * ratio, c, 0).astype(c.dtype))


def test_random_k_places_are_of_the_iteration_and_released_ones_of_the_sender() -> None:
    c = np.ones(1000, "f4")

    def places(draw: Draw, senders: int = 1, **given: bool) -> np.ndarray:
        operator = make(Method.RANDOM_K, c.shape, ratio=0.1, memory=Memory.RESIDUAL, **given)
        return drive(operator, [c] * senders, draw)[0]

    assert set(places(DRAW, 3)) == {0, 3}
    assert not np.array_equal(places(DRAW), places(Draw(7, 12, -1, 3)))
    assert not np.array_equal(places(DRAW), places(Draw(7, 11, -1, 4)))
    assert {1, 2} <= set(places(DRAW, 3, as_released=True))


@given(vectors())
@settings(deadline=None)
def test_terngrad(c: np.ndarray) -> None:
    check_terngrad(c)


@pytest.mark.parametrize("c", LONG)
def test_terngrad_of_long_vectors(c: np.ndarray) -> None:
    check_terngrad(c)


def check_terngrad(c: np.ndarray) -> None:
    wide = c.astype("f8")
    top = np.abs(wide).max()
    sigma = top * math.sqrt(np.mean((wide / (top or 1)) ** 2))
    for released, s in ((False, min(top, 2.5 * sigma)), (True, top)):
        found = one(Method.TERNGRAD, c, as_released=released)
        if len(c) == 1:
            assert same(found, c)
            continue
        share = np.minimum(np.abs(wide), s) / (s or 1)
        sure = np.abs(share - uniform(len(c))) > 1e-5
        if s < 1e3 * np.finfo(c.dtype).smallest_subnormal:  # s itself is rounded by much
            sure[:] = released
        wanted = s * np.sign(wide) * (uniform(len(c)) < share)
        np.testing.assert_allclose(found[sure], wanted[sure], rtol=1e-6)
        assert len(set(np.abs(found))) <= 2


@given(vectors(), st.sampled_from([1, 4, 127, 255, 256, 32767]))
@settings(deadline=None)
def test_qsgd(c: np.ndarray, s: int) -> None:
    check_qsgd(c, s)


@pytest.mark.parametrize("c", LONG)
@pytest.mark.parametrize("s", [1, 64, 255, 1000, 32767])
def test_qsgd_of_long_vectors(c: np.ndarray, s: int) -> None:
    check_qsgd(c, s)


def check_qsgd(c: np.ndarray, s: int) -> None:
    wide, u = c.astype("f8"), uniform(len(c))
    for released in (False, True):
        found, bucket = one(Method.QSGD, c, qstates=s, as_released=released), len(c) if released else 512
        for at in range(0, len(c), bucket):
            part, got = wide[at : at + bucket], found[at : at + bucket].astype("f8")
            top = np.abs(part).max() or 1.0
            norm = top * math.sqrt(np.sum((part / top) ** 2))
            if norm == 0:
                assert not got.any()
                continue
            # A denormal norm is rounded by much.
            rounded = (
                max(1e-6, np.finfo(c.dtype).smallest_subnormal / norm) if norm < 1e-300 or c.dtype == "f4" else 1e-12
            )
            level = np.abs(part) / norm * s
            wanted = norm * np.sign(part) * np.floor(level + u[at : at + bucket]) / s
            off = level + u[at : at + bucket]
            sure = np.abs(off - np.round(off)) > 1e-6 + 2 * rounded * s
            tiny = np.finfo(c.dtype).smallest_subnormal
            np.testing.assert_allclose(got[sure], wanted[sure], rtol=4 * rounded, atol=2 * tiny)
            np.testing.assert_allclose(got, part, rtol=4 * rounded, atol=norm / s * (1 + 4 * rounded * s) + 2 * tiny)


@given(vectors(), st.sampled_from([None, 0.5, 1e-40]))
@settings(deadline=None)
def test_two_bit_and_sign(c: np.ndarray, threshold: float | None) -> None:
    mean = np.asarray(math.fsum(np.abs(c.astype("f8"))) / len(c), c.dtype)
    t = mean if threshold is None else np.asarray(threshold, c.dtype)
    found = one(Method.TWO_BIT, c, threshold=threshold)
    if len(c) == 1 and threshold is None:
        assert same(found, c)
    elif np.abs(np.abs(c) - t).min() > 1e-6 * t or threshold:  # not what rounding of the mean decides
        wanted = np.where(c >= t, t, np.where(c <= -t, -t, 0)).astype(c.dtype)
        np.testing.assert_allclose(found, wanted, rtol=0 if threshold else 1e-6)
    found = one(Method.SIGN, c)
    np.testing.assert_allclose(found, c if len(c) == 1 else np.where(c >= 0, mean, -mean), rtol=1e-6)


@given(vectors())
@settings(deadline=None)
def test_rounded_numbers(c: np.ndarray) -> None:
    top = np.abs(c).max()
    if len(c) > 1:
        q = np.rint(c / (top or c.dtype.type(1)) * 127)
        assert same(one(Method.INT8, c), q / c.dtype.type(127) * top)
    assert len(c) > 1 or same(one(Method.INT8, c), c) or c.dtype == "f8"
    bits = c.astype("f4").view("u4").astype("u8")
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    assert same(one(Method.BF16, c), bits.astype("u4").view("f4").astype(c.dtype))
    with np.errstate(over="ignore"):
        assert same(one(Method.FP16, c), c.astype("f4").astype("f2").astype(c.dtype))
    assert same(one(Method.NONE, c), c)


@pytest.mark.parametrize("shape", [(8, 6), (40, 30, 3, 3), (5, 40_000)])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_power_sgd(shape: tuple[int, ...], dtype: str) -> None:
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


def test_power_sgd_finds_a_matrix_of_its_rank_and_recovers_from_zeros() -> None:
    generator = np.random.default_rng(3)
    low = (generator.normal(size=(20, 2)) @ generator.normal(size=(2, 30))).astype("f4").ravel()
    operator = make(Method.POWER_SGD, (20, 30), rank=2)
    state = None
    for c in (low, np.zeros_like(low), low * np.float32(1e-30), low):
        out, _, _, state = drive(operator, [c], state=state)
        np.testing.assert_allclose(out, c, atol=1e-4 * np.abs(c).max())
    wide = make(Method.POWER_SGD, (20, 30), rank=5)  # more than the matrix has
    np.testing.assert_allclose(drive(wide, [low])[0], low, atol=1e-4)


def test_power_sgd_of_what_is_no_larger_matrix_is_dense() -> None:
    for shape, rank in (((64,), 4), ((), 1), ((3, 100), 4), ((4, 4), 2), ((10, 1, 1), 1)):
        c = numbers(math.prod(shape))
        out, _, sizes, state = drive(make(Method.POWER_SGD, shape, rank=rank), [c])
        assert same(out, c) and state is None and sizes == [c.nbytes]


# -- what holds for all -----------------------------------------------------------------------------------------------


def kinds(methods: Sequence[Method] = ALL) -> Callable:
    """Each method, as is and as released."""
    cases = [
        pytest.param(m, r, id=m.name + "-released" * r)
        for m in methods
        for r in (False, True)
        if not r or m in RELEASED
    ]
    return pytest.mark.parametrize(("method", "released"), cases)


def shape_of(method: Method, n: int) -> tuple[int, ...]:
    return (n // 10, 10) if method is Method.POWER_SGD else (n,)


@kinds()
@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("n", [1, 2, 3, 9, 600, 70_000])
def test_sums_residuals_and_sizes(method: Method, released: bool, dtype: str, n: int) -> None:
    """Any shares of the senders give the same bits; sums are added in the order of senders; c = d + residual as computed."""
    own = [numbers(n, dtype, seed) for seed in range(4)]
    operator = make(method, shape_of(method, n) if n >= 600 else (n,), memory=Memory.RESIDUAL, as_released=released)
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
def test_what_is_not_finite_is_noticed(method: Method, released: bool, bad: float, n: int) -> None:
    operator = make(method, shape_of(method, n) if n >= 600 else (n,), memory=Memory.RESIDUAL, as_released=released)
    for place in {0, n // 2, n - 1}:
        c = numbers(n)
        c[place] = bad
        out = drive(operator, [numbers(n), c], ranks=2)[0]
        assert not np.isfinite(out).all()
    assert np.isfinite(drive(operator, [numbers(n)] * 2)[0]).all()


@kinds()
@pytest.mark.parametrize("n", [1, 2, 513, 40_000])
def test_zeros_stay_zeros(method: Method, released: bool, n: int) -> None:
    shape = (n // 100, 100) if method is Method.POWER_SGD and n > 1000 else (n,)
    out, residuals, _, _ = drive(
        make(method, shape, memory=Memory.RESIDUAL, as_released=released), [np.zeros(n, "f4")] * 2
    )
    assert not out.any() and not residuals[0].any()


@kinds()
def test_bytes_do_not_depend_on_threads_nor_on_alignment(method: Method, released: bool) -> None:
    c = numbers(200_000)
    operator = make(method, shape_of(method, len(c)), as_released=released)

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


@kinds()
def test_as_on_a_gpu(method: Method, released: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All at once, and with torch's own selection, as on a GPU: the same bytes. Sums of float64 are rounded to float32."""
    own = [numbers(70_001 if method is not Method.POWER_SGD else 70_000, seed=s) for s in (1, 2)]
    operator = make(method, shape_of(method, len(own[0])), memory=Memory.RESIDUAL, as_released=released)
    here = drive(operator, own)
    monkeypatch.setattr(base, "PIECE", 1 << 40)
    monkeypatch.setattr(sparse, "largest", sparse._largest_torch)
    monkeypatch.setattr(sparse, "nonzero", lambda mask: torch.nonzero(mask).view(-1))
    there = drive(operator, own)
    assert here[2] == there[2]
    if method is Method.POWER_SGD:
        return
    assert same(here[0], there[0]) and all(same(a, b) for a, b in zip(here[1], there[1], strict=True))


@kinds([m for m in VECTORS if m is not Method.NONE])
def test_a_message_of_another_length_is_refused(method: Method, released: bool) -> None:
    c = numbers(1000)
    operator = make(method, (1000,), as_released=released)
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


# -- averages and bytes -----------------------------------------------------------------------------------------------


def test_unbiased() -> None:
    """The mean of 4000 draws is within 5 standard errors of c everywhere, by the variance of the formula, and so is the mean over all
    numbers of what is above or below in size."""
    c, rounds = numbers(600), 4000
    wide = np.abs(c.astype("f8"))
    norms = np.repeat([np.linalg.norm(wide[:512]), np.linalg.norm(wide[512:])], [512, 88])

    def rounded(step: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        chance = wide / step % 1
        return step, step**2 * chance * (1 - chance)

    cases = (
        (make(Method.TERNGRAD, c.shape, as_released=True), *rounded(np.full(600, wide.max()))),
        (make(Method.QSGD, c.shape, qstates=4), *rounded(norms / 4)),
        (make(Method.QSGD, c.shape, qstates=255, as_released=True), *rounded(np.full(600, np.linalg.norm(wide) / 255))),
        (make(Method.RANDOM_K, c.shape, ratio=0.1), wide * 10, wide**2 * 9),
    )
    for operator, step, variance in cases:
        found = np.mean([drive(operator, [c], Draw(1, i, -1, 0))[0] for i in range(rounds)], axis=0, dtype="f8")
        error = (found - c) * np.sign(c)
        # Of what is hardly ever drawn, the number of times isn't normally distributed.
        assert (np.abs(error) <= 5 * np.sqrt(variance / rounds) + 8 * step / rounds).all()
        assert abs(error.sum()) <= 5 * math.sqrt(variance.sum() / rounds)


def resnet9() -> list[int]:
    convs = [(3, 64), (64, 128), (128, 128), (128, 128), (128, 256), (256, 512), (512, 512), (512, 512)]
    return [n for i, o in convs for n in (9 * i * o, o, o)] + [5120]


def share(method: Method, vectors: Sequence[np.ndarray], **given_: object) -> float:
    sent = sum(drive(make(method, v.shape, **given_), [v])[2][0] for v in vectors)  # type: ignore[arg-type]
    return sent / sum(v.nbytes for v in vectors)


def test_bytes_on_the_wire() -> None:
    assert sum(resnet9()) == 6_573_120
    own = [numbers(n, seed=n) for n in resnet9()]
    assert share(Method.TOP_K, own, ratio=0.01) <= 0.022
    assert share(Method.RANDOM_K, own, ratio=0.01) <= 0.011
    assert share(Method.SIGN, own) <= 0.033
    for vectors_ in (own, [heavy(n) for n in resnet9()]):
        assert share(Method.TERNGRAD, vectors_) <= 0.065
        assert share(Method.TWO_BIT, vectors_) <= 0.065
        assert share(Method.QSGD, vectors_, qstates=255) <= 0.26


@pytest.mark.parametrize("freedom", [1.0, 1.5, 2.0, 3.0])
def test_qsgd_of_heavy_tails(freedom: float) -> None:
    c = np.random.default_rng(5).standard_t(freedom, 200_000).astype("f4")
    assert share(Method.QSGD, [c], qstates=255) <= 0.26
    assert share(Method.QSGD, [c], qstates=255, as_released=True) <= 0.26
