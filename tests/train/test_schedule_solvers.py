"""Every solver type takes momentum and weight decay from the knobs of the update, and nothing from the settings of the stage."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from test_engine_solvers import EVERY, ITERATIONS, PARAMETERS, RESTATED, Array, distance, gradient, moving, shown, start
from torch import nn

from stagerun.base.knobs import Knobs
from stagerun.base.recipe import Solver
from stagerun.engine.parameters import Parameter
from stagerun.engine.solvers import make_update


def knobs(i: int) -> Knobs:
    """Momentum from 0 to 0.95 and back; weight decay off, on, and off again in the middle."""
    decay = 0.0 if i in (0, 9, 10) else 0.01 + 0.005 * i
    return Knobs(moving(i), 0.95 * np.sin(np.pi * i / ITERATIONS).item(), decay)


def engine(solver: Solver) -> dict[str, Array]:
    parameters = [
        Parameter(p.name, nn.Parameter(torch.from_numpy(start()[p.name])), p.lr_mult, p.decay_mult, p.adapt)
        for p in PARAMETERS
    ]
    update = make_update(parameters, solver)
    for i in range(ITERATIONS):
        for p in parameters:
            p.tensor.grad = torch.from_numpy(gradient(p.name, i, p.tensor.detach().numpy()))
        update.update(knobs(i))
    return {p.name: p.tensor.detach().numpy() for p in parameters}


def formula(solver: Solver) -> dict[str, Array]:
    w = start()
    remembered: dict[str, dict] = {p.name: {} for p in PARAMETERS}
    for i in range(ITERATIONS):
        now = replace(solver, momentum=knobs(i).momentum, weight_decay=knobs(i).weight_decay)
        g = {p.name: gradient(p.name, i, w[p.name]) for p in PARAMETERS}
        for p in PARAMETERS:
            w[p.name] = RESTATED[solver.type](now, p, remembered[p.name], w[p.name], g[p.name], knobs(i).lr, i + 1)
    return w


@pytest.mark.parametrize("solver", EVERY, ids=shown)
def test_update_is_the_formula_with_the_knobs_of_the_moment(solver: Solver) -> None:
    assert distance(engine(solver), formula(solver)) < 1e-12
