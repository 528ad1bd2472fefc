"""stagerun's own policies against formulas computed another way, at every iteration; and what they promise at their ends. More formulas: test_gallery."""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from facade import Solver, recipe
from hypothesis import given
from hypothesis import strategies as st

from stagerun.language import read
from stagerun.schedule import POLICIES, learning_rate, make_knobs, own_fields

# An independent computation has other roundings: relative to the rate, and just before zero to the largest one.
CLOSE = {"rel": 1e-12, "abs": 1e-15}
WIDE = np.longdouble


def solver(text: str, images: int = 1281167, batch: int = 4096, device: int = 32) -> Solver:
    schedule = f"""
    name: "shapes" model {{ name: "resnet18" num_classes: 10 }} data {{ train {{ source: "x" images: {images} }} }}
    solver {{ batch_size: {batch} device_batch_size: {device} momentum: 0.9 weight_decay: 5e-5 }} stage {{ name: "a" }}
    """
    return read({"schedule.prototxt": schedule, "a.prototxt": text}, "/shapes").stages[0].solver


def rates(settings: Solver) -> list[float]:
    knobs = make_knobs(settings)
    return [knobs(i).lr for i in range(settings.max_iter)]


TIMES = np.arange(5000, dtype=WIDE) / 5000
FORMULAS = {
    "linear": (1.6 + (0.02 - 1.6) * TIMES, "end_lr: 0.02"),
    "cosine": (0.02 + (1.6 - 0.02) * (1 + np.cos(WIDE(np.pi) * TIMES)) / 2, "end_lr: 0.02"),
    "one_minus_sqrt": (0.02 + (1.6 - 0.02) * (1 - np.sqrt(TIMES)), "end_lr: 0.02"),
    "exp_epoch": (1.6 * WIDE(0.94) ** (np.arange(5000, dtype=WIDE) * 4096 / 1281167), "gamma: 0.94"),
    "piecewise_linear": (
        np.interp(np.arange(5000), [0, 1000, 1500, 4000], [1.6 * 0.5, 1.6, 1.6 * 0.1, 0]),
        "knot { iter: 0 factor: 0.5 } knot { iter: 1000 factor: 1 } knot { iter: 1500 factor: 0.1 } knot { iter: 4000 factor: 0 }",
    ),
}  # fmt: skip


@pytest.mark.parametrize("policy", FORMULAS)
def test_formula(policy):
    expected, fields = FORMULAS[policy]
    settings = solver(f'base_lr: 1.6 lr_policy: "{policy}" max_iter: 5000 {fields}')
    assert rates(settings) == pytest.approx(expected.astype(float).tolist(), **CLOSE)


@pytest.mark.parametrize("policy", ["linear", "cosine", "one_minus_sqrt"])
def test_what_is_left_before_zero_has_all_of_its_digits(policy):
    last = 22609
    exact = {
        "linear": Fraction(1, 22610),
        "cosine": Fraction(math.sin(math.pi / 2 / 22610)) ** 2,
        "one_minus_sqrt": Fraction(-math.expm1(0.5 * math.log1p(-1 / 22610))),
    }[policy]
    settings = solver(f'base_lr: 1.6 lr_policy: "{policy}" max_iter: 22610')
    assert make_knobs(settings)(last).lr == pytest.approx(float(Fraction("1.6") * exact), rel=1e-14)


def test_two_knots_at_one_place_are_a_jump():
    text = 'base_lr: 1 lr_policy: "piecewise_linear" max_iter: 8 {}'
    knots = " ".join(f"knot {{ iter: {i} factor: {f} }}" for i, f in ((2, 1), (4, 3), (4, 0.5), (6, 0.5)))
    assert rates(solver(text.format(knots))) == [1, 1, 1, 2, 0.5, 0.5, 0.5, 0.5]


def test_linear_scaling_is_exact_on_what_is_written():
    text = 'base_lr: 0.256 base_lr_batch: 256 lr_policy: "linear" end_lr: 0.001 max_iter: 10'
    settings = solver(f"{text} warmup_iter: 1 warmup_start_lr: 0.1", batch=2048)
    assert (settings.base_lr, settings.end_lr, settings.warmup_start_lr) == (2.048, 0.008, 0.8)
    assert 0.256 * 2048 / 256 == 2.048 and solver(text.replace("0.256", "0.1"), batch=768, device=48).base_lr == 0.3


def test_epochs_in_lists_are_rounded_like_every_duration():
    settings = solver('base_lr: 1 lr_policy: "plateau" gamma: 0.1 max_epoch: 4 plateau_winsize_epoch: [1, 0.5]')
    assert settings.plateau_winsize == (313, 156)


SHAPES = st.sampled_from(["linear", "cosine", "one_minus_sqrt"])


def made(policy: str, base: float, end: float, length: int, warm_up: int = 0, start: int = 0) -> Solver:
    fixed = {"batch_size": 1, "device_batch_size": 1, "random_seed": 0, "test_batch_size": 1}
    return Solver(
        base_lr=base, lr_policy=policy, max_iter=length, end_lr=end, warmup_iter=warm_up, policy_start_iter=start, **fixed
    )  # fmt: skip


@given(SHAPES, st.integers(3, 100), st.integers(1, 100), st.integers(0, 100))
def test_an_earlier_start_is_the_same_curve_read_further_on(policy, length, warm_up, start):
    plain = learning_rate(made(policy, 1.0, 0.1, length, min(warm_up, length)))
    shifted = learning_rate(made(policy, 1.0, 0.1, length, min(warm_up, length), start))
    assert [shifted(i) for i in range(length)] == [plain(i + start) for i in range(length)]


@given(st.sampled_from(list(POLICIES)), st.integers(2, 60), st.integers(1, 40))
def test_from_the_end_of_its_warm_up_a_policy_is_that_of_a_stage_without(policy, length, warm_up):
    own = {"power": 1.5, "gamma": 0.9, "stepsize": 7, "stepvalue": (3, 9), "lr_iter": 99, "epoch_iter": 7.5,
           "knot": (recipe.Knot(iter=0, factor=0.5), recipe.Knot(iter=9.5, factor=1)), "plateau_winsize": (3,), "end_lr": 0.01}  # fmt: skip
    alone = replace(made("fixed", 0.4, 0.0, length), lr_policy=policy, **own)
    after = replace(alone, max_iter=length + warm_up, warmup_iter=warm_up, decay_from=recipe.DecayFrom.WARMUP_END)
    rate, expected = learning_rate(after), learning_rate(alone)
    assert [rate(warm_up + i) for i in range(length)] == [expected(i) for i in range(length)]
    assert [rate(i) for i in range(warm_up)] == [i * 0.4 / warm_up for i in range(warm_up)]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_warm_up_as_long_as_the_stage_is_a_line(policy):
    """No rate is a number by chance where nothing is left to decay."""
    own = {"gamma": "gamma: 0.5", "power": "power: 2", "stepsize": "stepsize: 3", "stepvalue": "stepvalue: 9"}
    own |= {"plateau_winsize": "plateau_winsize: 5", "knot": "knot { iter: 0 factor: 1 } knot { iter: 10 factor: 0 }"}
    own |= {"lr_iter": "lr_iter: 20"}
    fields = " ".join(text for name, text in own.items() if name in own_fields(policy))
    settings = solver(f'base_lr: 0.4 lr_policy: "{policy}" max_iter: 10 warmup_iter: 10 warmup_start_lr: 0.1 {fields}')
    assert rates(settings) == pytest.approx([0.1 + 0.03 * i for i in range(10)], rel=1e-12)
