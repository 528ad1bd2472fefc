"""Whole nets of Caffe's, written by hand: order, in-place layers, BatchNorm, several losses, phases, blobs that are shared."""

from dataclasses import replace

import caffe_layers as caffe
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from stagerun.base import net
from stagerun.base.errors import UsageError
from stagerun.base.net import Blob, Filler, Layer, Net, Pass
from stagerun.base.recipe import ParamKind, Solver
from stagerun.engine.export import Deployed, Pixels, for_rgb, to_onnx
from stagerun.engine.losses import OfNet
from stagerun.engine.losses import loss_of as loss_of_stage
from stagerun.engine.mixing import Mixed, Mixture
from stagerun.engine.parameters import kind_of, trained_parameters
from stagerun.engine.state import make_state
from stagerun.models.net import build, losses
from stagerun.models.net.steps import steps_of

SHAPE = (3, 6, 6)
GAUSSIAN = Filler(type="gaussian", std=0.5)
IMAGES = Layer(name="data", type="Data", settings=net.Images(), tops=("data", "label"))
SOLVER = Solver(
    base_lr=0.1, lr_policy="fixed", max_iter=1, batch_size=4, device_batch_size=4, test_batch_size=4, random_seed=1
)


def conv(name: str, bottom: str, top: str, outputs: int = 4, inputs: int = 3, size: int = 6, kernel: int = 3) -> Layer:
    blobs = (
        Blob(name=f"{name}.weight", shape=(outputs, inputs, kernel, kernel), filler=GAUSSIAN),
        Blob(name=f"{name}.bias", shape=(outputs,), filler=GAUSSIAN),
    )
    settings = net.Convolution(kernel=(kernel, kernel), pad=(kernel // 2, kernel // 2))
    return plain(name, settings, bottom, top, (outputs, size, size), blobs)


def inner(name: str, bottom: str, top: str, inputs: int, outputs: int = 5, **more) -> Layer:
    blobs = (Blob(name=f"{name}.weight", shape=(outputs, inputs), filler=GAUSSIAN, **more),)
    return plain(name, net.InnerProduct(), bottom, top, (outputs,), blobs)


def plain(name: str, settings: net.Settings, bottom: str, top: str, shape: net.Shape = (), blobs=()) -> Layer:
    kind = type(settings).__name__
    bottoms = tuple(bottom.split())
    return Layer(name=name, type=kind, settings=settings, bottoms=bottoms, tops=(top,), shapes=(shape,), blobs=blobs)


def loss(bottom: str, **settings) -> Layer:
    name = f"loss of {bottom}"
    return plain(name, net.SoftmaxWithLoss(**settings), f"{bottom} label", name)


def made(train: list[Layer], logits: str = "fc", test: list[Layer] | None = None) -> Net:
    passes = [
        Pass(layers=(IMAGES, *layers), images="data", labels="label", logits=logits)
        for layers in (train, test or train)
    ]
    return Net(name="", shape=SHAPE, num_classes=5, train=passes[0], test=passes[1])


def images(count: int = 4) -> torch.Tensor:
    return torch.randn(count, *SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


NORM = net.BatchNorm(moving_average_fraction=0.5)
SCALED = (
    Blob(name="scale.weight", shape=(4,), filler=Filler(type="uniform", min=0.5, max=2)),
    Blob(name="scale.bias", shape=(4,), filler=GAUSSIAN),
)
NORMED = [
    conv("conv", "data", "conv"),
    plain("bn", NORM, "conv", "conv", (4, 6, 6)),
    plain("scale", net.Scale(), "conv", "conv", (4, 6, 6), SCALED),
    plain("relu", net.ReLU(), "conv", "conv", (4, 6, 6)),
    inner("fc", "conv", "fc", 4 * 36),
    loss("fc"),
]


# -- the order of layers


def test_a_layer_sees_its_bottom_as_it_is_at_its_place():
    """`early` reads the map before the ReLU in place, `late` after it."""
    layers = [
        conv("conv", "data", "x"),
        inner("early", "x", "early", 4 * 36),
        plain("relu", net.ReLU(), "x", "x", (4, 6, 6)),
        inner("late", "x", "late", 4 * 36),
        plain("sum", net.Eltwise(), "early late", "fc", (5,)),
        loss("fc"),
    ]
    network = build(made(layers)).double()
    w = dict(network.named_parameters())
    x = F.conv2d(images(), w["conv.weight"], w["conv.bias"], padding=1).flatten(1)
    wanted = x @ w["early.weight"].T + x.relu() @ w["late.weight"].T
    for mode in (True, False):
        assert torch.allclose(network.train(mode)(images()), wanted, rtol=1e-13)


def test_blobs_of_one_name_are_one_parameter():
    shared = inner("b", "data", "b", 108)
    shared = replace(shared, blobs=(replace(shared.blobs[0], name="a.weight"),))
    layers = [inner("a", "data", "a", 108), shared, plain("sum", net.Eltwise(), "a b", "fc", (5,)), loss("fc")]
    network = build(made(layers)).double()
    (weight,) = network.parameters()
    assert torch.allclose(network(images()), 2 * images().flatten(1) @ weight.T)


def test_images_of_another_size_are_refused_where_a_weight_counts_them():
    with pytest.raises(UsageError, match="layer `fc` takes 144 numbers of an image, and gets 4 x 8 x 8"):
        build(made(NORMED))(torch.zeros(1, 3, 8, 8))


# -- BatchNorm


def test_batch_norm_and_scale_are_one_call_with_caffes_numbers():
    network = build(made(NORMED)).double()
    w = {name: tensor.detach().numpy() for name, tensor in network.named_parameters()}
    maps, _, _ = caffe.convolution(NORMED[0].settings, [images().numpy()], [w["conv.weight"], w["conv.bias"]], None)
    normed, _, mean, variance = caffe.batch_norm(maps, np.zeros_like(maps), NORM.eps)
    scaled, _, _ = caffe.scale(net.Scale(), [normed], [w["scale.weight"], w["scale.bias"]], maps)
    wanted = np.maximum(scaled, 0).reshape(4, -1) @ w["fc.weight"].T
    np.testing.assert_allclose(network(images()).detach().numpy(), wanted, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(network.bn.batch_mean.numpy(), mean, rtol=1e-12)
    np.testing.assert_allclose(network.bn.batch_var.numpy(), variance, rtol=1e-12)
    assert kind_of(network, "scale.weight") is ParamKind.NORM
    assert [step.layer.name for step in steps_of(made(NORMED).train, training=True).steps] == [
        "conv",
        "bn",
        "relu",
        "fc",
    ]


def test_batch_norm_backward_is_caffes():
    rng = np.random.default_rng(1)
    x, g = rng.standard_normal((4, 3, 2, 5)), rng.standard_normal((4, 3, 2, 5))
    only = build(
        made([plain("bn", NORM, "data", "bn", (3, 2, 5)), plain("flat", net.Reshape(), "bn", "fc", (30,)), loss("fc")])
    )
    only.double()
    bottom = torch.tensor(x, requires_grad=True)
    answer = only(bottom)
    answer.backward(torch.tensor(g.reshape(4, -1)))
    top, dx, _, _ = caffe.batch_norm(x, g, NORM.eps)
    np.testing.assert_allclose(answer.detach().numpy(), top.reshape(4, -1), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(bottom.grad.numpy(), dx, rtol=1e-12, atol=1e-12)


def test_one_number_per_channel_is_normalised_to_zero():
    """Where torch raises, Caffe's variance is 0 and has no correction."""
    layers = [inner("ip", "data", "ip", 108), plain("bn", NORM, "ip", "fc", (5,)), loss("fc")]
    network = build(made(layers)).double()
    x = images(1)
    answer = network(x)
    answer.sum().backward()
    assert (answer == 0).all() and (network.ip.weight.grad == 0).all()
    assert torch.allclose(network.bn.batch_mean, (x.flatten(1) @ network.ip.weight.T).flatten())
    assert (network.bn.batch_var == 0).all()


def test_global_statistics_as_each_phase_says():
    def with_norm(**settings) -> list[Layer]:
        return [replace(one, settings=replace(NORM, **settings)) if one.name == "bn" else one for one in NORMED]

    torch.manual_seed(1)
    network = build(made(with_norm(use_global_stats=True), test=with_norm(use_global_stats=False))).double()
    assert not network.bn.training
    network.bn.running_mean.fill_(0.5)
    network.bn.running_var.fill_(2.0)
    in_training, in_test = network(images()), network.eval()(images())
    torch.manual_seed(1)
    usual = build(made(NORMED)).double()
    usual.bn.running_mean.fill_(0.5)
    usual.bn.running_var.fill_(2.0)
    assert torch.allclose(usual(images()), in_test) and torch.allclose(usual.eval()(images()), in_training)
    assert (network.bn.batch_mean == 0).all()


# -- for other programs


@pytest.mark.long
def test_a_net_exported_to_onnx_answers_alike_for_any_batch():
    onnxruntime = pytest.importorskip("onnxruntime")
    layers = [
        *NORMED[:4],
        plain("lrn", net.LRN(alpha=0.5), "conv", "lrn", (4, 6, 6)),
        plain(
            "pool",
            net.Pooling(method=net.Method.AVE, kernel=(3, 3), stride=(2, 2), pad=(2, 2)),
            "lrn",
            "pool",
            (4, 4, 4),
        ),
        plain("flat", net.Reshape(), "pool", "flat", (64,)),
        inner("fc", "flat", "fc", 64),
        loss("fc"),
    ]
    network = build(made(layers)).eval()
    data = to_onnx(Deployed(network, Pixels("BGR", (110.0,) * 3, 0.01, (1.0,) * 3, False)), 3, 6, {})
    pixels = np.random.default_rng(1).integers(0, 256, (5, 6, 6, 3), dtype=np.uint8)
    (found,) = onnxruntime.InferenceSession(data).run(None, {"images": pixels})
    wanted = network((torch.tensor(pixels).permute(0, 3, 1, 2).float() - 110) * 0.01)
    np.testing.assert_allclose(found, wanted.detach().numpy(), rtol=1e-4, atol=1e-4)


def test_a_net_for_rgb_has_the_weights_of_what_takes_the_images_turned():
    network, x = build(made(NORMED)).double().eval(), images()
    wanted = network(x)
    network.load_state_dict(for_rgb(network.state_dict(), network))
    assert torch.allclose(network(x.flip(1)), wanted)
    with pytest.raises(UsageError, match="another layer than a convolution"):
        for_rgb({}, build(made([inner("fc", "data", "fc", 108), loss("fc")])))


# -- several losses


TWO = [
    conv("conv", "data", "x"),
    inner("aux", "x", "aux", 144),
    loss("aux", loss_weight=0.3),
    plain("relu", net.ReLU(), "x", "x", (4, 6, 6)),
    inner("fc", "x", "fc", 144),
    loss("fc"),
]


def test_auxiliary_losses_train_and_an_evaluation_has_the_main_logits():
    network = build(made(TWO)).double()
    labels = torch.tensor([0, 1, 2, 3])
    main, *each = network(images())
    assert each[1] is main or torch.equal(each[1], main)
    objective = loss_of_stage(SOLVER, of_net=losses(made(TWO)))
    found = objective((main, *each), labels, None, images())
    wanted = 0.3 * F.cross_entropy(each[0], labels) + F.cross_entropy(main, labels)
    assert found.item() == pytest.approx(wanted.item(), rel=1e-14)
    found.backward()
    assert all(p.grad is not None for p in network.parameters())
    assert torch.equal(network.eval()(images()), main)


def test_mixed_images_smoothing_and_class_weights_count_in_each_loss():
    logits = images().flatten(1)[:, :5]
    labels, partners = torch.tensor([0, 1, 2, 3]), torch.tensor([1, 0, 3, 2])
    by_class = torch.tensor([1.0, 2, 3, 4, 5], dtype=torch.float64)
    mixed = Mixed(Mixture(0.25, partners.numpy()), partners)
    ofnet = OfNet((net.SoftmaxWithLoss(loss_weight=2.0),), 0.1, by_class)
    usual = loss_of_stage(replace(SOLVER, label_smoothing=0.1, class_weight=(1.0, 2, 3, 4, 5)))
    usual = replace(usual, class_weight=by_class)
    found, wanted = ofnet(logits, labels, mixed, logits), usual(logits, labels, mixed, logits)
    assert found.item() == pytest.approx(2 * wanted.item(), rel=1e-14)


def test_what_no_loss_depends_on_has_no_gradient_and_what_is_of_the_test_alone_stays():
    """A BatchNorm that nothing needs doesn't move."""
    branch = [plain("dead", NORM, "conv", "dead", (4, 6, 6)), inner("deader", "dead", "deader", 144)]
    network = build(made([*NORMED, *branch], test=[*NORMED, inner("late", "conv", "late", 144)]))
    trained = [p.name for p in trained_parameters(network, ())]
    assert "deader.weight" in trained and "late.weight" not in trained
    state = make_state(network, SOLVER, torch.device("cpu"))
    assert state.statistics.layers == [network.bn]


# -- fillers


def filled(shape: tuple[int, ...], **settings) -> torch.Tensor:
    torch.manual_seed(1)
    layer = replace(
        inner("ip", "data", "fc", 1), blobs=(Blob(name="ip.weight", shape=shape, filler=Filler(**settings)),)
    )
    return build(made([layer, loss("fc")])).ip.weight.detach()


def test_sparse_gaussian_keeps_a_weight_with_the_probability_of_sparse_over_outputs():
    found = filled((50, 2000), type="gaussian", std=2.0, sparse=10)
    assert (found != 0).float().mean().item() == pytest.approx(0.2, abs=0.005)
    assert found[found != 0].std().item() == pytest.approx(2.0, rel=0.02)


def test_positive_unitball_sums_to_one_for_each_output():
    found = filled((7, 3, 4, 5), type="positive_unitball")
    assert (found > 0).all() and torch.allclose(found.flatten(1).sum(1), torch.ones(7))


@pytest.mark.parametrize(("width", "row"), [(2, [0.5, 0.5]), (3, [0.5, 1, 0.5]), (4, [0.25, 0.75, 0.75, 0.25])])
def test_bilinear_interpolates(width, row):
    found = filled((2, 1, width, width), type="bilinear")
    assert torch.equal(found[1, 0], torch.outer(*[torch.tensor(row)] * 2))


def test_fans_are_counted_from_the_blobs_own_shape():
    """An InnerProduct that is stored transposed has its inputs first, and Caffe counts as if they were outputs."""
    assert filled((30, 1000), type="xavier").abs().max().item() == pytest.approx((3 / 1000) ** 0.5, rel=0.01)
    assert filled((1000, 30), type="xavier").abs().max().item() == pytest.approx((3 / 30) ** 0.5, rel=0.01)
    assert filled((), type="constant", value=0.25).item() == 0.25
