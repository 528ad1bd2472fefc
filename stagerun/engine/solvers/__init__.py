"""The weight update: one class per solver type, whose docstring is its formula.

In all of them, per parameter: g the gradient of the mean loss over the global batch; r = lr * lr_mult; m = momentum;
d = weight_decay * decay_mult; h = g + d*w, with `regularization_type: "L1"` g + d*sign(w); |x| the L2 norm of a parameter,
in its dtype. What is remembered starts at zero. lr, m and weight_decay are those of the update (they move with their policies), all
else is the stage's. Sources: the solvers of BVLC Caffe and sara-nl/caffe (610a2fa9), `sgd_solver.cpp`
and its neighbours; the papers named in the classes.
"""

from collections.abc import Sequence

from stagerun.engine.parameters import Parameter
from stagerun.engine.solvers.adam import LAMB, Adam, AdamW
from stagerun.engine.solvers.base import WeightUpdate
from stagerun.engine.solvers.momentum import LARS, SGD, Nesterov
from stagerun.engine.solvers.squares import AdaDelta, AdaGrad, RMSProp
from stagerun.recipe import Solver

__all__ = ["UPDATES", "WeightUpdate", "make_update"]

UPDATES: dict[str, type[WeightUpdate]] = {
    "SGD": SGD,
    "Nesterov": Nesterov,
    "AdaGrad": AdaGrad,
    "RMSProp": RMSProp,
    "AdaDelta": AdaDelta,
    "Adam": Adam,
    "AdamW": AdamW,
    "LARS": LARS,
    "LAMB": LAMB,
}


def make_update(parameters: Sequence[Parameter], solver: Solver) -> WeightUpdate:
    """The update of `solver.type` for these parameters, with nothing remembered yet."""
    return UPDATES[solver.type](parameters, solver)
