"""One weight update: closed form, accumulation, clipping, frozen parameters, dropout, BatchNorm's statistics."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from engine_help import (
    KNOBS,
    SOLVER,
    ConvNet,
    Linear,
    Threads,
    assert_same,
    cut,
    dataset,
    tensors,
    updates,
)
from torch import nn

from stagerun.base.net import statistics_factor, statistics_passes
from stagerun.base.recipe import Determinism, Model, ParamKind, ParamRule, Precision
from stagerun.comm import SoloComm
from stagerun.engine.parameters import idle_rules, multipliers, trained_parameters
from stagerun.models import BatchNorm2d, build

FIXED, ELASTIC = Determinism.FIXED, Determinism.ELASTIC
BIAS = ParamRule(kind=ParamKind.BIAS, lr_mult=2, decay_mult=0)


def closed_form(batches, solver=SOLVER, knobs=KNOBS, clip=None):
    """Weights, bias and losses of the linear classifier after SGD in Caffe's form, biases with BIAS's multipliers."""
    net = Linear().double()
    w, b = net.fc.weight.detach().numpy().copy(), net.fc.bias.detach().numpy().copy()
    vw, vb, losses = np.zeros_like(w), np.zeros_like(b), []
    for batch in batches:
        n = len(batch.labels)
        x = (batch.images.transpose(0, 3, 1, 2).reshape(n, -1) - 100.0) * 0.01
        scores = x @ w.T + b
        p = np.exp(scores - scores.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        losses.append(-np.log(p[np.arange(n), batch.labels]).mean())
        p[np.arange(n), batch.labels] -= 1
        gw, gb = p.T @ x / n, p.sum(0) / n
        norm = np.sqrt((gw**2).sum() + (gb**2).sum())
        if clip is not None and norm > clip:
            gw, gb = gw * clip / norm, gb * clip / norm
        vw = knobs.momentum * vw + knobs.lr * (gw + knobs.weight_decay * w)
        vb = knobs.momentum * vb + 2 * knobs.lr * gb
        w, b = w - vw, b - vb
    return w, b, losses


def three_batches(n: int = 16):
    data = dataset(3 * n)
    return [cut(data, i * n, (i + 1) * n) for i in range(3)]


@pytest.mark.parametrize(
    ("logical", "workers"), [(1, 1), (2, 1), (4, 1), (8, 1), (2, 2), (4, 2), (8, 2), (4, 3), (8, 3)]
)
def test_linear_classifier_is_the_closed_form_however_the_batch_is_cut(logical, workers):
    solver = replace(SOLVER, batch_size=16, device_batch_size=16 // logical, param=(BIAS,))
    batches = three_batches()
    w, b, losses = closed_form(batches)
    for determinism in (FIXED, ELASTIC):
        for state, outcomes in Threads(workers).run(
            lambda comm, d=determinism: updates(Linear(), solver, batches, comm, d)
        ):
            np.testing.assert_allclose(state.model.fc.weight.detach().numpy(), w, rtol=0, atol=1e-12)
            np.testing.assert_allclose(state.model.fc.bias.detach().numpy(), b, rtol=0, atol=1e-12)
            np.testing.assert_allclose([o.loss for o in outcomes], losses, rtol=1e-12)
            assert state.iter == 3


@pytest.mark.parametrize("logical", [1, 4])
def test_clip_gradients_takes_the_norm_of_the_mean_gradient(logical):
    batches = three_batches()
    solver = replace(SOLVER, batch_size=16, device_batch_size=16 // logical, param=(BIAS,))
    for clip in (0.5, 0.02):
        for workers in (1, logical):
            found = Threads(workers).run(
                lambda comm, c=clip: updates(Linear(), replace(solver, clip_gradients=c), batches, comm)
            )[0][0]
            np.testing.assert_allclose(
                found.model.fc.weight.detach().numpy(), closed_form(batches, clip=clip)[0], rtol=0, atol=1e-12
            )
    assert np.abs(closed_form(batches, clip=0.02)[0] - closed_form(batches)[0]).max() > 1e-3


def conv_solver(logical: int = 6, **changes):
    return replace(SOLVER, batch_size=4 * logical, device_batch_size=4, **changes)


@pytest.mark.parametrize("channels_last", [False, True])
def test_workers_equal_one_worker_to_rounding_and_elastic_ones_bit_for_bit(channels_last):
    batches = [dataset(24, seed=i) for i in range(3)]
    solver = conv_solver(channels_last=channels_last, type="Nesterov")
    for determinism, tolerance in ((FIXED, 1e-11), (ELASTIC, 0.0)):
        one = tensors(updates(ConvNet(), solver, batches, SoloComm(), determinism)[0])
        for workers in (2, 3, 4, 6):
            states = Threads(workers).run(lambda comm, d=determinism: updates(ConvNet(), solver, batches, comm, d)[0])
            assert_same(one, tensors(states[0]), tolerance)
            for state in states[1:]:
                assert_same(tensors(states[0]), tensors(state))


@pytest.mark.parametrize("determinism", Determinism)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_parameter_without_part_in_the_loss_only_decays(determinism, workers):
    state = Threads(workers).run(lambda comm: updates(ConvNet(), conv_solver(), [dataset(24)], comm, determinism)[0])[0]
    before = ConvNet().double().unused.weight.detach()
    torch.testing.assert_close(state.model.unused.weight.detach(), before * (1 - 0.1 * 0.01), rtol=1e-14, atol=0)


# -- which parameter has which multipliers


def test_frozen_parameters_keep_their_bits_and_the_rest_moves():
    rules = (ParamRule(name="conv1.*", lr_mult=0), ParamRule(kind=ParamKind.NORM, lr_mult=0))
    for workers in (1, 2):
        state = Threads(workers).run(
            lambda comm: updates(ConvNet(), conv_solver(param=rules), [dataset(24)] * 3, comm)[0]
        )[0]
        before = ConvNet().double().state_dict()
        frozen = {"conv1.weight", "bn1.weight", "bn1.bias", "bn2.weight", "bn2.bias"}
        for name, tensor in state.model.named_parameters():
            assert torch.equal(tensor.detach(), before[name]) == (name in frozen), name
        assert not frozen & state.solver.history["steps"].keys()


def test_the_first_rule_that_fits_counts():
    rules = (
        ParamRule(name="layer4.*", kind=ParamKind.NORM, lr_mult=4),
        ParamRule(kind=ParamKind.NORM, decay_mult=0),
        ParamRule(name="layer?.0.*", lr_mult=3),
        ParamRule(name="*", kind=ParamKind.BIAS, lr_mult=2),
    )
    model = build(Model(name="resnet18", num_classes=10))
    found = {p.name: (p.lr_mult, p.decay_mult) for p in trained_parameters(model, rules)}
    assert found["layer4.0.bn1.weight"] == (4, 1)
    assert found["layer3.0.bn1.weight"] == (1, 0)
    assert found["layer3.0.conv1.weight"] == (3, 1)
    assert found["layer3.1.conv1.weight"] == (1, 1)
    assert found["fc.bias"] == (2, 1)
    assert multipliers("x", ParamKind.WEIGHT, ()) == ParamRule()


def test_rules_that_fit_nothing_are_named_with_a_hint():
    rules = (ParamRule(name="conv1.*"), ParamRule(name="conv1.wieght"), ParamRule(name="conv*", kind=ParamKind.BIAS))
    idle = {rule.name: hint for rule, hint in idle_rules(ConvNet(), rules)}
    assert idle.keys() == {"conv1.wieght", "conv*"}
    assert "conv1.weight" in idle["conv1.wieght"]
    assert idle["conv*"]


# -- BatchNorm


def batch_statistics(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and unbiased variance per channel of [N, C, H, W]."""
    m = values[:, 0].size
    return values.mean((0, 2, 3)), values.var((0, 2, 3)) * m / (m - 1)


class OneNorm(nn.Module):
    """BatchNorm on the images themselves, so that its batch statistics are known."""

    def __init__(self, fraction: float) -> None:
        super().__init__()
        self.bn = BatchNorm2d(1, fraction)
        self.fc = nn.Linear(36, 3)

    def forward(self, x):
        return self.fc(self.bn(x).flatten(1))


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("fraction", [0.0, 0.8, 0.999])
def test_running_statistics_are_caffes_three_accumulators_averaged_over_logical_workers(fraction, workers):
    """CAFFE: blobs mean, variance and factor, each f*old + new; what is used is the first two over the third."""
    batches = [dataset(24, seed=i) for i in range(7)]
    states = Threads(workers).run(lambda comm: updates(OneNorm(fraction), conv_solver(), batches, comm)[0])
    means, variances, factors = np.zeros((6, 1)), np.zeros((6, 1)), np.zeros(6)
    for batch in batches:
        x = (batch.images.transpose(0, 3, 1, 2) - 100.0) * 0.01
        for k in range(6):
            mean, var = batch_statistics(x[4 * k : 4 * k + 4])
            means[k] = fraction * means[k] + mean
            variances[k] = fraction * variances[k] + var
            factors[k] = fraction * factors[k] + 1
    for state in states:
        saved = state.model.state_dict()
        np.testing.assert_allclose(saved["bn.running_mean"], (means / factors[:, None]).mean(0), rtol=1e-12)
        np.testing.assert_allclose(saved["bn.running_var"], (variances / factors[:, None]).mean(0), rtol=1e-12)
        assert saved["bn.num_batches_tracked"] == 7


@pytest.mark.parametrize(("passes", "per"), [(2, 3), (3, 2), (6, 1), (0, 1)])
@pytest.mark.parametrize("fractions", [(0.8, 0.8), (0.0, 0.999), (1.0, 0.5)])
def test_statistics_move_once_per_pass_as_caffes_do_with_iter_size(passes, per, fractions):
    """The statistics of `per` workers of Caffe's, which are averaged, each pass in its turn; 0: each device batch is a pass. No matter how many workers
    there are, the bits are the same with ELASTIC; the second layer has another fraction."""

    class Two(OneNorm):
        def __init__(self) -> None:
            torch.manual_seed(1)
            super().__init__(fractions[0])
            self.other = BatchNorm2d(1, fractions[1])
            self.bn.moving_average_passes = self.other.moving_average_passes = passes

        def forward(self, x):
            self.other(x)
            return super().forward(x)

    batches = [dataset(24, seed=i) for i in range(3)]
    found = [
        Threads(n).run(lambda comm: updates(Two(), conv_solver(), batches, comm, Determinism.ELASTIC)[0])[0]
        for n in (1, 2, 3)
    ]
    saved = found[0].model.state_dict()
    for layer, f in zip(("bn", "other"), fractions, strict=True):
        mean = variance = factor = 0.0
        for batch in batches:
            x = ((batch.images.transpose(0, 3, 1, 2) - 100.0) * 0.01).reshape(6, 4, 1, 6, 6)
            for first in range(0, 6, per):
                each = [batch_statistics(one) for one in x[first : first + per]]
                mean, variance = (
                    f * old + np.mean(new) for old, new in zip((mean, variance), zip(*each, strict=True), strict=True)
                )
                factor = f * factor + 1
        np.testing.assert_allclose(saved[f"{layer}.running_mean"], mean / factor, rtol=1e-12)
        np.testing.assert_allclose(saved[f"{layer}.running_var"], variance / factor, rtol=1e-12)
        assert saved[f"{layer}.num_batches_tracked"] == 3 * 6 // per
        assert factor == pytest.approx(statistics_factor(f, 18 // per)) and statistics_passes(f, factor) == (
            18 // per if f else 1
        )
    for state in found[1:]:
        assert_same(tensors(found[0]), tensors(state))


def test_state_dict_of_the_norm_is_torchs_and_evaluation_uses_it():
    state = updates(ConvNet(), conv_solver(), [dataset(24)] * 2, SoloComm())[0]
    theirs = nn.BatchNorm2d(4).double()
    assert state.model.bn1.state_dict().keys() == theirs.state_dict().keys()
    theirs.load_state_dict(state.model.bn1.state_dict())
    x = torch.randn(3, 4, 5, 5, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(state.model.bn1.eval()(x), theirs.eval()(x))
        before = tensors(state)
        state.model.bn1.train()(x)
        assert_same(before, tensors(state))  # a forward pass alone moves nothing that is saved


# -- randomness, precision, what is not finite, stopping


def dropout_update(workers: int, determinism: Determinism, shift: int = 0, dropout: float = 0.5):
    batch = dataset(24)
    batch.positions = batch.positions + shift
    states = Threads(workers).run(
        lambda comm: updates(ConvNet(dropout), conv_solver(), [batch, batch], comm, determinism)[0]
    )
    return tensors(states[0])


def test_dropout_depends_on_the_position_alone():
    torch.manual_seed(1)
    one = dropout_update(1, FIXED)
    torch.manual_seed(2)
    assert_same(one, dropout_update(1, FIXED))
    for workers in (2, 3):
        assert_same(one, dropout_update(workers, FIXED), 1e-12)
        assert_same(dropout_update(1, ELASTIC), dropout_update(workers, ELASTIC))
    moved, without = dropout_update(1, FIXED, shift=24), dropout_update(1, FIXED, dropout=0.0)
    assert (one["fc.weight"] - moved["fc.weight"]).abs().max() > 1e-6
    assert (one["fc.weight"] - without["fc.weight"]).abs().max() > 1e-6


@pytest.mark.parametrize("determinism", Determinism)
def test_bf16_computes_coarsely_and_keeps_float32(determinism):
    batches = [dataset(24, seed=i) for i in range(5)]
    model = {}
    for precision in (Precision.BF16, Precision.FP32):
        solver = conv_solver(precision=precision)
        states = Threads(2).run(lambda comm, s=solver: updates(ConvNet(), s, batches, comm, determinism))
        state, outcomes = states[0]
        assert {t.dtype for t in tensors(state).values()} == {torch.float32, torch.int64}
        model[precision] = tensors(state), outcomes[-1].loss
    assert model[Precision.BF16][1] == pytest.approx(model[Precision.FP32][1], abs=0.05)
    assert model[Precision.BF16][1] != model[Precision.FP32][1]
