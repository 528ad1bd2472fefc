"""Errors of meaning in what moves the weights: settings that a solver type has no form for, momentum that can't go on. Pure."""

import contextlib

from stagerun import schedule
from stagerun.errors import listing
from stagerun.recipe import MomentumForm
from stagerun.spec.layers import higher
from stagerun.spec.problems import Problems
from stagerun.spec.view import Doubtful, View


def check_local_rate(stage: str, view: View, problems: Problems) -> None:
    """Caffe has layer-wise rates in its SGD only."""
    kind = view.text("type")
    if kind != "SGD" and view.flag("local_lr_auto"):
        message = f"`local_lr_auto` goes with type `SGD`, not with `{kind}`"
        problems.add(higher(view, "local_lr_auto", "type"), message, "write `local_lr_auto: false`")


def check_regularisation(stage: str, view: View, problems: Problems) -> None:
    """What is published of some types has the L2 term alone."""
    kind = view.text("type")
    if kind is not None and schedule.SOLVER_TYPES[kind].l2_alone and view.text("regularization_type") == "L1":
        message = f"type `{kind}` has no form with `regularization_type` `L1`"
        problems.add(higher(view, "regularization_type", "type"), message, 'write `regularization_type: "L2"`')


def check_carry(stage: str, view: View, parent: str, before: View, problems: Problems) -> None:
    """Momentum can go on only where what is remembered means the same."""
    with contextlib.suppress(Doubtful):
        if view.inside("carry").text("momentum") != "KEEP":
            return
        (kind, form), (old_kind, old_form) = _type(view), _type(before)
        if schedule.slots_of(kind, form) == schedule.slots_of(old_kind, old_form):
            return
        if schedule.slots_of(kind, form) == schedule.slots_of(old_kind, form):
            what = f"`momentum_form` is {old_form.value} and not {form.value}"
            hint = "the same `momentum_form`"
        else:
            fitting = [t for t in schedule.SOLVER_TYPES if schedule.slots_of(t, form) == schedule.slots_of(kind, form)]
            what = f"type `{old_kind}` remembers something else than `{kind}`"
            hint = f"give both type {listing(fitting)}"
        place = view.view("carry") or view
        message = f"stage `{stage}` keeps the momentum of `{parent}`, whose {what}"
        problems.add(place.place("momentum"), message, f"write `carry {{ momentum: ZERO }}`, or {hint}")


def _type(view: View) -> tuple[str, MomentumForm]:
    kind = view.text("type")
    assert kind is not None
    return kind, MomentumForm(view.text("momentum_form"))
