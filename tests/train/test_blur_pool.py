"""Blurring before every second pixel is taken."""

import pytest
import torch
import torch.nn.functional as F
from facade import Model, torchvision_models
from torch import nn

from stagerun.models import build
from stagerun.models.resnet import BlurConv2d, BlurMaxPool2d

TAPS = torch.tensor([[1.0, 2, 1], [2, 4, 2], [1, 2, 1]], dtype=torch.float64) / 16


def blurred(x: torch.Tensor) -> torch.Tensor:
    """[N, C, H, W] by the formula, zeros around the edge, tap by tap."""
    height, width = x.shape[-2:]
    padded = F.pad(x, (1, 1, 1, 1))
    shifted = [TAPS[i, j] * padded[..., i : i + height, j : j + width] for i in range(3) for j in range(3)]
    return torch.stack(shifted).sum(0)


def images(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(16, 6, 3, stride=2, padding=1, bias=False),
        nn.Conv2d(16, 6, 1, stride=2),
        nn.Conv2d(16, 8, 3, stride=2, padding=1, groups=4),
    ],
    ids=["3x3", "shortcut", "groups"],
)
@pytest.mark.parametrize("side", [1, 2, 7, 8])
def test_a_convolution_sees_the_blurred_map(conv, side):
    conv = conv.double()
    x = images(2, 16, side, side)
    ours = BlurConv2d(conv)
    torch.testing.assert_close(ours(x), conv(blurred(x)), rtol=1e-12, atol=1e-12)
    assert ours.weight is conv.weight and ours.state_dict().keys() == conv.state_dict().keys()


@pytest.mark.parametrize("side", [3, 4, 7, 8, 56, 57])
@pytest.mark.parametrize(("padding", "ceil_mode"), [(1, False), (1, True), (0, True), (0, False)], ids=str)
def test_max_pooling_goes_in_single_steps_and_gives_as_many_pixels_as_before(side, padding, ceil_mode):
    pool = nn.MaxPool2d(3, stride=2, padding=padding, ceil_mode=ceil_mode)
    x = images(2, 4, side, side + 2)
    y = BlurMaxPool2d(pool, 4, x)(x)
    assert y.shape == pool(x).shape
    # Windows in single steps; one more where the last step of two hangs over the edge.
    rows, columns = (n + 2 * padding - 2 + (ceil_mode and (n + 2 * padding - 3) % 2) for n in x.shape[-2:])
    hanging = F.pad(x, (padding, padding + 1, padding, padding + 1), value=-torch.inf)
    expected = blurred(F.max_pool2d(hanging, 3, stride=1)[..., :rows, :columns])[..., ::2, ::2]
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "resnext50_32x4d", "resnet50_intel_caffe"])
def test_every_step_of_two_but_that_of_the_first_convolution_is_blurred(name):
    net = build(Model(name=name, num_classes=3, blur_pool=True))
    strided = {n: m for n, m in net.named_modules() if isinstance(m, nn.Conv2d) and m.stride != (1, 1)}
    assert {n: type(m) for n, m in strided.items()} == {n: nn.Conv2d if n == "conv1" else BlurConv2d for n in strided}
    assert len(strided) == 7  # conv1, and in each of three groups a block's convolution and its shortcut
    assert type(net.maxpool) is BlurMaxPool2d


def test_weights_are_drawn_and_named_as_without_it():
    def drawn(blur_pool: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(1)
        return build(Model(name="resnet18", num_classes=3, blur_pool=blur_pool)).state_dict()

    with_blur, without = drawn(True), drawn(False)
    assert with_blur.keys() == without.keys()
    assert all(torch.equal(with_blur[k], without[k]) for k in without)
    torchvision_models().resnet18(num_classes=3).load_state_dict(with_blur)


@pytest.mark.parametrize("name", ["resnet18", "resnet50_intel_caffe"])
def test_it_works_in_every_memory_format_and_precision(name):
    torch.manual_seed(1)
    net = build(Model(name=name, num_classes=3, blur_pool=True)).double().eval()
    x = images(2, 3, 64, 64)
    with torch.no_grad():
        expected = net(x)
        last = net.to(memory_format=torch.channels_last)
        torch.testing.assert_close(last(x.to(memory_format=torch.channels_last)), expected, rtol=1e-9, atol=1e-9)
        single = net.float()(x.float().to(memory_format=torch.channels_last))
        torch.testing.assert_close(single.double(), expected, rtol=1e-3, atol=1e-4)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            coarse = net(x.float().to(memory_format=torch.channels_last)).double()
    assert (coarse - expected).norm() < 0.1 * expected.norm()
