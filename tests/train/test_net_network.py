"""Whole nets of Caffe's, written by hand: order, in-place layers, BatchNorm, several losses, phases, blobs that are shared."""

from dataclasses import replace

import numpy as np
import pytest
import stored_help
import torch
import torch.nn.functional as F
from facade import Mixture, Model, ParamKind, Solver, UsageError, kind_of, losses, make_state
from facade import layers as settings
from net_texts import DATA, net_from
from safetensors.torch import load_file

from stagerun.models import build

SHAPE = (3, 6, 6)
FILLED = 'weight_filler { type: "gaussian" std: 0.5 }'
SOLVER = Solver(
    base_lr=0.1, lr_policy="fixed", max_iter=1, batch_size=4, device_batch_size=4, test_batch_size=4, random_seed=1
)


def layer(kind: str, name: str, bottom: str = "x", top: str = "x", inside: str = "") -> str:
    bottoms = " ".join(f'bottom: "{one}"' for one in bottom.split())
    return f'layer {{ name: "{name}" type: "{kind}" {bottoms} top: "{top}" {inside} }}\n'


def inner(name: str, bottom: str = "x", top: str = "", inside: str = "") -> str:
    made = f"inner_product_param {{ num_output: 5 bias_term: false {FILLED} }} {inside}"
    return layer("InnerProduct", name, bottom, top or name, made)


def loss(bottom: str = "fc", inside: str = "") -> str:
    return layer("SoftmaxWithLoss", f"loss of {bottom}", f"{bottom} label", f"loss of {bottom}", inside)


def made(*layers: str, shape: tuple[int, int, int] = SHAPE) -> object:
    return net_from(DATA + "".join(layers), shape)


def network_of(*layers: str, shape: tuple[int, int, int] = SHAPE, classes: int = 5) -> torch.nn.Module:
    text = made(*layers, shape=shape).text
    model = Model(name="x", num_classes=classes, net=text, input_shape=shape, moving_average_fraction=None, eps=None)
    return build(model)


def images(count: int = 4) -> torch.Tensor:
    return torch.randn(count, *SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


CONV = layer(
    "Convolution", "conv", "data", "x",
    f'convolution_param {{ num_output: 4 kernel_size: 3 pad: 1 {FILLED} bias_filler {{ type: "gaussian" std: 0.5 }} }}',
)  # fmt: skip
NORM = layer("BatchNorm", "bn", inside="batch_norm_param { moving_average_fraction: 0.5 }")
SCALE = layer(
    "Scale", "scale", inside='scale_param { filler { type: "uniform" min: 0.5 max: 2 } bias_term: true bias_filler { type: "gaussian" std: 0.5 } }'
)  # fmt: skip
RELU = layer("ReLU", "relu")
NORMED = (CONV, NORM, SCALE, RELU, inner("fc"), loss())


# -- the order of layers


def test_a_layer_sees_its_bottom_as_it_is_at_its_place():
    """`early` reads the map before the ReLU in place, `late` after it."""
    network = network_of(
        CONV, inner("early"), RELU, inner("late"), layer("Eltwise", "sum", "early late", "fc"), loss()
    ).double()
    w = dict(network.named_parameters())
    x = F.conv2d(images(), w["conv.weight"], w["conv.bias"], padding=1).flatten(1)
    wanted = x @ w["early.weight"].T + x.relu() @ w["late.weight"].T
    for mode in (True, False):
        assert torch.allclose(network.train(mode)(images()), wanted, rtol=1e-13)


def test_images_of_another_size_are_refused_where_a_weight_counts_them():
    with pytest.raises(UsageError, match="layer `fc` takes 144 numbers per image, and gets 4 x 8 x 8"):
        network_of(*NORMED)(torch.zeros(1, 3, 8, 8))
    cut = 'layer { name: "cut" type: "Slice" bottom: "data" top: "a" top: "x" slice_param { axis: 3 } }'
    with pytest.raises(UsageError, match="layer `cut` cuts axis 3"):
        network_of(cut, inner("fc"), loss())(torch.zeros(1, 3, 6, 5))


# -- BatchNorm, whose numbers are real Caffe's in test_golden_training.py


def test_one_number_per_channel_is_normalised_to_zero():
    """Where torch raises, Caffe's variance is 0 and has no correction."""
    network = network_of(inner("ip", "data", "x"), NORM.replace('top: "x"', 'top: "fc"'), loss()).double()
    x = images(1)
    answer = network(x)
    answer.sum().backward()
    assert (answer == 0).all() and (network.ip.weight.grad == 0).all()
    assert torch.allclose(network.bn.batch_mean, (x.flatten(1) @ network.ip.weight.T).flatten())
    assert (network.bn.batch_var == 0).all()


def test_global_statistics_as_each_phase_says():
    def norm(phase: str, value: str) -> str:
        more = f"moving_average_fraction: 0.5 use_global_stats: {value}"
        return NORM.replace("moving_average_fraction: 0.5", more).replace("top:", f"include {{ phase: {phase} }} top:")

    def drawn(*norms: str) -> torch.nn.Module:
        torch.manual_seed(1)
        network = network_of(CONV, *norms, *NORMED[2:]).double()
        network.bn.running_mean.fill_(0.5)
        network.bn.running_var.fill_(2.0)
        return network

    network, usual = drawn(norm("TRAIN", "true"), norm("TEST", "false")), drawn(NORM)
    assert not network.bn.training
    in_training, in_test = network(images()), network.eval()(images())
    assert torch.allclose(usual(images()), in_test) and torch.allclose(usual.eval()(images()), in_training)
    assert (network.bn.batch_mean == 0).all()


# -- for other programs


@pytest.mark.long
def test_a_net_exported_to_onnx_answers_alike_for_any_batch(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pool = layer("Pooling", "pool", inside="pooling_param { pool: AVE kernel_size: 3 stride: 2 pad: 1 }", top="y")
    lrn = layer("LRN", "lrn", top="l", inside="lrn_param { alpha: 0.5 }")
    text = "".join((*NORMED[:4], lrn, pool.replace('"x"', '"l"'), inner("fc", "y"), loss()))
    for name, awkward in (("conv", "train"), ("scale", "s."), ("fc", "a..b")):
        text = text.replace(f'name: "{name}"', f'name: "{awkward}"')
    (tmp_path / "net.prototxt").write_text(DATA + text)
    settings = "mean_value: 110 scale: 0.01 crop_size: 6"
    transform = f"transform_param {{ {settings} }} test_transform_param {{ {settings} }}"
    schedule = stored_help.make_schedule(tmp_path, 'caffe_net: "net.prototxt" num_classes: 5 channels: 3', transform)
    folder = stored_help.make_snapshot(tmp_path / "out", schedule)
    done = stored_help.stagerun("export", folder, tmp_path / "x.onnx")
    assert done.exit_code == 0, done.output
    pixels = np.random.default_rng(1).integers(0, 256, (5, 6, 6, 3), dtype=np.uint8)
    (found,) = onnxruntime.InferenceSession((tmp_path / "x.onnx").read_bytes()).run(None, {"images": pixels})
    network = network_of(text).eval()
    network.load_state_dict(load_file(folder / "model.safetensors"))
    wanted = network((torch.tensor(pixels).permute(0, 3, 1, 2).float() - 110) * 0.01)
    np.testing.assert_allclose(found, wanted.detach().numpy(), rtol=1e-4, atol=1e-4)


# -- several losses


TWO = (CONV, inner("aux"), loss("aux", "loss_weight: 0.25"), RELU, inner("fc"), loss())


def test_auxiliary_losses_train_and_an_evaluation_has_the_main_logits():
    network = network_of(*TWO).double()
    labels = torch.tensor([0, 1, 2, 3])
    main, *each = network(images())
    assert each[1] is main or torch.equal(each[1], main)
    of_net = [one.settings for one in made(*TWO).train.layers if hasattr(one.settings, "loss_weight")]
    objective = losses.loss_of(SOLVER, of_net=of_net)
    found = objective((main, *each), labels, None, images())
    wanted = 0.25 * F.cross_entropy(each[0], labels) + F.cross_entropy(main, labels)
    assert found.item() == pytest.approx(wanted.item(), rel=1e-14)
    found.backward()
    assert all(p.grad is not None for p in network.parameters())
    assert torch.equal(network.eval()(images()), main)


def test_mixed_images_smoothing_and_class_weights_count_in_each_loss():
    logits = images().flatten(1)[:, :5]
    labels, partners = torch.tensor([0, 1, 2, 3]), torch.tensor([1, 0, 3, 2])
    by_class = torch.tensor([1.0, 2, 3, 4, 5], dtype=torch.float64)
    mixed = Mixture(0.25, partners)
    ofnet = losses.OfNet((settings.SoftmaxWithLoss(loss_weight=2.0),), 0.1, by_class)
    usual = losses.loss_of(replace(SOLVER, label_smoothing=0.1, class_weight=(1.0, 2, 3, 4, 5)))
    usual = replace(usual, class_weight=by_class)
    found, wanted = ofnet(logits, labels, mixed, logits), usual(logits, labels, mixed, logits)
    assert found.item() == pytest.approx(2 * wanted.item(), rel=1e-14)


def test_what_no_loss_depends_on_has_no_gradient_and_what_is_of_the_test_alone_stays():
    """A BatchNorm that nothing needs doesn't move."""
    branch = NORM.replace('"bn"', '"dead"').replace('top: "x"', 'top: "dead"'), inner("deader", "dead")
    late = inner("late", inside="include { phase: TEST }")
    network = network_of(*NORMED, *branch, late)
    state = make_state(network, SOLVER, torch.device("cpu"))
    trained = [p.name for p in state.solver.parameters]
    assert "deader.weight" in trained and "late.weight" not in trained
    assert state.statistics.layers == [network.bn]
    assert kind_of(network, "scale.weight") is ParamKind.NORM


# -- fillers


def filled(kind: str, shape: tuple[int, int, int], inside: str, filler: str) -> torch.Tensor:
    """The weights of a layer that looks at images of a shape."""
    torch.manual_seed(1)
    holder = {"InnerProduct": "inner_product_param", "Scale": "scale_param"}.get(kind, "convolution_param")
    word = "filler" if kind == "Scale" else "weight_filler"
    text = layer(kind, "it", "data", "x", f"{holder} {{ {inside} {word} {{ {filler} }} }}")
    return network_of(text, inner("fc"), loss(), shape=shape).it.weight.detach()


def test_fans_are_counted_from_the_blobs_own_shape():
    """An InnerProduct that is stored transposed has its inputs first, and Caffe counts as if they were outputs."""
    for transposed, inputs in (("false", 1000), ("true", 30)):
        found = filled("InnerProduct", (1000, 1, 1), f"num_output: 30 transpose: {transposed}", 'type: "xavier"')
        assert found.abs().max().item() == pytest.approx((3 / inputs) ** 0.5, rel=0.01)
    assert filled("Scale", (3, 6, 6), "axis: 1 num_axes: 0", 'type: "constant" value: 0.25').item() == 0.25
