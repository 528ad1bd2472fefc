"""What each solver type reads and remembers: a literal table. The arithmetic is `engine.solvers`', one class per type."""

from dataclasses import dataclass

from stagerun.recipe import MomentumForm, Solver


@dataclass(frozen=True, slots=True)
class SolverType:
    """`reads`: the fields of Solver that not every type reads, and `adapt` of ParamSpec. `slots`: what is remembered from
    update to update, named by its meaning; empty where that follows from momentum_form."""

    reads: tuple[str, ...]
    slots: tuple[str, ...] = ()


# The V of a type with momentum: in Caffe's form it holds steps, in torch's gradients.
MOMENTUM_SLOT = {MomentumForm.CAFFE: "steps", MomentumForm.TORCH: "gradients"}
# Running averages of the gradient and its square, and how often they were moved.
AVERAGES = ("mean", "squares", "t")

SOLVER_TYPES: dict[str, SolverType] = {
    "SGD": SolverType(("momentum", "momentum_form", "local_lr_auto")),
    "Nesterov": SolverType(("momentum", "momentum_form")),
    "AdaGrad": SolverType(("delta",), ("sum_of_squares",)),
    "RMSProp": SolverType(("rms_decay", "delta"), ("squares",)),
    "AdaDelta": SolverType(("momentum", "delta"), ("squares", "squared_steps")),
    "Adam": SolverType(("momentum", "momentum2", "delta"), AVERAGES),
    "AdamW": SolverType(("momentum", "momentum2", "delta"), AVERAGES),
    "LARS": SolverType(("momentum", "momentum_form", "local_gw_ratio", "delta", "adapt")),
    "LAMB": SolverType(("momentum", "momentum2", "delta", "adapt"), AVERAGES),
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
