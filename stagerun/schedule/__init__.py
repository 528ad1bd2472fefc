"""Iteration -> Knobs: the one function that plan, plot and the training loop call. Pure, stdlib only."""

from collections.abc import Callable
from dataclasses import fields

from stagerun.knobs import Knobs
from stagerun.recipe import Solver
from stagerun.schedule.policies import POLICIES, Policy, WarmUp
from stagerun.schedule.solver_types import SOLVER_TYPES, fields_read, slots_of

__all__ = ["POLICIES", "SOLVER_TYPES", "fields_read", "learning_rate", "make_knobs", "policy_fields", "slots_of"]


def policy_fields(lr_policy: str) -> tuple[str, ...]:
    """The fields of Solver that a policy reads. KeyError for an unknown policy."""
    return tuple(f.name for f in fields(POLICIES[lr_policy]))


def learning_rate(solver: Solver) -> Policy:
    """The stage's learning rate as a function of its iteration, warm-up included."""
    kind = POLICIES[solver.lr_policy]
    policy: Policy = kind(**{name: getattr(solver, name) for name in policy_fields(solver.lr_policy)})
    if solver.warmup_iter:
        policy = WarmUp(policy, solver.base_lr, solver.warmup_iter, solver.warmup_start_lr)
    return policy


def make_knobs(solver: Solver) -> Callable[[int], Knobs]:
    """Knobs of the update that takes the stage from `iter` to `iter + 1` updates, 0 <= iter < max_iter."""
    rate = learning_rate(solver)

    def knobs(iter: int) -> Knobs:
        return Knobs(lr=rate(iter), momentum=solver.momentum, weight_decay=solver.weight_decay)

    return knobs
