"""The networks by name: that each one is what its name says, and that its BatchNorm is ours."""

import importlib
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from stagerun.models import MODELS, BatchNorm2d, build
from stagerun.models.vision import torchvision_models
from stagerun.recipe import Model
from stagerun.spec import check


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_each_network_takes_images_of_its_channels_and_answers_with_logits(name, channels):
    with torch.device("meta"):  # shapes alone: nothing is drawn or computed
        model = build(Model(name=name, num_classes=7, channels=channels, moving_average_fraction=0.95, eps=2e-5))
        assert model.train()(torch.empty(2, channels, 32, 32)).shape == (2, 7)
        assert model.eval()(torch.empty(2, channels, 32, 32)).shape == (2, 7)
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._NormBase | nn.GroupNorm | nn.LayerNorm)]
    assert norms
    for norm in norms:
        assert type(norm) is BatchNorm2d
        assert (norm.moving_average_fraction, norm.eps) == (0.95, 2e-5)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", ["resnet_small", "resnet18", "resnet50"])
def test_fresh_weights_give_logits_of_moderate_size_and_a_gradient_for_every_parameter(name, channels):
    torch.manual_seed(1)
    model = build(Model(name=name, num_classes=7, channels=channels))
    logits = model(torch.randn(4, channels, 32, 32))
    logits.square().sum().backward()
    assert logits.dtype == torch.float32 and 0 < logits.abs().max() < 10
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("resnet18", 11_689_512),
        ("resnet34", 21_797_672),
        ("resnet50", 25_557_032),
        ("resnet101", 44_549_160),
        ("resnet152", 60_192_808),
    ],
)
def test_parameter_counts_are_the_published_ones(name, count):
    with torch.device("meta"):  # nothing is drawn
        assert parameters(build(Model(name=name, num_classes=1000))) == count


def test_resnet_small_has_the_312_thousand_parameters_of_its_description():
    one, three = (parameters(build(Model(name="resnet_small", num_classes=10, channels=c))) for c in (1, 3))
    assert round(one / 1000) == 312
    assert three - one == 2 * 32 * 3 * 3


def test_resnet_small_has_the_maps_of_its_description():
    model = build(Model(name="resnet_small", num_classes=10, channels=1)).eval()
    shapes = []
    for part in (model.bn1, model.layer1, model.layer2, model.layer3, model.fc):
        part.register_forward_hook(lambda _module, _inputs, output: shapes.append(tuple(output.shape[1:])))
    model(torch.zeros(1, 1, 28, 28))
    assert shapes == [(32, 14, 14), (32, 14, 14), (64, 7, 7), (128, 4, 4), (10,)]


def test_the_spec_knows_the_same_names():
    """`stagerun check` runs without torch, so that it has a list of its own."""
    assert set(check.MODELS) == MODELS.keys()


def test_the_seed_alone_decides_the_weights():
    def drawn(seed: int, name: str) -> torch.Tensor:
        torch.manual_seed(seed)
        model = build(Model(name=name, num_classes=10, channels=1))
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    for name in ("resnet_small", "resnet18"):
        assert torch.equal(drawn(1, name), drawn(1, name))
        assert not torch.equal(drawn(1, name), drawn(2, name))


@pytest.mark.parametrize("channels", [1, 3])
def test_the_first_convolution_is_filled_by_the_same_rule_for_any_number_of_channels(channels):
    drawn = []
    for seed in range(4):
        torch.manual_seed(seed)
        drawn.append(build(Model(name="resnet18", num_classes=10, channels=channels)).conv1.weight.detach())
    assert drawn[0].shape == (64, channels, 7, 7)
    assert torch.cat(drawn).std().item() == pytest.approx(math.sqrt(2 / (64 * 7 * 7)), rel=0.03)


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


def test_evaluation_leaves_the_batch_statistics_alone():
    norm = BatchNorm2d(2).eval()
    norm(torch.randn(2, 2, 3, 3))
    assert not norm.batch_mean.any() and not norm.batch_var.any()


# -- torchvision


def python(code: str) -> subprocess.CompletedProcess:
    path = os.pathsep.join([str(Path(__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_importing_torchvisions_models_says_nothing_and_works_twice():
    done = python(
        "from stagerun.models.vision import torchvision_models as models\n"
        "assert models() is models()\n"
        "assert models().resnet18(num_classes=3).fc.out_features == 3\n"
        "import torchvision.transforms\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


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


@pytest.mark.parametrize("error", [RuntimeError("out of file handles"), ImportError("torchvision::nms")])
def test_another_error_of_torchvision_is_not_hidden(monkeypatch, error):
    def fails(name: str) -> None:
        raise error

    monkeypatch.setattr(importlib, "import_module", fails)
    with pytest.raises(type(error)) as caught:
        torchvision_models()
    assert caught.value is error
