"""Iteration -> Knobs: the one function that plan, plot and the training loop call. Pure, stdlib only.

A learning-rate policy is a function and a row of a table in `policies`, which says how to add one.
"""

from stagerun.schedule.policies import POLICIES
from stagerun.schedule.rates import (
    SOLVER_TYPES,
    Knobs,
    fields_read,
    learning_rate,
    make_knobs,
    own_fields,
    policy_fields,
    slots_of,
    warm_up_end,
)
from stagerun.schedule.sync import boundaries, parting, synchronisations

__all__ = [
    "POLICIES", "SOLVER_TYPES", "Knobs", "boundaries", "fields_read", "learning_rate", "make_knobs", "own_fields", "parting", "policy_fields",
    "slots_of", "synchronisations", "warm_up_end",
]  # fmt: skip
