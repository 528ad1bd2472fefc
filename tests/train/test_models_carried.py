"""Networks of other systems that stagerun carries on: ResNet-9, AlexNet-BN, MXNet's two Inceptions."""

import math

import pytest
import torch
import torch.nn.functional as F
from on_meta import on_meta
from torch import nn

from stagerun.base.recipe import Model
from stagerun.models import BatchNorm2d, build

# (classes, side of the images, parameters)
PUBLISHED = {
    "resnet9": (10, 32, 6_573_120),
    "alexnet_bn": (10, 32, 2_255_296),
    "inception_bn_28_small": (10, 28, 1_652_826),
    "inception_bn": (1000, 224, 11_295_240),
}

# What each part gives for an image of the published size: its name, channels, side. A maximum comes after it.
_MAPS = {
    "resnet9": "prep 64 32, layer1 128 32, residual1 128 16, layer2 256 16, layer3 512 8, residual3 512 4",
    "alexnet_bn": "prep 64 16, layer1 192 8, layer2 384 4, layer3 256 4, layer4 256 4",
    "inception_bn_28_small": "conv1 96 28, in3a 64 28, in3b 80 28, in3c 160 14, in4a 160 14, in4b 160 14, in4c 160 14, "
    "in4d 144 14, in4e 240 7, in5a 336 7, in5b 336 7",
    "inception_bn": "conv1 64 112, conv2 192 56, in3a 256 28, in3b 320 28, in3c 576 14, in4a 576 14, in4b 576 14, "
    "in4c 608 14, in4d 608 14, in4e 1056 7, in5a 1024 7, in5b 1024 7",
}
MAPS = {
    net: {part: (int(channels), int(side)) for part, channels, side in (word.split() for word in text.split(", "))}
    for net, text in _MAPS.items()
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


@pytest.mark.parametrize("name", PUBLISHED)
def test_maps_have_the_published_channels_and_sizes(name):
    classes, side, _ = PUBLISHED[name]
    with on_meta():
        net = build(Model(name=name, num_classes=classes))
    found = {}
    for part in MAPS[name]:
        net.get_submodule(part).register_forward_hook(lambda _m, _i, y, part=part: found.update({part: y.shape[1:]}))
    assert net(torch.empty(2, 3, side, side, device="meta")).shape == (2, classes)
    assert found == {part: (channels, size, size) for part, (channels, size) in MAPS[name].items()}


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
