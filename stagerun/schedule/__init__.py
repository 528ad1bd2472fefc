"""Iteration -> Knobs: the one function that plan, plot and the training loop call. Pure, stdlib only.

A learning-rate policy is a frozen class and a row of the table in `policies` (Caffe's) or `shapes` (ours), which says how to add one.
"""

from stagerun.schedule.rates import (
    POLICIES,
    SOLVER_TYPES,
    KnobsAt,
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
    "POLICIES",
    "SOLVER_TYPES",
    "KnobsAt",
    "boundaries",
    "fields_read",
    "learning_rate",
    "make_knobs",
    "own_fields",
    "parting",
    "policy_fields",
    "slots_of",
    "synchronisations",
    "warm_up_end",
]
