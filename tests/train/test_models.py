"""ResNets: Intel Caffe's, our small one, zero gammas; BatchNorm; torchvision's import. test_networks.py has them all."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from stagerun.base.recipe import Model, ZeroGamma
from stagerun.models import BatchNorm2d, build
from stagerun.models.vision import torchvision_models


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_resnet_small_has_the_312_thousand_parameters_of_its_description():
    one, three = (parameters(build(Model(name="resnet_small", num_classes=10, channels=c))) for c in (1, 3))
    assert round(one / 1000) == 312
    assert three - one == 2 * 32 * 3 * 3


@pytest.mark.parametrize(
    "name",
    [
        "resnet_small",
        "resnet18",
        *(pytest.param(n, marks=pytest.mark.long) for n in ("resnet50_intel_caffe", "googlenet")),
    ],
)
def test_the_seed_alone_decides_the_weights(name):
    def drawn(seed: int, name: str) -> torch.Tensor:
        torch.manual_seed(seed)
        model = build(Model(name=name, num_classes=10, channels=1))
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(drawn(1, name), drawn(1, name))
    assert not torch.equal(drawn(1, name), drawn(2, name))


# -- ResNet-50 as Intel's recipes for Caffe have it


@pytest.fixture(scope="module")
def intel_caffe() -> nn.Module:
    torch.manual_seed(1)
    return build(Model(name="resnet50_intel_caffe", num_classes=1000, moving_average_fraction=0.95))


def test_intel_caffes_resnet50_is_torchvisions_with_64_biases_more(intel_caffe):
    assert parameters(intel_caffe) == 25_557_096
    published = torchvision_models().resnet50()
    assert intel_caffe.state_dict().keys() - published.state_dict().keys() == {"conv1.bias"}
    assert not published.state_dict().keys() - intel_caffe.state_dict().keys()
    norms = [m for m in intel_caffe.modules() if isinstance(m, BatchNorm2d)]
    assert len(norms) == 53 and {(n.moving_average_fraction, n.eps) for n in norms} == {(0.95, 1e-5)}


def test_its_max_pooling_pads_nothing_and_rounds_up(intel_caffe):
    x = torch.arange(112.0 * 112).reshape(1, 1, 112, 112)
    y = intel_caffe.maxpool(x)
    assert y.shape == (1, 1, 56, 56)
    # Windows of 3 from pixel 0 on: the first one ends at pixel 2, the last one hangs over the edge.
    assert y[0, 0, 0, :3].tolist() == [2 * 112 + 2, 2 * 112 + 4, 2 * 112 + 6]
    assert y[0, 0, -1, -1] == 112 * 112 - 1 and y[0, 0, -2, -2] == 110 * 112 + 110


def test_its_strides_are_in_the_3x3_convolutions(intel_caffe):
    strided = [n for n, m in intel_caffe.named_modules() if isinstance(m, nn.Conv2d) and m.stride == (2, 2)]
    blocks = [f"layer{i}.0.{c}" for i in (2, 3, 4) for c in ("conv2", "downsample.0")]
    assert strided == ["conv1", *blocks]


def test_its_weights_start_as_its_fillers_say(intel_caffe):
    for name, conv in intel_caffe.named_modules():
        if isinstance(conv, nn.Conv2d):
            fan = 64 * 7 * 7 if name == "conv1" else conv.in_channels * conv.kernel_size[0] ** 2
            w = conv.weight.detach()
            assert w.std().item() == pytest.approx(math.sqrt(2 / fan), rel=0.03), name
            assert abs(w.mean().item()) < 5 * w.std().item() / math.sqrt(w.numel()), name
            assert (w.abs().mean() / w.std()).item() == pytest.approx(math.sqrt(2 / math.pi), rel=0.03), name
    assert intel_caffe.conv1.bias.shape == (64,) and not intel_caffe.conv1.bias.any()
    assert intel_caffe.fc.weight.std().item() == pytest.approx(0.01, rel=0.01) and not intel_caffe.fc.bias.any()


# -- where the scales start at zero


def zero_gammas(**model) -> list[str]:
    net = build(Model(num_classes=2, **model))
    scales = {n: m.weight for n, m in net.named_modules() if isinstance(m, BatchNorm2d)}
    assert all((w == 0).all() or (w == 1).all() for w in scales.values())
    return [name for name, weight in scales.items() if not weight.any()]


LAST = ["layer1.2.bn3", "layer2.3.bn3", "layer3.5.bn3", "layer4.2.bn3"]
EVERY = [f"layer{g}.{i}.bn3" for g, count in enumerate((3, 4, 6, 3), 1) for i in range(count)]


@pytest.mark.parametrize(
    ("zero_gamma", "expected"), [("AS_PUBLISHED", LAST), ("NONE", []), ("LAST", LAST), ("ALL", EVERY)]
)
def test_zero_gammas_of_intel_caffes_resnet50(zero_gamma, expected):
    """bn2c, bn3d, bn4f and bn5c of branch2c as published."""
    assert zero_gammas(name="resnet50_intel_caffe", zero_gamma=ZeroGamma[zero_gamma]) == expected


@pytest.mark.parametrize(
    ("zero_gamma", "expected"), [("AS_PUBLISHED", 0), ("NONE", 0), ("LAST", 4), ("ALL", 8)], ids=str
)
def test_zero_gammas_of_torchvisions_resnets(zero_gamma, expected):
    found = zero_gammas(name="resnet18", zero_gamma=ZeroGamma[zero_gamma])
    assert len(found) == expected and all(name.endswith("bn2") for name in found)
    if zero_gamma == "LAST":
        assert found == [f"layer{i}.1.bn2" for i in (1, 2, 3, 4)]


def test_zero_gammas_of_resnet_small():
    every = ["layer1.bn2", "layer2.bn2", "layer3.bn2"]
    for zero_gamma in ("AS_PUBLISHED", "LAST", "ALL"):
        assert zero_gammas(name="resnet_small", zero_gamma=ZeroGamma[zero_gamma]) == every
    assert zero_gammas(name="resnet_small", zero_gamma=ZeroGamma.NONE) == []


# -- BatchNorm


def test_training_normalises_like_torch_and_leaves_the_batch_statistics():
    ours, theirs = BatchNorm2d(3, 0.9, 1e-3).double(), nn.BatchNorm2d(3, eps=1e-3, momentum=1.0).double()
    x = torch.randn(4, 3, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 3 + 2
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, z = ours(a), theirs(b)
    torch.testing.assert_close(y, z, rtol=1e-13, atol=1e-13)
    y.square().mul(x).sum().backward()
    z.square().mul(x).sum().backward()
    torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours.batch_mean, x.mean((0, 2, 3)))
    torch.testing.assert_close(ours.batch_var, x.var((0, 2, 3), unbiased=True))
    assert torch.equal(ours.running_mean, torch.zeros(3).double())
    assert torch.equal(ours.running_var, torch.ones(3).double())


# -- torchvision


def python(code: str) -> subprocess.CompletedProcess:
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.process
def test_a_torchvision_whose_extension_does_not_load_still_gives_its_models(tmp_path):
    """The wheel for CUDA beside a CPU build of torch: the import ends at operators that nobody defined."""
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import torch\n"
        "@torch.library.register_fake('torchvision::nms')\n"
        "def nms(dets, scores, iou_threshold): ...\n"
        "@torch.library.register_fake('torchvision::qnms')\n"
        "def qnms(dets, scores, iou_threshold): ...\n"
        "from torchvision import models\n"
    )
    (package / "models.py").write_text("resnet18 = 'works'\n")
    prepend = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    done = python(prepend + "from stagerun.models.vision import torchvision_models as m; print(m().resnet18)")
    assert (done.returncode, done.stdout, done.stderr) == (0, "works\n", "")
