"""Networks of other systems that stagerun carries on: ResNet-9, AlexNet-BN, MXNet's two Inceptions; and Wide ResNets (arXiv:1605.07146)."""

import math

import pytest
import torch
from facade import Model
from on_meta import on_meta
from torch import nn

from stagerun.models import BatchNorm2d, build

# (classes, side of the images, parameters)
PUBLISHED = {
    "resnet9": (10, 32, 6_573_120),
    "alexnet_bn": (10, 32, 2_255_296),
    "inception_bn_28_small": (10, 28, 1_652_826),
    "inception_bn": (1000, 224, 11_295_240),
}


def fresh(name: str, **settings) -> nn.Module:
    torch.manual_seed(1)
    return build(Model(name=name, num_classes=PUBLISHED[name][0], **settings))


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_as_many_as_published(name):
    with on_meta():
        three, one = (build(Model(name=name, num_classes=PUBLISHED[name][0], channels=c)) for c in (3, 1))
    first = next(m for m in three.modules() if isinstance(m, nn.Conv2d))
    assert sum(p.numel() for p in three.parameters()) == PUBLISHED[name][2]
    assert sum(p.numel() for p in one.parameters()) == PUBLISHED[name][2] - 2 * first.weight[:, 0].numel()


@pytest.mark.parametrize(("name", "limit"), [("inception_bn_28_small", 0.07), ("inception_bn", 0.01)])
def test_mxnets_weights_start_evenly_and_biases_at_zero(name, limit):
    net = fresh(name, moving_average_fraction=0.9, eps=1e-10)
    weights = torch.cat([m.weight.detach().flatten() for m in net.modules() if isinstance(m, nn.Conv2d | nn.Linear)])
    assert -limit <= weights.min() < -0.999 * limit and 0.999 * limit < weights.max() <= limit
    assert weights.std().item() == pytest.approx(limit / math.sqrt(3), rel=0.005)
    assert not any(m.bias.any() for m in net.modules() if isinstance(m, nn.Conv2d | nn.Linear))
    norms = [m for m in net.modules() if isinstance(m, BatchNorm2d)]
    assert all((n.weight == 1).all() and not n.bias.any() for n in norms)
    assert {(n.moving_average_fraction, n.eps) for n in norms} == {(0.9, 1e-10)}
    convolutions = [m for m in net.modules() if isinstance(m, nn.Conv2d)]
    assert len(norms) == len(convolutions) and all(m.bias is not None for m in convolutions)


@pytest.mark.parametrize("name", ["resnet9", "alexnet_bn"])
def test_those_of_cifar10_fast_start_as_torch_draws_them(name):
    net = fresh(name)
    for conv in (m for m in net.modules() if isinstance(m, nn.Conv2d)):
        limit = 1 / math.sqrt(conv.weight[0].numel())  # kaiming_uniform with a = sqrt(5)
        assert conv.bias is None and 0.98 * limit < conv.weight.abs().max() <= limit
    assert net.fc.bias is None and net.fc.weight.abs().max() <= 1 / math.sqrt(net.fc.in_features)
    assert all((m.weight == 1).all() and not m.bias.any() for m in net.modules() if isinstance(m, BatchNorm2d))


# -- what they compute: logits of this code, which a restatement of the published files had, too, but of the Wide ResNet

LOGITS = {
    "resnet9": (2.58799189, -2.19468765, 1.1374014),
    "alexnet_bn": (1.00078636, 0.2903038, -0.841108573),
    "inception_bn_28_small": (5.04394833, -2.06038941, -0.529480206),
    "inception_bn": (4.05315986, 3.90213726, 0.00661336694),
    "wrn_16_8": (6.44539111, -3.94667349, 3.42908516),
}


@torch.no_grad()
@pytest.mark.parametrize("name", LOGITS)
def test_what_they_compute_is_what_the_published_files_say(name):
    classes, side, _ = PUBLISHED.get(name, (10, 8, 0))
    net = build(Model(name=name, num_classes=classes)).double()
    for p in net.parameters():
        fan_in = p[0].numel() if p.dim() > 1 else 1
        p.copy_(torch.arange(7.0, 7 * p.numel() + 1, 7, dtype=torch.float64).sin().reshape(p.shape) / fan_in**0.5)
    images = torch.arange(6.0 * side * side, dtype=torch.float64).cos().reshape(2, 3, side, side)
    assert net(images)[1, :3].tolist() == pytest.approx(LOGITS[name], rel=1e-6)


# -- Wide ResNets


# Name, parameters with 10 classes, and as the paper's tables 4 and 5 round them, in millions.
@pytest.mark.parametrize(
    ("name", "exact", "published"),
    [("wrn_40_4", 8_949_210, 8.9), ("wrn_16_8", 10_961_370, 11.0), ("wrn_28_10", 36_479_194, 36.5)],
)
def test_parameters_and_depth_are_the_papers(name, exact, published):
    with on_meta():
        net = build(Model(name=name, num_classes=10))
    assert sum(p.numel() for p in net.parameters()) == exact and round(exact / 1e6, 1) == published
    deep = [m for m in net.modules() if isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3)]
    assert len(deep) + 3 == int(name.split("_")[1]), "the paper counts the three 1x1 shortcuts, and not fc"
    assert {(m.moving_average_fraction, m.eps) for m in net.modules() if isinstance(m, BatchNorm2d)} == {(0.9, 1e-5)}


def test_it_starts_as_the_authors_code_does_and_every_parameter_learns():
    torch.manual_seed(1)
    net = build(Model(name="wrn_16_8", num_classes=10))
    for conv in (m for m in net.modules() if isinstance(m, nn.Conv2d)):
        fan_out = conv.out_channels * conv.kernel_size[0] ** 2
        assert conv.bias is None and conv.weight.std().item() == pytest.approx(math.sqrt(2 / fan_out), rel=0.1)
    assert not net.get_submodule("fc").bias.any()
    logits = net(torch.randn(2, 3, 8, 8))
    logits.square().sum().backward()
    assert 0 < logits.abs().max() < 30
    assert all(p.grad is not None and torch.isfinite(p.grad).all() and p.grad.any() for p in net.parameters())
