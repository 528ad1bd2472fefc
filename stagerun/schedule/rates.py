"""Solver -> its learning rate as a function of the iteration: how the policies are put together.

Pure, stdlib only.
"""

from dataclasses import dataclass, field, fields
from typing import Protocol

from stagerun.base.knobs import Knobs
from stagerun.base.recipe import DecayFrom, MomentumForm, Solver
from stagerun.schedule import policies, shapes
from stagerun.schedule.plateau import Plateau
from stagerun.schedule.policies import Formula, Policy, Shifted, WarmUp

POLICIES: dict[str, type[Formula]] = {**policies.CAFFES, "plateau": Plateau, **shapes.SHAPES}
# Fields that a policy reads and that are there in any case.
GIVEN = ("base_lr", "max_iter", "epoch_iter")


def policy_fields(lr_policy: str) -> tuple[str, ...]:
    """The fields of Solver that a policy reads. KeyError for an unknown policy."""
    return tuple(f.name for f in fields(POLICIES[lr_policy]))


def own_fields(lr_policy: str) -> tuple[str, ...]:
    """Those of them that say how this policy goes. KeyError for an unknown one."""
    return tuple(name for name in policy_fields(lr_policy) if name not in GIVEN)


def learning_rate(solver: Solver, drops: int = 0) -> Policy:
    """The stage's learning rate as a function of its iteration, warm-up included. `drops`: how often `plateau` has dropped it."""
    start = solver.warmup_iter if solver.decay_from is DecayFrom.WARMUP_END else 0
    length = {"max_iter": solver.max_iter - start}
    settings = {name: getattr(solver, name) for name in policy_fields(solver.lr_policy)}
    policy: Policy = POLICIES[solver.lr_policy](**settings | {k: v for k, v in length.items() if k in settings})
    if isinstance(policy, Plateau):
        policy = policies.Fixed(policy.after(drops))
    if start:
        policy = Shifted(policy, -start)
    if solver.warmup_iter:
        policy = WarmUp(policy, solver.base_lr, solver.warmup_iter, solver.warmup_start_lr)
    return Shifted(policy, solver.policy_start_iter) if solver.policy_start_iter else policy


def warm_up_end(solver: Solver) -> int:
    """The iteration of the stage whose rate is the first one of the policy; 0 without a warm-up, max_iter where all is
    warm-up."""
    return min(max(solver.warmup_iter - solver.policy_start_iter, 0), solver.max_iter)


class KnobsAt(Protocol):
    def __call__(self, iter: int, drops: int = 0) -> Knobs: ...


def make_knobs(solver: Solver) -> KnobsAt:
    """Knobs of the update that takes the stage from `iter` to `iter + 1` updates, 0 <= iter < max_iter. `drops`: how often
    `plateau` has dropped the rate by then, which depends on the loss."""
    most = len(solver.plateau_winsize) if solver.lr_policy == "plateau" else 0
    rates = [learning_rate(solver, n) for n in range(most + 1)]

    def knobs(iter: int, drops: int = 0) -> Knobs:
        return Knobs(lr=rates[drops](iter), momentum=solver.momentum, weight_decay=solver.weight_decay)

    return knobs


# -- what is known of each solver type without torch: a literal table. The arithmetic is that of `engine.solvers`, one class per type


@dataclass(frozen=True, slots=True)
class SolverType:
    """`reads`: the fields of Solver that not every type reads, and `adapt` of ParamSpec. `slots`: what is remembered from
    update to update, named by its meaning; empty where that follows from momentum_form. `l2_alone`: it was published
    with the L2 term and no other. `divides`: by what may be 0 where delta is. `momentum_is`: what momentum means, where 0
    leaves little of the type, and its usual value."""

    reads: tuple[str, ...]
    slots: tuple[str, ...] = ()
    l2_alone: bool = field(default=False, kw_only=True)
    divides: bool = field(default=False, kw_only=True)
    momentum_is: tuple[str, float] | None = field(default=None, kw_only=True)


# The V of a type with momentum: in Caffe's form it holds steps, in torch's gradients.
MOMENTUM_SLOT = {MomentumForm.CAFFE: "steps", MomentumForm.TORCH: "gradients"}
# Running averages of the gradient and its square, and how often they were moved.
AVERAGES = ("mean", "squares", "t")
BETA1 = ("beta1", 0.9)

SOLVER_TYPES: dict[str, SolverType] = {
    "SGD": SolverType(("momentum", "momentum_form", "local_lr_auto")),
    "Nesterov": SolverType(("momentum", "momentum_form")),
    "AdaGrad": SolverType(("delta",), ("sum_of_squares",), divides=True),
    "RMSProp": SolverType(("rms_decay", "delta"), ("squares",), divides=True),
    "AdaDelta": SolverType(
        ("momentum", "delta"),
        ("squares", "squared_steps"),
        divides=True,
        momentum_is=("the decay of both its averages", 0.95),
    ),
    "Adam": SolverType(("momentum", "momentum2", "delta"), AVERAGES, divides=True, momentum_is=BETA1),
    "AdamW": SolverType(("momentum", "momentum2", "delta"), AVERAGES, l2_alone=True, divides=True, momentum_is=BETA1),
    "LARS": SolverType(("momentum", "momentum_form", "local_gw_ratio", "delta", "adapt"), l2_alone=True),
    "LAMB": SolverType(
        ("momentum", "momentum2", "delta", "adapt"), AVERAGES, l2_alone=True, divides=True, momentum_is=BETA1
    ),
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
