"""What the plan says of a stage's solver type: its settings in words."""

import pytest
from test_plan import schedule

from stagerun.base.snapshots import Inventory
from stagerun.plan import make_plan
from stagerun.plan.render import render_text
from stagerun.schedule import POLICIES, SOLVER_TYPES, own_fields

START = 'base_lr: 0.1 lr_policy: "poly" power: 1 max_iter: 2000'
ADAM = 'type: "Adam" momentum: 0.9'


@pytest.mark.parametrize(
    "solver, words",
    [
        ("", "SGD, momentum 0, poly"),
        ('type: "Nesterov" momentum: 0.9 momentum_form: TORCH', "Nesterov, momentum 0.9, momentum_form TORCH, poly"),
        ("momentum: 0.9 local_lr_auto: true", "SGD, momentum 0.9, local_lr_auto 0.001, poly"),
        ('type: "RMSProp" rms_decay: 0.9', "RMSProp, rms_decay 0.9, poly"),
        (f"{ADAM} momentum2: 0.99", "Adam, momentum 0.9, momentum2 0.99, poly"),
        ('type: "LARS" local_gw_ratio: 0.002', "LARS, momentum 0, local_gw_ratio 0.002, poly"),
        ("ema_decay: 0.99 ema_interval: 5", "SGD, momentum 0, EMA 0.99 every 5 iterations, poly"),
    ],
)
def test_what_matters_for_the_type_is_shown(solver: str, words: str) -> None:
    lines = render_text(make_plan(schedule(trunk=f"{START} {solver}"), Inventory())).splitlines()
    assert f"  batch 100 = 2 x 50, {words}" in lines


def test_every_field_of_the_tables_is_a_field_of_the_language() -> None:
    fields = {f.removeprefix("solver.") for f in schedule().stage("trunk").origins}
    assert {name for kind in SOLVER_TYPES.values() for name in kind.reads} - {"adapt"} <= fields
    assert {name for kind in POLICIES for name in own_fields(kind)} <= fields
