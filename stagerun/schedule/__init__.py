"""Knobs of an iteration: one function for plan, plot and the training loop. Pure, stdlib only."""

# ruff: noqa: F401 (its imports are its names)

from stagerun.schedule.policies import POLICIES
from stagerun.schedule.rates import (
    SOLVER_TYPES,
    Knobs,
    boundaries,
    fields_read,
    learning_rate,
    make_knobs,
    own_fields,
    parting,
    policy_fields,
    slots_of,
    synchronisations,
    warm_up_end,
)
