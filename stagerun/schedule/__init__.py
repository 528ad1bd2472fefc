"""Iteration -> Knobs: the one function that plan, plot and the training loop call. Pure, stdlib only.

A learning-rate policy is a frozen class and a row of the table in `policies` (Caffe's) or `shapes` (ours), which says how to add one.
"""

from stagerun.schedule.rates import (
    CURVES,
    POLICIES,
    SOLVER_TYPES,
    KnobsAt,
    curve_fields,
    fields_read,
    is_ever,
    learning_rate,
    make_knobs,
    moving,
    own_fields,
    policy_fields,
    slots_of,
    warm_up_end,
)
from stagerun.schedule.sync import boundaries, parting, synchronisations

__all__ = [
    "CURVES",
    "POLICIES",
    "SOLVER_TYPES",
    "KnobsAt",
    "boundaries",
    "curve_fields",
    "fields_read",
    "is_ever",
    "learning_rate",
    "make_knobs",
    "moving",
    "own_fields",
    "parting",
    "policy_fields",
    "slots_of",
    "synchronisations",
    "warm_up_end",
]
