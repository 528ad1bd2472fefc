"""Solver -> its learning rate as a function of the iteration; and the table of solver types. Pure, stdlib only."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from inspect import getfullargspec

from stagerun.base.recipe import DecayFrom, MomentumForm, Solver
from stagerun.schedule.policies import POLICIES

# Fields that a policy reads and that are there in any case.
GIVEN = ("base_lr", "max_iter", "epoch_iter")


@cache
def policy_fields(lr_policy: str) -> tuple[str, ...]:
    """The fields of Solver that a policy reads. KeyError for an unknown policy."""
    return tuple(getfullargspec(POLICIES[lr_policy].formula).args[1:])


def own_fields(lr_policy: str) -> tuple[str, ...]:
    """Those of them that say how this policy goes. KeyError for an unknown one."""
    return tuple(name for name in policy_fields(lr_policy) if name not in GIVEN)


def learning_rate(solver: Solver, drops: int = 0) -> Callable[[int], float]:
    """The stage's learning rate as a function of its iteration. `drops`: how often `plateau` has dropped it.

    In a warm-up it is (iter * base_lr + (warmup_iter - iter) * warmup_start_lr) / warmup_iter. The policy is read at the absolute iteration, so a
    falling one drops at the joint (SURFsara's rule), with `decay_from: WARMUP_END` from the end of the warm-up on.

    >>> solver = Solver(base_lr=1.0, lr_policy="poly", power=1.0, max_iter=10, warmup_iter=2, batch_size=1, device_batch_size=1,
    ...                 random_seed=0, test_batch_size=1)
    >>> [learning_rate(solver)(i) for i in (0, 1, 2)]
    [0.0, 0.5, 0.8]
    """
    formula = POLICIES[solver.lr_policy].formula
    start = solver.warmup_iter if solver.decay_from is DecayFrom.WARMUP_END else 0
    settings = {name: getattr(solver, name) for name in policy_fields(solver.lr_policy)}
    if "max_iter" in settings:
        settings["max_iter"] -= start
    if solver.lr_policy == "plateau":
        settings["drops"] = drops

    def rate(iter: int) -> float:
        at = iter + solver.policy_start_iter
        if at < solver.warmup_iter:
            ramp = at * solver.base_lr + (solver.warmup_iter - at) * solver.warmup_start_lr
            return ramp / solver.warmup_iter
        return formula(at - start, **settings)

    return rate


def warm_up_end(solver: Solver) -> int:
    """The iteration of the stage whose rate is the policy's first; 0 without a warm-up, max_iter where all is warm-up."""
    return min(max(solver.warmup_iter - solver.policy_start_iter, 0), solver.max_iter)


@dataclass(frozen=True, slots=True)
class Knobs:
    """The settings of one weight update: learning rate, momentum, factor of the L2 term (before multipliers)."""

    lr: float
    momentum: float
    weight_decay: float


def make_knobs(solver: Solver) -> Callable[..., Knobs]:
    """`knobs(iter, drops=0)` of the update that takes the stage from `iter` to `iter + 1` updates, 0 <= iter < max_iter. `drops`: how often `plateau` has dropped
    the rate by then, which depends on the loss."""
    most = len(solver.plateau_winsize) if solver.lr_policy == "plateau" else 0
    rates = [learning_rate(solver, n) for n in range(most + 1)]

    def knobs(iter: int, drops: int = 0) -> Knobs:
        return Knobs(lr=rates[drops](iter), momentum=solver.momentum, weight_decay=solver.weight_decay)

    return knobs


# -- what is known of each solver type without torch: a literal table. The arithmetic is that of `engine.solvers`, one class per type


@dataclass(frozen=True, slots=True)
class SolverType:
    """`reads`: the fields of Solver that not every type reads, and `adapt` of ParamSpec. `slots`: what is remembered from update to update; ()
    where that follows from momentum_form. `l2_alone`: published with the L2 term and no other. `divides`: by what may be 0 where delta is.
    `momentum_is`: what momentum means, and its usual value, where 0 leaves little of the type."""

    reads: tuple[str, ...]
    slots: tuple[str, ...] = ()
    l2_alone: bool = False
    divides: bool = False
    momentum_is: tuple[str, float] | None = None


# The V of a type with momentum: in Caffe's form it holds steps, in torch's gradients.
MOMENTUM_SLOT = {MomentumForm.CAFFE: "steps", MomentumForm.TORCH: "gradients"}
_ADAMS = ("momentum", "momentum2", "delta")
# Running averages of the gradient and its square, and how often they were moved.
_AVERAGES = ("mean", "squares", "t")
_BETA1 = ("beta1", 0.9)
_BOTH = ("the decay of both its averages", 0.95)

SOLVER_TYPES: dict[str, SolverType] = {
    "SGD": SolverType(("momentum", "momentum_form", "local_lr_auto")),
    "Nesterov": SolverType(("momentum", "momentum_form")),
    "AdaGrad": SolverType(("delta",), ("sum_of_squares",), divides=True),
    "RMSProp": SolverType(("rms_decay", "delta"), ("squares",), divides=True),
    "AdaDelta": SolverType(("momentum", "delta"), ("squares", "squared_steps"), divides=True, momentum_is=_BOTH),
    "Adam": SolverType(_ADAMS, _AVERAGES, divides=True, momentum_is=_BETA1),
    "AdamW": SolverType(_ADAMS, _AVERAGES, l2_alone=True, divides=True, momentum_is=_BETA1),
    "LARS": SolverType(("momentum", "momentum_form", "local_gw_ratio", "delta", "adapt"), l2_alone=True),
    "LAMB": SolverType((*_ADAMS, "adapt"), _AVERAGES, l2_alone=True, divides=True, momentum_is=_BETA1),
}


def slots_of(type: str, form: MomentumForm) -> tuple[str, ...]:
    """What the type remembers. Two types with the same slots can go on from each other's."""
    return SOLVER_TYPES[type].slots or (MOMENTUM_SLOT[form],)


def fields_read(solver: Solver) -> frozenset[str]:
    """Those of the table's fields that this stage reads."""
    read = set(SOLVER_TYPES[solver.type].reads)
    if solver.type == "SGD" and solver.local_lr_auto:
        read |= {"local_gw_ratio", "local_lr_passes", "adapt"}
    return frozenset(read)
