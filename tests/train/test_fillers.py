"""Caffe's fillers, and the last linear layer that is filled by them."""

import math

import pytest
import torch
from facade import Model

from stagerun.base.recipe import Filler, VarianceNorm
from stagerun.language.networks import FILLER_FIELDS
from stagerun.models import build
from stagerun.models.layers import FILLERS, fan, fill

N = 40_000
CONV = torch.Size((50, 8, 10, 10))  # 50 outputs, 8 inputs, 10x10: 40,000 weights
FANS = {"FAN_IN": 800, "FAN_OUT": 5000, "AVERAGE": 2900}


def filled(shape: torch.Size = CONV, **filler) -> torch.Tensor:
    torch.manual_seed(1)
    tensor = torch.full(shape, torch.nan, dtype=torch.float64)
    fill(tensor, Filler(**filler))
    return tensor


def check_moments(x: torch.Tensor, mean: float, std: float, kurtosis: float) -> None:
    """Within five standard errors of what the distribution has; kurtosis is 3 of a gaussian, 1.8 of a uniform one."""
    z = (x - x.mean()) / x.std()
    assert abs(x.mean().item() - mean) < 5 * std / math.sqrt(N)
    assert x.std().item() == pytest.approx(std, rel=5 / math.sqrt(2 * N))
    assert z.pow(4).mean().item() == pytest.approx(kurtosis, abs=5 * math.sqrt(24 / N))


def test_the_types_are_those_that_check_knows():
    assert tuple(FILLERS) == tuple(FILLER_FIELDS)


def test_constant():
    assert (filled(type="constant", value=0.25) == 0.25).all()
    assert (filled(type="gaussian", mean=2.0, std=0.0) == 2).all()
    assert not filled().any()  # Caffe's default


@pytest.mark.parametrize(
    ("filler", "mean", "std", "kurtosis", "limit"),
    [
        ({"type": "gaussian", "mean": 3.0, "std": 0.01}, 3.0, 0.01, 3, None),
        ({"type": "gaussian"}, 0, 1, 3, None),
        ({"type": "uniform", "min": -1.0, "max": 3.0}, 1.0, 4 / math.sqrt(12), 1.8, 2),
        ({"type": "uniform"}, 0.5, 1 / math.sqrt(12), 1.8, 0.5),
        *(
            ({"type": "xavier", "variance_norm": n}, 0, math.sqrt(1 / FANS[n]), 1.8, math.sqrt(3 / FANS[n]))
            for n in FANS
        ),
        *(({"type": "msra", "variance_norm": n}, 0, math.sqrt(2 / FANS[n]), 3, None) for n in FANS),
    ],
)
def test_moments(filler, mean, std, kurtosis, limit):
    """xavier is uniform with a variance of 1 / n, msra gaussian with 2 / n."""
    if "variance_norm" in filler:
        filler = filler | {"variance_norm": VarianceNorm[filler["variance_norm"]]}
    x = filled(**filler)
    check_moments(x, mean, std, kurtosis)
    if limit:
        assert 0.99 * limit < x.max() - mean <= limit and -limit <= x.min() - mean < -0.99 * limit


@pytest.mark.parametrize(
    ("shape", "fan_in", "fan_out"),
    [
        ((64, 3, 7, 7), 3 * 49, 64 * 49),
        ((32, 1, 3, 3), 9, 32 * 9),  # depthwise: one input each; Caffe counts the outputs of all groups
        ((1000, 2048), 2048, 1000),
        ((1000,), 1, 1000),
    ],
    ids=["convolution", "depthwise", "linear", "bias"],
)
def test_n_is_counted_as_caffe_counts(shape, fan_in, fan_out):
    counted = [fan(torch.Size(shape), norm) for norm in VarianceNorm]
    assert counted == [fan_in, fan_out, (fan_in + fan_out) / 2]


def test_a_filler_draws_from_the_seed_alone():
    for kind in FILLERS:
        assert torch.equal(filled(type=kind), filled(type=kind)), kind


# -- the last linear layer


@pytest.mark.parametrize(
    ("name", "last"),
    [("resnet18", "fc"), ("resnet_small", "fc"), ("mobilenet_v3_small", "classifier.3"), ("densenet121", "classifier")],
)
def test_the_last_linear_layer_is_filled_and_nothing_else(name, last):
    """The filler draws after all other weights, so that those are the same with and without it."""

    def drawn(**fillers) -> dict[str, torch.Tensor]:
        torch.manual_seed(1)
        return build(Model(name=name, num_classes=300, **fillers)).state_dict()

    plain = drawn()
    both = drawn(
        fc_weight_filler=Filler(type="gaussian", std=0.5), fc_bias_filler=Filler(type="constant", value=-math.log(300))
    )
    assert {k for k in plain if not torch.equal(plain[k], both[k])} == {f"{last}.weight", f"{last}.bias"}
    assert both[f"{last}.weight"].std().item() == pytest.approx(0.5, rel=0.02)
    assert (both[f"{last}.bias"] == torch.tensor(-math.log(300))).all()
    only = drawn(fc_weight_filler=Filler(type="msra", variance_norm=VarianceNorm.FAN_OUT))
    assert {k for k in plain if not torch.equal(plain[k], only[k])} == {f"{last}.weight"}
    assert only[f"{last}.weight"].std().item() == pytest.approx(math.sqrt(2 / 300), rel=0.02)
