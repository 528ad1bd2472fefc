"""Caffe's fillers, and the last linear layer that is filled by them."""

import math

import pytest
import torch
from facade import Model, net_of, recipe
from net_texts import between

from stagerun.models import build

Filler, VarianceNorm = recipe.Filler, recipe.VarianceNorm
OUTPUTS, INPUTS = 80, 512
N = OUTPUTS * INPUTS
FANS = {"FAN_IN": INPUTS, "FAN_OUT": OUTPUTS, "AVERAGE": (INPUTS + OUTPUTS) / 2}


def filled(**filler) -> torch.Tensor:
    """The weights of the last layer of a network, with this filler."""
    torch.manual_seed(1)
    model = Model(name="resnet_small", num_classes=OUTPUTS, fc_weight_filler=Filler(**filler))
    return build(model).fc.weight.detach()


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
    """Within five standard errors. xavier is uniform with a variance of 1 / n, msra gaussian with 2 / n; kurtosis is 3 of a gaussian, 1.8
    of a uniform one."""
    if "variance_norm" in filler:
        filler = filler | {"variance_norm": VarianceNorm[filler["variance_norm"]]}
    x = filled(**filler)
    assert abs(x.mean().item() - mean) < 5 * std / math.sqrt(N)
    assert x.std().item() == pytest.approx(std, rel=5 / math.sqrt(2 * N))
    z = (x - x.mean()) / x.std()
    assert z.pow(4).mean().item() == pytest.approx(kurtosis, abs=5 * math.sqrt(24 / N))
    if limit:
        assert 0.99 * limit < x.max() - mean <= limit and -limit <= x.min() - mean < -0.99 * limit


@pytest.mark.parametrize("norm", list(VarianceNorm))
@pytest.mark.parametrize(
    ("inputs", "outputs", "kernel", "more", "fan_in", "fan_out"),
    [
        (3, 64, 7, "", 3 * 49, 64 * 49),
        (32, 32, 3, "group: 32", 9, 32 * 9),  # depthwise: one input each; Caffe counts the outputs of all groups
    ],
    ids=["convolution", "depthwise"],
)
def test_n_is_counted_as_caffe_counts(inputs, outputs, kernel, more, fan_in, fan_out, norm):
    """Of biases, which are as many outputs of one input, too."""
    filler = f'type: "xavier" variance_norm: {norm.value}'
    text = between(
        f"""layer {{ name: "it" type: "Convolution" bottom: "data" top: "last" convolution_param {{
        num_output: {outputs} kernel_size: {kernel} {more} weight_filler {{ {filler} }} bias_filler {{ {filler} }} }} }}"""
    )
    shape = (inputs, 8, 8)
    torch.manual_seed(1)
    made = build(Model(name="x", num_classes=10, net=net_of(text, shape).text, input_shape=shape)).it
    for tensor, fans in ((made.weight, (fan_in, fan_out)), (made.bias, (1, outputs))):
        n = {"FAN_IN": fans[0], "FAN_OUT": fans[1], "AVERAGE": sum(fans) / 2}[norm.value]
        limit = math.sqrt(3 / n)
        assert (0.98 if tensor.dim() > 1 else 0.8) * limit < tensor.abs().max().item() <= limit


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
