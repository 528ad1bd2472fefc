"""The weight update of every solver type against its formula, written down once more in numpy, and against torch's own."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from engine_help import CPU, SOLVER, ConvNet
from facade import Knobs, Parameter, Solver, make_state, make_update, recipe
from torch import nn

from stagerun.schedule import SOLVER_TYPES, slots_of

ITERATIONS = 20
CAFFE, TORCH = recipe.MomentumForm.CAFFE, recipe.MomentumForm.TORCH
Array = np.ndarray


@dataclass(frozen=True)
class P:
    name: str
    shape: tuple[int, ...]
    lr_mult: float = 1.0
    decay_mult: float = 1.0
    adapt: bool = True


# Two share their multipliers, so that groups of more than one are seen; "zero" starts at zero, "still" has no gradient.
PARAMETERS = (
    P("a", (3, 4)),
    P("b", (4,), 2.0, 0.0),
    P("c", (2, 3, 3, 3)),
    P("d", (5,), 0.5, 3.0),
    P("plain", (6,), 3.0, 1.0, adapt=False),
    P("zero", (4, 2)),
    P("still", (3,)),
)


def moving(i: int) -> float:
    """Warm-up, a jump down, a decay to zero."""
    return 0.05 * (i + 1) if i < 6 else 0.03 * (1 - i / ITERATIONS) ** 2


def start() -> dict[str, Array]:
    rng = np.random.default_rng(1)
    return {p.name: rng.normal(size=p.shape) * (p.name != "zero") for p in PARAMETERS}


def gradient(name: str, i: int, w: Array) -> Array:
    """A quadratic has it whose minimum moves: it depends on w, so that an error in one step shows in the next."""
    return (name != "still") * (1.5 * w + np.sin(i + len(name) + np.arange(w.size)).reshape(w.shape))


def settings(type: str, **changes: object) -> Solver:
    """Large steps, so that an error in one is seen."""
    large = {
        "momentum": 0.9,
        "weight_decay": 0.03,
        "local_gw_ratio": 0.05,
        "delta": 1e-2 if type == "AdaDelta" else 1e-8,
    }
    return replace(SOLVER, **{"type": type, **large, **changes})


def knobs(i: int, solver: Solver) -> Knobs:
    """Momentum from 0 to 0.95 and back; weight decay off, on, and off again in the middle."""
    decay = 0.0 if i in (0, 9, 10) else 0.01 + 0.005 * i
    return Knobs(moving(i), 0.95 * np.sin(np.pi * i / ITERATIONS).item(), decay)


def steady(i: int, solver: Solver) -> Knobs:
    return Knobs(moving(i), solver.momentum, solver.weight_decay)


def engine(solver: Solver, knobs: Callable[[int, Solver], Knobs]) -> dict[str, Array]:
    parameters = [
        Parameter(p.name, nn.Parameter(torch.from_numpy(start()[p.name])), p.lr_mult, p.decay_mult, p.adapt)
        for p in PARAMETERS
    ]
    found = make_update(parameters, solver)
    for i in range(ITERATIONS):
        for p in parameters:
            p.tensor.grad = torch.from_numpy(gradient(p.name, i, p.tensor.detach().numpy()))
        found.update(knobs(i, solver))
    return {p.name: p.tensor.detach().numpy() for p in parameters}


# -- the formulas once more, for one parameter: x holds what is remembered


def decayed(s: Solver, p: P, w: Array, g: Array) -> Array:
    return g + s.weight_decay * p.decay_mult * (w if s.regularization_type == "L2" else np.sign(w))


def norm(x: Array) -> float:
    return float(np.sqrt(np.sum(x * x)))


def sgd(s: Solver, p: P, x: dict, w: Array, g: Array, lr: float, t: int) -> Array:
    rate, q = lr * p.lr_mult, 1.0
    if s.local_lr_auto and p.adapt:  # GetLocalRate: the ratio, or 1, in place of lr_mult
        both = norm(w) > 0 and norm(g) > 0
        rate = lr * (
            s.local_gw_ratio * norm(w) / (s.local_lr_passes * norm(g) + s.weight_decay * norm(w)) if both else 1.0
        )
    if s.type == "LARS" and p.adapt and norm(w) > 0 and norm(g) > 0:
        q = s.local_gw_ratio * norm(w) / (norm(g) + s.weight_decay * p.decay_mult * norm(w) + s.delta)
    if s.momentum_form is CAFFE:
        x["V"] = s.momentum * x.get("V", 0) + rate * q * decayed(s, p, w, g)
        return w - x["V"]
    x["V"] = s.momentum * x.get("V", 0) + decayed(s, p, w, g)
    return w - rate * q * x["V"]


def nesterov(s: Solver, p: P, x: dict, w: Array, g: Array, lr: float, t: int) -> Array:
    rate, h, before, m = lr * p.lr_mult, decayed(s, p, w, g), x.get("V", 0), s.momentum
    if s.momentum_form is CAFFE:
        x["V"] = m * before + rate * h
        return w - ((1 + m) * x["V"] - m * before)
    x["V"] = m * before + h
    return w - rate * (h + m * x["V"])


def adagrad(s: Solver, p: P, x: dict, w: Array, g: Array, lr: float, t: int) -> Array:
    h = decayed(s, p, w, g)
    x["V"] = x.get("V", 0) + h**2
    return w - lr * p.lr_mult * h / (x["V"] ** 0.5 + s.delta)


def rmsprop(s: Solver, p: P, x: dict, w: Array, g: Array, lr: float, t: int) -> Array:
    h = decayed(s, p, w, g)
    x["V"] = s.rms_decay * x.get("V", 0) + (1 - s.rms_decay) * h**2
    return w - lr * p.lr_mult * h / (x["V"] ** 0.5 + s.delta)


def adadelta(s: Solver, p: P, x: dict, w: Array, g: Array, lr: float, t: int) -> Array:
    h, m = decayed(s, p, w, g), s.momentum
    x["V"] = m * x.get("V", 0) + (1 - m) * h**2
    u = h * ((x.get("D", 0) + s.delta) / (x["V"] + s.delta)) ** 0.5
    x["D"] = m * x.get("D", 0) + (1 - m) * u**2
    return w - lr * p.lr_mult * u


def adam(s: Solver, p: P, x: dict, w: Array, g: Array, lr: float, t: int) -> Array:
    h = decayed(s, p, w, g) if s.type == "Adam" else g
    x["M"] = s.momentum * x.get("M", 0) + (1 - s.momentum) * h
    x["V"] = s.momentum2 * x.get("V", 0) + (1 - s.momentum2) * h**2
    first, second = 1 - s.momentum**t, 1 - s.momentum2**t
    rate = lr * p.lr_mult
    if s.type == "Adam":
        return w - rate * (second**0.5 / first) * x["M"] / (x["V"] ** 0.5 + s.delta)
    u = (x["M"] / first) / ((x["V"] / second) ** 0.5 + s.delta) + s.weight_decay * p.decay_mult * w
    if s.type == "LAMB" and p.adapt and norm(w) > 0 and norm(u) > 0:
        rate *= norm(w) / norm(u)
    return w - rate * u


RESTATED = {"SGD": sgd, "Nesterov": nesterov, "AdaGrad": adagrad, "RMSProp": rmsprop, "AdaDelta": adadelta,
            "Adam": adam, "AdamW": adam, "LARS": sgd, "LAMB": adam}  # fmt: skip


def formula(solver: Solver, knobs: Callable[[int, Solver], Knobs]) -> dict[str, Array]:
    w = start()
    remembered: dict[str, dict] = {p.name: {} for p in PARAMETERS}
    for i in range(ITERATIONS):
        found = knobs(i, solver)
        now = replace(solver, momentum=found.momentum, weight_decay=found.weight_decay)
        g = {p.name: gradient(p.name, i, w[p.name]) for p in PARAMETERS}
        for p in PARAMETERS:
            w[p.name] = RESTATED[solver.type](now, p, remembered[p.name], w[p.name], g[p.name], found.lr, i + 1)
    return w


def distance(a: dict[str, Array], b: dict[str, Array]) -> float:
    """The largest difference, as a share of the largest value of its parameter."""
    return max(float(np.abs(a[name] - b[name]).max() / np.abs(b[name]).max()) for name in a if np.abs(b[name]).max())


# -- what must hold

EVERY = [
    *(settings(type) for type in SOLVER_TYPES),
    *(settings(type, momentum_form=TORCH) for type in ("SGD", "Nesterov", "LARS")),
    *(settings("SGD", local_lr_auto=True, momentum_form=form) for form in (CAFFE, TORCH)),
    *(settings(t, regularization_type="L1") for t in ("SGD", "Nesterov", "AdaGrad", "RMSProp", "AdaDelta", "Adam")),
    settings("SGD", local_lr_auto=True, regularization_type="L1"),
    settings("SGD", local_lr_auto=True, local_lr_passes=4),
    *(settings(type, momentum=0.0) for type in ("SGD", "Nesterov", "AdaDelta", "Adam", "AdamW", "LARS", "LAMB")),
    *(settings(t, momentum2=0.9, rms_decay=0.7, delta=1e-3, local_gw_ratio=0.3) for t in ("AdaGrad", "RMSProp", "AdaDelta",
                                                                                       "Adam", "AdamW", "LARS", "LAMB")),
]  # fmt: skip


def shown(s: Solver) -> str:
    changed = (
        (n, getattr(s, n))
        for n in ("momentum_form", "local_lr_auto", "regularization_type", "momentum", "delta", "local_lr_passes")
    )
    return " ".join([s.type, *(str(getattr(v, "value", v)) for n, v in changed if v != getattr(settings(s.type), n))])


@pytest.mark.parametrize("given", [steady, knobs], ids=["steady", "moving"])
@pytest.mark.parametrize("solver", EVERY, ids=shown)
def test_update_is_the_formula_with_the_knobs_of_the_moment(solver, given):
    found = engine(solver, given)
    assert distance(found, formula(solver, given)) < 1e-12
    moved = {name: float(np.abs(found[name] - w).max()) for name, w in start().items()}
    assert min(moved[name] for name in moved if name != "still") > 1e-3
    assert moved["still"] > 1e-4  # weight decay alone


def test_every_type_of_the_language_has_a_row():
    assert list(RESTATED) == list(SOLVER_TYPES)
    for solver in EVERY:
        history = make_state(ConvNet(), solver, CPU).solver.history
        assert sorted(history) == sorted(slots_of(solver.type, solver.momentum_form))
