"""What torch or torchvision would do, done without them; and all networks by name."""

import os
import re

import contract
import net_texts
import pytest
import torch
from facade import NETWORKS, Model, UsageError, net_of, open_source, tensors, torchvision_models, torchvision_part
from on_meta import on_meta
from test_sources import NONE as NONE
from test_sources import items as items
from test_sources import write as write
from torch import nn

from stagerun.models import BatchNorm2d, build


@pytest.mark.parametrize("model", tensors.NAMED)
def test_parameters_of_known_networks_are_named_as_in_torch(model):
    published, layers = Model(name=model, num_classes=10), tensors.layers_of(Model(name=model, num_classes=10))
    if "resnet" in model:
        layers = net_of(net_texts.resnet50(intel=True), (3, 224, 224)).train.layers
    file = {f"{layer.name}.weight": (1,) * (1 + layer.name.startswith("fc")) for layer in layers}
    with on_meta():
        weights = {f"{name.rpartition('.')[0]}.weight" for name, _ in build(published).named_parameters()}
    assert set(tensors.network_names(published, file).values()) == weights


def test_the_same_items_as_torchvisions_own_code(tmp_path):
    names = [f"{c}/{d}{n}.jpg" for c in ("x", "y z", "B") for d in ("", "s/", "s-/", "s/t/", "Z/") for n in (1, 10, 9)]
    root = write(tmp_path / "set", *names)
    theirs = torchvision_part("torchvision.datasets").ImageFolder(str(root))
    assert items(open_source(str(root), NONE)) == [(os.path.relpath(p, root), label) for p, label in theirs.samples]


# -- All networks by name: what the tables of language.networks say about them, checked against torchvision

# What torchvision is asked for, so that a network answers with logits alone, of the images as they come.
AUXILIARY = {"aux_logits": False, "transform_input": False, "init_weights": True}
ARGUMENTS = {"googlenet": AUXILIARY, "inception_v3": AUXILIARY}
TORCHVISION = [name for name, network in NETWORKS.items() if not network.made_by]


def family(name: str) -> str:
    return re.match("[a-z]+", name)[0]


# One of each family and of what is known of it; the rest is left to scripts/test --slow where a test computes something. A FEW of them
# in the quick run.
SAMPLE = {(family(name), NETWORKS[name]): name for name in reversed(NETWORKS)}.values()
FEW = ("resnet18", "resnet9", "squeezenet1_1", "shufflenet_v2_x0_5", "vit_b_16", "googlenet")
REST = [name for name in NETWORKS if name not in SAMPLE]
ALL = [
    *(name if name in FEW else pytest.param(name, marks=pytest.mark.long) for name in SAMPLE),
    *(pytest.param(name, marks=pytest.mark.slow) for name in REST),
]
OF_TORCHVISION = [one for one in ALL if (one if isinstance(one, str) else one.values[0]) in TORCHVISION]


def parameters(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


def theirs(name: str) -> nn.Module:
    with on_meta():
        return torchvision_models().get_model(name, weights=None, num_classes=1000, **ARGUMENTS.get(name, {}))


def published_parameters(name: str) -> int:
    """Those of the weights that torchvision offers for images of the smallest size: vit_h_14 has others for 518 pixels."""
    weights = torchvision_models().get_model_weights(name)
    return min(w.meta["num_params"] for w in weights)


def test_they_are_all_classifiers_of_torchvision_and_some_more():
    models = torchvision_models()
    assert set(TORCHVISION) == set(models.list_models(module=models))


def test_the_manual_lists_them_all(tmp_path):
    words = contract.stagerun(["help", "Model.name"], tmp_path).output.replace("`", " ").replace(".", " ").split()
    assert set(words) >= NETWORKS.keys()


@pytest.mark.parametrize("name", OF_TORCHVISION)
def test_torchvisions_networks_have_the_published_number_of_parameters_and_our_batch_norm(name):
    with on_meta():
        ours = build(Model(name=name, num_classes=1000, moving_average_fraction=0.125, eps=2e-4))
    published = published_parameters(name)
    if name == "inception_v3":  # counted with its auxiliary classifier, which has 3.3 million and is off here
        published -= 3_326_696
    assert parameters(ours) == published
    norms = [m for m in ours.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
    assert {(type(m), m.moving_average_fraction, m.eps) for m in norms} <= {(BatchNorm2d, 0.125, 2e-4)}
    published_norms = [m for m in theirs(name).modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
    assert len(norms) == len(published_norms)
    assert {(round(1 - m.momentum, 6), m.eps) for m in published_norms} == {NETWORKS[name].batch_norm} - {None}
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs(name).named_parameters()]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("channels", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_each_takes_images_and_ends_in_a_layer_as_it_is_said_to(name, channels):
    facts = NETWORKS[name]
    with on_meta():
        net = build(Model(name=name, num_classes=7, channels=channels))
    *_, last = (m for m in net.modules() if isinstance(m, nn.Linear | nn.Conv2d))
    assert isinstance(last, nn.Linear) == facts.fc_weight and last.weight.shape[0] == 7
    assert (isinstance(last, nn.Linear) and last.bias is not None) == facts.fc_bias

    def logits(side: int) -> torch.Size:
        return net(torch.empty(2, channels, side, side, device="meta")).shape

    for training in (True, False):
        net.train(training)
        assert logits(facts.smallest) == (2, 7)
    outside = [facts.smallest - 1, *([facts.largest + 1] if facts.largest else [])]
    for side in filter(None, outside):
        with pytest.raises(UsageError, match=f"{side} x {side}"):
            logits(side)
    if not facts.largest:
        assert logits(facts.smallest + 33) == (2, 7)
        net._forward_pre_hooks.clear()  # so that the network itself meets an image that is too small
        if facts.smallest > 1:
            with pytest.raises(RuntimeError):
                logits(facts.smallest - 1)


# -- the first convolution


def first(net: nn.Module) -> nn.Conv2d:
    return next(m for m in net.modules() if isinstance(m, nn.Conv2d))


SMALLEST = {family(name): name for name in reversed(TORCHVISION)}
# The families whose first weights have a spread that goes by the number of inputs, so that those of fewer channels are larger.
BY_INPUTS = {"alexnet", "densenet", "shufflenet", "squeezenet", "swin", "vit"}


@pytest.mark.parametrize("name", SMALLEST.values(), ids=str)
def test_a_first_convolution_of_one_channel_is_filled_as_torchvision_fills_its_own(name):
    """Spread, shape of the distribution (0.798 for gaussian, 0.866 for uniform) and biases."""
    torch.manual_seed(1)
    with on_meta(keep=lambda module: getattr(module, "in_channels", 0) in (1, 3)):
        published = first(torchvision_models().get_model(name, num_classes=7, **ARGUMENTS.get(name, {})))
        grey = [first(build(Model(name=name, num_classes=7, channels=1))) for _ in range(3)]

    def shape(weight: torch.Tensor) -> float:
        return (weight.abs().mean() / weight.std()).item()

    weights = torch.stack([c.weight for c in grey])
    spread = published.weight.std().item() * (3**0.5 if family(name) in BY_INPUTS else 1)
    assert weights.std().item() == pytest.approx(spread, rel=0.1)
    assert shape(weights) == pytest.approx(shape(published.weight), abs=0.04)
    assert all(bool(c.bias is None) == bool(published.bias is None) for c in grey)
    if published.bias is not None:
        assert all(bool(c.bias.any()) == bool(published.bias.any()) for c in grey)
    assert weights.shape[1:] == (published.out_channels, 1, *published.kernel_size)
    assert (grey[0].stride, grey[0].padding) == (published.stride, published.padding)


@pytest.mark.parametrize(
    "name",
    [
        "resnet18",
        "squeezenet1_1",
        *(pytest.param(n, marks=pytest.mark.long) for n in ("resnext50_32x4d", "mobilenet_v3_small", "googlenet")),
    ],
)
def test_weights_are_those_that_torchvision_draws_and_fit_into_its_network(name):
    torch.manual_seed(3)
    ours = build(Model(name=name, num_classes=5))
    torch.manual_seed(3)
    published = torchvision_models().get_model(name, num_classes=5, **ARGUMENTS.get(name, {}))
    for key, tensor in published.state_dict().items():
        assert torch.equal(ours.state_dict()[key], tensor), key
    published.load_state_dict(ours.state_dict())
    image = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        # torchvision's eps, where it is not 1e-5, is spec's business.
        for module in published.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eps = 1e-5
        torch.testing.assert_close(ours.eval()(image), published.eval()(image))
