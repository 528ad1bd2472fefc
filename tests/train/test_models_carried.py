"""Networks of other systems that stagerun carries on: ResNet-9, AlexNet-BN, MXNet's two Inceptions."""

import math

import pytest
import torch
import torch.nn.functional as F
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


# -- what they compute, written again with torch's functions from the published files


def unit(net: nn.Module, name: str, x: torch.Tensor, stride: int = 1) -> torch.Tensor:
    conv, bn = net.get_submodule(f"{name}.conv"), net.get_submodule(f"{name}.bn")
    y = F.conv2d(x, conv.weight, conv.bias, stride, padding=conv.kernel_size[0] // 2)
    return F.relu(F.batch_norm(y, None, None, bn.weight, bn.bias, training=True, eps=bn.eps))


def resnet9(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = F.max_pool2d(unit(net, "layer1", unit(net, "prep", x)), 2)
    x = x + unit(net, "residual1.res2", unit(net, "residual1.res1", x))
    x = F.max_pool2d(unit(net, "layer2", x), 2)
    x = F.max_pool2d(unit(net, "layer3", x), 2)
    x = x + unit(net, "residual3.res2", unit(net, "residual3.res1", x))
    return F.linear(F.max_pool2d(x, 4).flatten(1), net.fc.weight) * 0.125


def alexnet_bn(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = F.max_pool2d(unit(net, "prep", x, 2), 2)
    x = F.max_pool2d(unit(net, "layer1", x), 2)
    x = unit(net, "layer3", unit(net, "layer2", x))
    x = F.max_pool2d(unit(net, "layer4", x), 2)
    return F.linear(F.max_pool2d(x, 2).flatten(1), net.fc.weight) * 0.125


def inception_bn_28_small(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = unit(net, "conv1", x)
    for name in ("3a", "3b", "3c", "4a", "4b", "4c", "4d", "4e", "5a", "5b"):
        three = unit(net, f"in{name}.conv3x3", x, 2 if name in ("3c", "4e") else 1)
        other = F.max_pool2d(x, 3, 2, ceil_mode=True) if name in ("3c", "4e") else unit(net, f"in{name}.conv1x1", x)
        x = torch.cat([three, other] if name in ("3c", "4e") else [other, three], 1)
    return F.linear(F.avg_pool2d(x, 7).flatten(1), net.fc.weight, net.fc.bias)


def inception_bn(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = F.max_pool2d(unit(net, "conv1", x, 2), 3, 2, ceil_mode=True)
    x = F.max_pool2d(unit(net, "conv2.1", unit(net, "conv2.0", x)), 3, 2, ceil_mode=True)
    for name in ("3a", "3b", "3c", "4a", "4b", "4c", "4d", "4e", "5a", "5b"):
        block, stride = f"in{name}", 2 if name in ("3c", "4e") else 1
        three = unit(net, f"{block}.conv3x3.1", unit(net, f"{block}.conv3x3.0", x), stride)
        double = unit(net, f"{block}.double3x3.1", unit(net, f"{block}.double3x3.0", x))
        double = unit(net, f"{block}.double3x3.2", double, stride)
        if stride == 2:
            x = torch.cat([three, double, F.max_pool2d(x, 3, 2, ceil_mode=True)], 1)
            continue
        pooled = F.max_pool2d(x, 3, 1, 1) if name == "5b" else F.avg_pool2d(x, 3, 1, 1, count_include_pad=True)
        projected = unit(net, f"{block}.projection", pooled)
        x = torch.cat([unit(net, f"{block}.conv1x1", x), three, double, projected], 1)
    return F.linear(F.avg_pool2d(x, 7).flatten(1), net.fc.weight, net.fc.bias)


@pytest.mark.parametrize("again", [resnet9, alexnet_bn, inception_bn_28_small, inception_bn])
def test_what_they_compute_is_what_the_published_files_say(again):
    name = again.__name__
    net = fresh(name, eps=1e-10 if "inception" in name else 1e-5).double()
    side = PUBLISHED[name][1]
    x = torch.randn(2, 3, side, side, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        torch.testing.assert_close(net(x), again(net, x), rtol=1e-9, atol=1e-12)
