"""Networks of other systems that stagerun carries on: ResNet-9, AlexNet-BN, MXNet's two Inceptions; and Wide ResNets (arXiv:1605.07146)."""

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


# -- Wide ResNets


# Name, parameters with 10 classes, and as the paper's tables 4 and 5 round them, in millions; blocks of a group by table 1.
@pytest.mark.parametrize(("name", "exact", "published", "blocks"), [
    ("wrn_40_4", 8_949_210, 8.9, 6), ("wrn_16_8", 10_961_370, 11.0, 2), ("wrn_28_10", 36_479_194, 36.5, 4),
])  # fmt: skip
def test_parameters_maps_and_depth_are_the_papers(name: str, exact: int, published: float, blocks: int) -> None:
    _, depth, width = name.split("_")
    k, maps = int(width), {}
    with on_meta():
        net, hundred = (build(Model(name=name, num_classes=n)) for n in (10, 100))
    assert sum(p.numel() for p in net.parameters()) == exact and round(exact / 1e6, 1) == published
    assert sum(p.numel() for p in hundred.parameters()) - exact == 90 * (64 * k + 1)
    for part in ("conv1", "layer1", "layer2", "layer3"):
        net.get_submodule(part).register_forward_hook(lambda _m, _i, y, part=part: maps.update({part: tuple(y.shape)}))
    assert net(torch.empty(2, 3, 32, 32, device="meta")).shape == (2, 10)
    groups = {"layer1": (2, 16 * k, 32, 32), "layer2": (2, 32 * k, 16, 16), "layer3": (2, 64 * k, 8, 8)}
    assert maps == {"conv1": (2, 16, 32, 32), **groups}
    assert [len(net.get_submodule(group)) for group in groups] == [blocks] * 3  # type: ignore[arg-type]
    deep = [m for m in net.modules() if isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3)]
    assert len(deep) + 3 == int(depth), "the paper counts the three 1x1 shortcuts, and not fc"
    norms = [m for m in net.modules() if isinstance(m, BatchNorm2d)]
    assert len(norms) == len(deep) and {(n.moving_average_fraction, n.eps) for n in norms} == {(0.9, 1e-5)}


def test_it_starts_as_the_authors_code_does_and_every_parameter_learns() -> None:
    torch.manual_seed(1)
    net = build(Model(name="wrn_16_8", num_classes=10))
    for conv in (m for m in net.modules() if isinstance(m, nn.Conv2d)):
        fan_out = conv.out_channels * conv.kernel_size[0] ** 2
        assert conv.bias is None and conv.weight.std().item() == pytest.approx(math.sqrt(2 / fan_out), rel=0.1)
    assert not net.get_submodule("fc").bias.any()  # type: ignore[union-attr,operator]
    logits = net(torch.randn(2, 3, 8, 8))
    logits.square().sum().backward()
    assert 0 < logits.abs().max() < 30
    assert all(p.grad is not None and torch.isfinite(p.grad).all() and p.grad.any() for p in net.parameters())


def test_a_shortcut_takes_what_the_first_convolution_takes() -> None:
    """As the authors' code has it: BatchNorm and ReLU come before the fork where the shape changes, and after it elsewhere."""
    torch.manual_seed(1)
    first, second = build(Model(name="wrn_16_8", num_classes=2)).eval().get_submodule("layer1")  # type: ignore[misc]
    x = torch.randn(1, 16, 4, 4)
    with torch.no_grad():
        y = torch.relu(first.bn1(x))
        into = first.conv2(torch.relu(first.bn2(first.conv1(y)))) + first.shortcut(y)
        assert torch.equal(first(x), into)
        out = second.conv2(torch.relu(second.bn2(second.conv1(torch.relu(second.bn1(into)))))) + into
        assert torch.equal(second(into), out)
