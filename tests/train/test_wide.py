"""Wide ResNets, against the paper (arXiv:1605.07146)."""

import math

import pytest
import torch
from facade import Model
from on_meta import on_meta
from torch import nn

from stagerun.models import BatchNorm2d, build


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
