"""Checked settings -> what recipe.Solver has of learning rate, momentum and weight decay. Pure."""

from fractions import Fraction
from typing import Any

from stagerun import recipe
from stagerun.spec.build_transform import number, whole
from stagerun.spec.values import RATES
from stagerun.spec.view import View


def rate_settings(view: View, images: int | None) -> dict[str, Any]:
    """Those fields of Solver that the learning rate depends on. `images`: of an epoch. OverflowError where `base_lr_batch` makes
    a rate too large for a double."""
    batch, base = whole(view, "batch_size"), view.whole("base_lr_batch")
    return {
        **{name: scaled(number(view, name), batch, base) for name in RATES},
        "lr_policy": view.text("lr_policy"),
        "max_iter": whole(view, "max_iter"),
        "batch_size": batch,
        "power": view.number("power"),
        "gamma": view.number("gamma"),
        "stepsize": view.whole("stepsize"),
        "stepvalue": tuple(int(v) for v in view.numbers("stepvalue")),
        "lr_iter": view.whole("lr_iter"),
        "warmup_iter": view.whole("warmup_iter") or 0,
        "decay_from": recipe.DecayFrom(view.text("decay_from")),
        "policy_start_iter": view.whole("policy_start_iter") or 0,
        "peak_iter": view.whole("peak_iter"),
        "knot": knots(view),
        "plateau_winsize": tuple(int(v) for v in view.numbers("plateau_winsize")),
        "average_loss": whole(view, "average_loss"),
        "epoch_iter": None if images is None else images / batch,
    }


def scaled(rate: float, batch: int, base: int | None) -> float:
    """A learning rate for `base` images as one for `batch`: linear scaling (Goyal et al., arXiv:1706.02677), on the decimal
    number as written, rounded once.

    >>> scaled(0.256, 2048, 256), 0.1 * 3 / 1, scaled(0.1, 3, 1)
    (2.048, 0.30000000000000004, 0.3)
    """
    return rate if base is None else float(Fraction(repr(rate)) * batch / base)


def knots(view: View) -> tuple[recipe.Knot, ...]:
    return tuple(recipe.Knot(iter=number(k, "iter"), factor=number(k, "factor")) for k in view.views("knot"))


def curve(view: View, name: str) -> recipe.Curve | None:
    found = view.view(name)
    if found is None:
        return None
    policy = found.text("policy")
    assert policy is not None
    return recipe.Curve(
        policy=policy,
        end_value=number(found, "end_value"),
        power=found.number("power"),
        gamma=found.number("gamma"),
        knot=knots(found),
    )
