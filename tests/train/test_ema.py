"""Averaged weights: the formula, and that training doesn't notice them. Stops: test_due_once."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from engine_help import CPU, SOLVER, ConvNet, assert_same, dataset, tensors, updates
from facade import ParamRule, TrainState, average, make_state, weights
from torch import Tensor

from stagerun.comm import SoloComm

BATCHES = [dataset(8, seed=i) for i in range(7)]
WITH_EMA = replace(SOLVER, ema_decay=0.8, ema_interval=2, param=(ParamRule(name="conv1.*", lr_mult=0),))


def trained(solver=WITH_EMA, count: int = 7) -> TrainState:
    return updates(ConvNet(), solver, BATCHES[:count], SoloComm())[0]


def course(solver=WITH_EMA) -> Iterator[dict[str, Tensor]]:
    """The weights and statistics after 0, 1, 2, ... iterations."""
    state = make_state(ConvNet(), solver, CPU)
    yield {k: t.clone() for k, t in weights(state).items()}
    for batch in BATCHES:
        updates(state.model, solver, [batch], SoloComm(), state=state)
        yield {k: t.clone() for k, t in weights(state).items()}


def test_the_average_is_the_formula_over_weights_and_statistics():
    seen = list(course(SOLVER))
    state = trained(replace(WITH_EMA, param=()))
    found = average(state)
    assert {"fc.bias", "bn1.weight", "bn2.running_mean", "bn2.running_var"} < found.keys()
    assert found.keys() == {name for name, t in seen[0].items() if t.is_floating_point()}, "all but the counters"
    for name, tensor in found.items():
        expected = seen[0][name].numpy()
        for iter in (2, 4, 6):
            expected = 0.8 * expected + (1 - 0.8) * seen[iter][name].numpy()
        assert np.abs(tensor.numpy() - expected).max() <= 1e-12 * max(1e-3, np.abs(expected).max()), name
    assert not torch.equal(found["fc.weight"], seen[7]["fc.weight"])


def test_what_is_frozen_is_its_own_average_to_the_bit():
    before = ConvNet().double().conv1.weight.detach()
    assert torch.equal(average(trained())["conv1.weight"], before)


def test_training_does_not_notice():
    assert_same(tensors(trained(replace(WITH_EMA, ema_decay=None))), tensors(trained()))


@pytest.mark.parametrize("fails", [False, True])
def test_in_place_of_the_weights_and_back_to_the_bit(fails):
    state = trained()
    before, averaged = tensors(state), {k: t.clone() for k, t in average(state).items()}
    assert state.average is not None
    try:
        with state.average.in_place():
            inside = {k: weights(state)[k].clone() for k in averaged}
            running = state.statistics.running.clone()
            if fails:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert fails
    assert_same(inside, averaged)
    assert_same(tensors(state), before)
    assert torch.equal(state.statistics.running, torch.cat([
        before[f"{layer}.running_{kind}"] for layer in ("bn1", "bn2") for kind in ("mean", "var")
    ]))  # fmt: skip
    assert not torch.equal(running, state.statistics.running)
