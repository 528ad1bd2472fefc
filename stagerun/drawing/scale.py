"""The axis of the learning rate: logarithmic or not, and where a rate stands on it. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from stagerun.drawing.picture import Picture

# A logarithmic axis has so many decades at most: a rate that decays to zero would need any number of them.
DECADES = 4
# By default an axis is logarithmic if a fifth of all iterations have less than a fiftieth of the largest rate.
LOW, SHARE = 1 / 50, 1 / 5


@dataclass(frozen=True, slots=True)
class Scale:
    """`low` and `high`: ends of the axis. `hidden`: some rates are below `low` of a logarithmic axis, zero among them; they
    are drawn on it."""

    log: bool
    low: float
    high: float
    hidden: bool = False

    def at(self, lr: float) -> float:
        """What is linear along the axis: the rate, or its logarithm to base 10."""
        return math.log10(max(lr, self.low)) if self.log else lr

    @property
    def remark(self) -> str:
        """What it does not show, or ''."""
        return f"rates below {self.low:.2g} are drawn at the lower edge" if self.hidden else ""

    def ticks(self, most: int) -> list[float]:
        """Round rates, `most` or fewer."""
        if not self.log:
            return round_steps(self.low, self.high, most)
        first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
        for factors in ((1, 2, 5), (1,)):
            found = [f * 10.0**d for d in range(first - 1, last + 1) for f in factors]
            found = [v for v in found if self.low * 0.999 <= v <= self.high * 1.001]
            if len(found) <= most:
                return found
        step = -(-len(found) // most)
        return found[::step]


def make_scale(picture: Picture, log: bool | None = None) -> Scale:
    """`log`: as asked; None decides by the rates."""
    rates = [point.lr for stage in picture.stages for point in stage.points]
    high, low = max(rates), min(rates)
    positive = [rate for rate in rates if rate > 0]
    if log is None:
        log = _falls_far(picture, high)
    if log and positive:
        least = max(min(positive), high / 10**DECADES)
        bottom, top = math.log10(least), math.log10(high)
        margin = max(0.02, 0.04 * (top - bottom))
        return Scale(True, 10 ** (bottom - margin), 10 ** (top + margin), hidden=low < least)
    margin = 0.06 * (max(high, 0) - min(low, 0)) or 1.0
    return Scale(False, min(low - margin, 0) if low < 0 else 0.0, max(high, 0) + margin)


def _falls_far(picture: Picture, high: float) -> bool:
    """By the iterations between two points, which are drawn as a line: each has the rate of the one before it."""
    whole = sum(stage.iterations for stage in picture.stages)
    low = 0
    for stage in picture.stages:
        ends = [point.iter for point in stage.points[1:]] + [stage.iterations]
        low += sum(end - p.iter for p, end in zip(stage.points, ends, strict=True) if p.lr < high * LOW)
    return low > SHARE * whole


def round_steps(low: float, high: float, most: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten between `low` and `high`, `most` or fewer, two at least."""
    if not high > low:
        return [low]
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(power * f for f in (1, 2, 5, 10, 20) if math.floor((high - low) / (power * f)) + 1 <= most)
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]


def labels(values: Sequence[float]) -> list[str]:
    """As short as they can be and still differ, thousands and millions by their letter."""
    largest = max((abs(v) for v in values), default=0.0)
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if largest >= unit:
            by = unit if letter != "k" else 1e3
            return ["0" if v == 0 else f"{v / by:.6g}{letter}" for v in values]
    return [f"{v:.6g}" for v in values]
