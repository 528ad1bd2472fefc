"""One weight update: closed form, accumulation, clipping, frozen parameters, dropout, BatchNorm's statistics."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from engine_help import CPU, SOLVER, ConvNet, Linear, Threads, assert_same, cut, dataset, tensors, updates
from facade import Determinism, Knobs, ParamKind, ParamRule, Precision, binary, make_state
from torch import nn

from stagerun.comm import SoloComm
from stagerun.models import BatchNorm2d

FIXED, ELASTIC = Determinism.FIXED, Determinism.ELASTIC
BIAS = ParamRule(kind=ParamKind.BIAS, lr_mult=2, decay_mult=0)
BATCHES = [cut(dataset(48), 16 * i, 16 * i + 16) for i in range(3)]


@pytest.mark.parametrize("clip", [None, 0.5, 0.02])
def test_a_linear_classifier_is_the_same_however_the_batch_is_cut(clip):
    """What `clip_gradients` limits is the norm of the mean gradient."""
    solver = replace(SOLVER, batch_size=16, param=(BIAS,), clip_gradients=clip)
    whole, expected = updates(Linear(), replace(solver, device_batch_size=16), BATCHES, SoloComm())
    for logical, workers in [(4, 1), (8, 1), (2, 2), (8, 2), (4, 3), (8, 3), (4, 4)]:
        one = replace(solver, device_batch_size=16 // logical)
        for determinism in Determinism:
            for state, outcomes in Threads(workers).run(
                lambda c, d=determinism, s=one: updates(Linear(), s, BATCHES, c, d)
            ):
                assert_same(tensors(whole), tensors(state), 1e-12)
                np.testing.assert_allclose([o.loss for o in outcomes], [o.loss for o in expected], rtol=1e-12)
    plain = replace(solver, momentum=0.0, param=(), clip_gradients=clip)
    state, _ = updates(Linear(), plain, BATCHES[:1], SoloComm(), knobs=lambda i: Knobs(1.0, 0.0, 0.0))
    before = Linear().double().state_dict()
    moved = torch.cat([(before[k] - v).flatten() for k, v in state.model.state_dict().items()]).norm()
    assert moved.item() == pytest.approx(clip) if clip == 0.02 else moved > 0.02


def conv_solver(**changes):
    """Of 6 logical workers."""
    return replace(SOLVER, batch_size=24, device_batch_size=4, **changes)


@pytest.mark.parametrize("channels_last", [False, True])
def test_workers_equal_one_worker_to_rounding_and_elastic_ones_bit_for_bit(channels_last):
    batches = [dataset(24, seed=i) for i in range(3)]
    solver = conv_solver(channels_last=channels_last, type="Nesterov")
    unused = ConvNet().double().unused.weight.detach() * (1 - 0.1 * 0.01)
    for determinism, tolerance in ((FIXED, 1e-11), (ELASTIC, 0.0)):
        one = tensors(updates(ConvNet(), solver, batches, SoloComm(), determinism)[0])
        for workers in (2, 3, 4, 6):
            states = Threads(workers).run(lambda comm, d=determinism: updates(ConvNet(), solver, batches, comm, d)[0])
            assert_same(one, tensors(states[0]), tolerance)
            for state in states[1:]:
                assert_same(tensors(states[0]), tensors(state))
            once = Threads(workers).run(lambda c, d=determinism: updates(ConvNet(), conv_solver(), batches[:1], c, d))
            # What has no part in the loss only decays.
            torch.testing.assert_close(once[0][0].model.unused.weight.detach(), unused, rtol=1e-14, atol=0)


# -- which parameter has which multipliers


def test_frozen_parameters_keep_their_bits_and_the_rest_moves():
    rules = (ParamRule(name="conv1.*", lr_mult=0), ParamRule(kind=ParamKind.NORM, lr_mult=0))
    solver = conv_solver(param=rules)
    before = ConvNet().double().state_dict()
    frozen = {"conv1.weight", "bn1.weight", "bn1.bias", "bn2.weight", "bn2.bias"}
    for workers in (1, 2):
        state = Threads(workers).run(lambda comm: updates(ConvNet(), solver, [dataset(24)] * 3, comm)[0])[0]
        for name, tensor in state.model.named_parameters():
            assert torch.equal(tensor.detach(), before[name]) == (name in frozen), name
        assert not frozen & state.solver.history["steps"].keys()


def test_the_first_rule_that_fits_counts():
    rules = (
        ParamRule(name="bn2.*", kind=ParamKind.NORM, lr_mult=4),
        ParamRule(kind=ParamKind.NORM, decay_mult=0),
        ParamRule(name="?onv2.*", lr_mult=3),
        ParamRule(name="*", kind=ParamKind.BIAS, lr_mult=2),
    )
    state = make_state(ConvNet(), conv_solver(param=rules), CPU)
    found = {p.name: (p.lr_mult, p.decay_mult) for p in state.solver.parameters}
    wanted = {"bn2.weight": (4, 1), "bn1.weight": (1, 0), "conv2.weight": (3, 1), "conv1.weight": (1, 1)}
    assert found.items() >= {**wanted, "fc.bias": (2, 1), "fc.weight": (1, 1)}.items()
    state = make_state(ConvNet(), conv_solver(param=(ParamRule(kind=ParamKind.BIAS_AND_NORM, decay_mult=0),)), CPU)
    decayed = {p.name.rpartition(".")[0] for p in state.solver.parameters if p.decay_mult}
    assert decayed and all(
        p.decay_mult == 0 for p in state.solver.parameters if p.name.startswith("bn") or "bias" in p.name
    )


# -- BatchNorm


def batch_statistics(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and unbiased variance per channel of [N, C, H, W]."""
    m = values[:, 0].size
    return values.mean((0, 2, 3)), values.var((0, 2, 3)) * m / (m - 1)


class TwoNorms(nn.Module):
    """BatchNorm on the images themselves, so that its batch statistics are known."""

    def __init__(self, fractions: tuple[float, float], passes: int | None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.bn, self.other, self.fc = BatchNorm2d(1, fractions[0]), BatchNorm2d(1, fractions[1]), nn.Linear(36, 3)
        if passes is not None:
            self.bn.moving_average_passes = self.other.moving_average_passes = passes

    def forward(self, x):
        self.other(x)
        return self.fc(self.bn(x).flatten(1))


@pytest.mark.parametrize(("passes", "per"), [(None, 6), (2, 3), (3, 2), (6, 1), (0, 1)])
@pytest.mark.parametrize("fractions", [(0.8, 0.8), (0.0, 0.999), (1.0, 0.5)])
def test_running_statistics_are_caffes_accumulators(passes, per, fractions):
    """CAFFE: blobs mean, variance and factor, each f*old + new; what is used is the first two over the third. They are averaged over the
    `per` workers of a pass, and move once per pass, as Caffe's do with iter_size; 0: each device batch is a pass. No matter how many
    workers there are, the bits are the same with ELASTIC."""
    batches = [dataset(24, seed=i) for i in range(3)]
    found = [
        Threads(n).run(lambda comm: updates(TwoNorms(fractions, passes), conv_solver(), batches, comm, ELASTIC)[0])[0]
        for n in (1, 2, 3)
    ]
    saved, moves = found[0].model.state_dict(), 18 // per
    for layer, f in zip(("bn", "other"), fractions, strict=True):
        mean = variance = factor = 0.0
        for batch in batches:
            x = ((batch.images.transpose(0, 3, 1, 2) - 100.0) * 0.01).reshape(6, 4, 1, 6, 6)
            for first in range(0, 6, per):
                means, variances = zip(*(batch_statistics(one) for one in x[first : first + per]), strict=True)
                mean, variance = f * mean + np.mean(means), f * variance + np.mean(variances)
                factor = f * factor + 1
        np.testing.assert_allclose(saved[f"{layer}.running_mean"], mean / factor, rtol=1e-12)
        np.testing.assert_allclose(saved[f"{layer}.running_var"], variance / factor, rtol=1e-12)
        assert saved[f"{layer}.num_batches_tracked"] == moves
        assert factor == pytest.approx(binary.statistics_factor(f, moves))
        assert binary.statistics_passes(f, factor) == (moves if f else 1)
    for state in found[1:]:
        assert_same(tensors(found[0]), tensors(state))


# -- randomness and precision


def dropout_update(workers: int, determinism: Determinism, shift: int = 0, dropout: float = 0.5):
    batch = dataset(24)
    batch.positions = batch.positions + shift
    job = Threads(workers)
    return tensors(job.run(lambda c: updates(ConvNet(dropout), conv_solver(), [batch] * 2, c, determinism)[0])[0])


def test_dropout_depends_on_the_position_alone():
    torch.manual_seed(1)
    one = dropout_update(1, FIXED)
    torch.manual_seed(2)
    assert_same(one, dropout_update(1, FIXED))
    for workers in (2, 3):
        assert_same(one, dropout_update(workers, FIXED), 1e-12)
        assert_same(dropout_update(1, ELASTIC), dropout_update(workers, ELASTIC))
    for other in (dropout_update(1, FIXED, shift=24), dropout_update(1, FIXED, dropout=0.0)):
        assert (one["fc.weight"] - other["fc.weight"]).abs().max() > 1e-6


@pytest.mark.parametrize("determinism", Determinism)
def test_bf16_computes_coarsely_and_keeps_float32(determinism):
    batches, losses = [dataset(24, seed=i) for i in range(5)], {}
    for precision in (Precision.BF16, Precision.FP32):
        solver = conv_solver(precision=precision)
        state, outcomes = Threads(2).run(lambda c, s=solver: updates(ConvNet(), s, batches, c, determinism))[0]
        assert {t.dtype for t in tensors(state).values()} == {torch.float32, torch.int64}
        losses[precision] = outcomes[-1].loss
    assert losses[Precision.BF16] == pytest.approx(losses[Precision.FP32], abs=0.05)
    assert losses[Precision.BF16] != losses[Precision.FP32]
