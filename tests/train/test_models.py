"""ResNets: Intel Caffe's, our small one, zero gammas; BatchNorm; torchvision's import. test_networks.py has them all."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from facade import Model, recipe, torchvision_models
from torch import nn

from stagerun.models import BatchNorm2d, build


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_resnet_small_has_the_312_thousand_parameters_of_its_description():
    one, three = (parameters(build(Model(name="resnet_small", num_classes=10, channels=c))) for c in (1, 3))
    assert round(one / 1000) == 312
    assert three - one == 2 * 32 * 3 * 3


# -- ResNet-50 as Intel's recipes for Caffe have it; test_caffe_export.py compares it with its net


@pytest.fixture(scope="module")
def intel_caffe():
    torch.manual_seed(1)
    return build(Model(name="resnet50_intel_caffe", num_classes=1000, moving_average_fraction=0.95))


def test_intel_caffes_resnet50_is_torchvisions_with_64_biases_more(intel_caffe):
    assert parameters(intel_caffe) == 25_557_096
    published = torchvision_models().resnet50()
    assert intel_caffe.state_dict().keys() - published.state_dict().keys() == {"conv1.bias"}
    assert not published.state_dict().keys() - intel_caffe.state_dict().keys()
    norms = [m for m in intel_caffe.modules() if isinstance(m, BatchNorm2d)]
    assert len(norms) == 53 and {(n.moving_average_fraction, n.eps) for n in norms} == {(0.95, 1e-5)}


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


LAST = ["layer1.2.bn3", "layer2.3.bn3", "layer3.5.bn3", "layer4.2.bn3"]
EVERY = [f"layer{g}.{i}.bn3" for g, count in enumerate((3, 4, 6, 3), 1) for i in range(count)]
LAST_18 = [f"layer{g}.1.bn2" for g in (1, 2, 3, 4)]
EVERY_18 = [f"layer{g}.{i}.bn2" for g in (1, 2, 3, 4) for i in (0, 1)]
SMALL = ["layer1.bn2", "layer2.bn2", "layer3.bn2"]


@pytest.mark.parametrize(
    ("name", "as_published", "last", "every"),
    [
        ("resnet50_intel_caffe", LAST, LAST, EVERY),  # bn2c, bn3d, bn4f and bn5c of branch2c
        ("resnet18", [], LAST_18, EVERY_18),
        ("resnet_small", SMALL, SMALL, SMALL),
    ],
)
def test_zero_gammas(name, as_published, last, every):
    wanted = {"AS_PUBLISHED": as_published, "NONE": [], "LAST": last, "ALL": every}
    for zero_gamma, expected in wanted.items():
        net = build(Model(name=name, num_classes=2, zero_gamma=recipe.ZeroGamma[zero_gamma]))
        scales = {n: m.weight for n, m in net.named_modules() if isinstance(m, BatchNorm2d)}
        assert all((w == 0).all() or (w == 1).all() for w in scales.values())
        assert [n for n, weight in scales.items() if not weight.any()] == expected


# -- torchvision


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
    code = f"import sys; sys.path[:0] = [{str(Path(__file__).parents[2])!r}, {str(tmp_path)!r}]\n"
    code += "from stagerun.models.vision import torchvision_models as m; print(m().resnet18)"
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "works\n", "")
