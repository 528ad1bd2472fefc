"""Blurring before every second pixel is taken."""

import pytest
import torch
import torch.nn.functional as F
from facade import Model, torchvision_models
from torch import nn

from stagerun.models import build

pytestmark = pytest.mark.long

TAPS = torch.tensor([[1.0, 2, 1], [2, 4, 2], [1, 2, 1]], dtype=torch.float64) / 16


def blurred(x: torch.Tensor) -> torch.Tensor:
    """[N, C, H, W] by the formula, zeros around the edge, tap by tap."""
    height, width = x.shape[-2:]
    padded = F.pad(x, (1, 1, 1, 1))
    shifted = [TAPS[i, j] * padded[..., i : i + height, j : j + width] for i in range(3) for j in range(3)]
    return torch.stack(shifted).sum(0)


def images(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


# Convolutions with groups, with biases and of 1x1; the padding of the first pooling, and whether its last window may hang over the edge.
NETWORKS = {
    "resnet18": (1, False),
    "resnext50_32x4d": (1, False),
    "resnet50_intel_caffe": (0, True),
}


@pytest.mark.parametrize("side", [57, 64])
@pytest.mark.parametrize("name", NETWORKS)
def test_every_step_of_two_but_that_of_the_first_convolution_sees_the_blurred_map(name, side):
    net = build(Model(name=name, num_classes=3, blur_pool=True)).double()
    strided = {n: m for n, m in net.named_modules() if isinstance(m, nn.Conv2d) and m.stride != (1, 1)}
    # conv1, and in each of three groups a block's convolution and its shortcut.
    assert len(strided) == 7 and "conv1" in strided
    seen_by, made_by = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for n, module in {**strided, "maxpool": net.maxpool}.items():
        module.register_forward_pre_hook(lambda _, x, n=n: seen_by.update({n: x[0]}), prepend=True)
        module.register_forward_hook(lambda _, x, y, n=n: made_by.update({n: y}))
    with torch.no_grad():
        net(images(2, 3, side, side))
    for n, conv in strided.items():
        x, y = seen_by[n], made_by[n]
        seen = x if n == "conv1" else blurred(x)
        expected = F.conv2d(seen, conv.weight, conv.bias, conv.stride, conv.padding, groups=conv.groups)
        torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    padding, ceil_mode = NETWORKS[name]
    x, y = seen_by["maxpool"], made_by["maxpool"]
    assert y.shape == F.max_pool2d(x, 3, 2, padding, ceil_mode=ceil_mode).shape
    # Windows in single steps; one more where the last step of two hangs over the edge.
    rows, columns = (n + 2 * padding - 2 + (ceil_mode and (n + 2 * padding - 3) % 2) for n in x.shape[-2:])
    hanging = F.pad(x, (padding, padding + 1, padding, padding + 1), value=-torch.inf)
    expected = blurred(F.max_pool2d(hanging, 3, stride=1)[..., :rows, :columns])[..., ::2, ::2]
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)


def test_weights_are_drawn_and_named_as_without_it():
    def drawn(blur_pool: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(1)
        return build(Model(name="resnet18", num_classes=3, blur_pool=blur_pool)).state_dict()

    with_blur, without = drawn(True), drawn(False)
    assert with_blur.keys() == without.keys()
    assert all(torch.equal(with_blur[k], without[k]) for k in without)
    torchvision_models().resnet18(num_classes=3).load_state_dict(with_blur)
