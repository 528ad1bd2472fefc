"""The weight update against the formulas, written down once more for single arrays in numpy, and against torch's own."""

import numpy as np
import pytest
import torch
from torch import nn

from stagerun.engine.parameters import Parameter
from stagerun.engine.solvers import MomentumSolver
from stagerun.knobs import Knobs
from stagerun.recipe import MomentumForm

ITERATIONS = 20
# name, shape, lr_mult, decay_mult: two share their multipliers, so that groups of more than one are seen.
SHAPES = (("a", (3, 4), 1.0, 1.0), ("b", (4,), 2.0, 0.0), ("c", (2, 3, 3, 3), 1.0, 1.0), ("d", (5,), 0.5, 3.0))
CAFFE, TORCH = MomentumForm.CAFFE, MomentumForm.TORCH


def moving(i: int) -> float:
    """Warm-up, a jump down, a decay to zero."""
    return 0.05 * (i + 1) if i < 6 else 0.03 * (1 - i / ITERATIONS) ** 2


def constant(i: int) -> float:
    return 0.07


def start() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {name: rng.normal(size=shape) for name, shape, _, _ in SHAPES}


def gradient(name: str, i: int, w: np.ndarray) -> np.ndarray:
    """Of a quadratic whose minimum moves: depends on w, so that an error in one step shows in the next."""
    return 1.5 * w + np.sin(i + len(name) + np.arange(w.size)).reshape(w.shape)


def engine(type: str, form: MomentumForm, momentum: float, lr, decay: float = 0.03) -> dict[str, np.ndarray]:
    parameters = [
        Parameter(name, nn.Parameter(torch.from_numpy(start()[name])), lr_mult, decay_mult)
        for name, _, lr_mult, decay_mult in SHAPES
    ]
    solver = MomentumSolver(parameters, type, form)
    for i in range(ITERATIONS):
        for p in parameters:
            p.tensor.grad = torch.from_numpy(gradient(p.name, i, p.tensor.detach().numpy()))
        solver.update(Knobs(lr(i), momentum, decay))
    return {p.name: p.tensor.detach().numpy() for p in parameters}


def formula(type: str, form: MomentumForm, m: float, lr, decay: float = 0.03) -> dict[str, np.ndarray]:
    """sgd_solver.cpp and nesterov_solver.cpp: history, then the difference that is taken from the weights."""
    out = {}
    for name, _, lr_mult, decay_mult in SHAPES:
        w = start()[name]
        h = np.zeros_like(w)
        for i in range(ITERATIONS):
            rate = lr(i) * lr_mult
            g = gradient(name, i, w) + decay * decay_mult * w
            before = h
            if form is CAFFE:
                h = rate * g + m * h
                w = w - (h if type == "SGD" else (1 + m) * h - m * before)
            else:
                h = g + m * h
                w = w - rate * (h if type == "SGD" else g + m * h)
        out[name] = w
    return out


def distance(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    return max(float(np.abs(a[name] - b[name]).max()) for name in a)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.95])
@pytest.mark.parametrize("form", MomentumForm)
@pytest.mark.parametrize("type", ["SGD", "Nesterov"])
def test_update_is_the_formula(type, form, momentum):
    found = engine(type, form, momentum, moving)
    assert distance(found, formula(type, form, momentum, moving)) < 1e-12
    assert distance(found, start()) > 0.1


@pytest.mark.parametrize("type", ["SGD", "Nesterov"])
def test_forms_agree_while_the_learning_rate_stands_still_and_differ_where_it_moves(type):
    assert distance(engine(type, CAFFE, 0.9, constant), engine(type, TORCH, 0.9, constant)) < 1e-12
    assert distance(engine(type, CAFFE, 0.9, moving), engine(type, TORCH, 0.9, moving)) > 1e-2
    assert distance(engine(type, CAFFE, 0.0, moving), engine(type, TORCH, 0.0, moving)) < 1e-12


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_types_agree_without_momentum_only(momentum):
    apart = distance(engine("SGD", CAFFE, momentum, moving), engine("Nesterov", CAFFE, momentum, moving))
    assert apart > 1e-3 if momentum else apart < 1e-12


@pytest.mark.parametrize("type", ["SGD", "Nesterov"])
def test_torch_form_is_torch_optim_sgd(type):
    weights = {name: nn.Parameter(torch.from_numpy(w)) for name, w in start().items()}
    groups = [
        {"params": [weights[name]], "weight_decay": 0.03 * decay_mult, "lr_mult": lr_mult}
        for name, _, lr_mult, decay_mult in SHAPES
    ]
    optimiser = torch.optim.SGD(groups, lr=1.0, momentum=0.9, nesterov=type == "Nesterov")
    for i in range(ITERATIONS):
        for group in optimiser.param_groups:
            group["lr"] = moving(i) * group["lr_mult"]
        for name, w in weights.items():
            w.grad = torch.from_numpy(gradient(name, i, w.detach().numpy()))
        optimiser.step()
    theirs = {name: w.detach().numpy() for name, w in weights.items()}
    assert distance(engine(type, TORCH, 0.9, moving), theirs) < 1e-12


def test_momentum_and_weight_decay_may_move_too():
    """The knobs of an iteration are all that counts: nothing is kept from the iteration before but V."""
    w = nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    solver = MomentumSolver([Parameter("w", w, 1.0, 1.0)], "SGD", CAFFE)
    expected, v = 2.0, 0.0
    for knobs in (Knobs(0.1, 0.9, 0.0), Knobs(0.2, 0.5, 0.1), Knobs(0.0, 0.9, 0.3), Knobs(0.1, 0.0, 0.0)):
        w.grad = torch.tensor([1.0], dtype=torch.float64)
        solver.update(knobs)
        v = knobs.momentum * v + knobs.lr * (1.0 + knobs.weight_decay * expected)
        expected -= v
        assert w.item() == pytest.approx(expected, rel=1e-14)
    assert solver.history["w"].item() == pytest.approx(v, rel=1e-14)
