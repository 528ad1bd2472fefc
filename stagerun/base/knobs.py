"""What a schedule turns from iteration to iteration. A value; no I/O."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Knobs:
    """The settings of one weight update: learning rate, momentum, factor of the L2 term (before multipliers)."""

    lr: float
    momentum: float
    weight_decay: float
