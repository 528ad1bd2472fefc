"""What is known of each solver type without torch: a literal table. The arithmetic is `engine.solvers`', one class per type."""

from dataclasses import dataclass, field

from stagerun.recipe import MomentumForm, Solver


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
        read |= {"local_gw_ratio", "adapt"}
    return frozenset(read)
