"""What the plan says of a stage's solver type: its settings in words, fields that are written and not read."""

import pytest
from test_plan import SCHEDULE, schedule

from stagerun.base.recipe import Schedule
from stagerun.base.snapshots import Inventory
from stagerun.plan import make_plan
from stagerun.plan.hazards import notes
from stagerun.plan.render import render_text
from stagerun.schedule import POLICIES, SOLVER_TYPES, own_fields

START = 'base_lr: 0.1 lr_policy: "poly" power: 1 max_iter: 2000'
ADAM = 'type: "Adam" momentum: 0.9'


def trunk(solver: str, shared: str = SCHEDULE) -> Schedule:
    return schedule(shared=shared, trunk=solver)


def said(solver: str, shared: str = SCHEDULE) -> list[str]:
    s = trunk(solver, shared)
    return notes(s, s.stage("trunk"))


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
    lines = render_text(make_plan(trunk(f"{START} {solver}"), Inventory())).splitlines()
    assert f"  batch 100 = 2 x 50, {words}" in lines


@pytest.mark.parametrize(
    "solver, note",
    [
        (
            "test_iter: 5",
            "test_iter is not read: there is no test_interval, and the evaluation after a stage covers every image (trunk.prototxt:2)",
        ),
        (
            "ema_decay: 0.9999",
            "81.9 % of the average at the stage's end (0.9999^2000) are the weights that it starts with (trunk.prototxt:2)",
        ),
        ("momentum2: 0.9", "momentum2 is not read by type SGD (trunk.prototxt:2)"),
        ("local_gw_ratio: 0.1", "local_gw_ratio is not read by type SGD without local_lr_auto (trunk.prototxt:2)"),
        ("local_lr_passes: 4", "local_lr_passes is not read: local_lr_auto is false (trunk.prototxt:2)"),
        ('type: "RMSProp" momentum: 0.9', "momentum is not read by type RMSProp (trunk.prototxt:2)"),
        ("gamma: 0.1", "gamma is not read by lr_policy poly (trunk.prototxt:2)"),
        ("warmup_start_lr: 0.1", "warmup_start_lr is not read: there is no warm-up (trunk.prototxt:2)"),
        ('regularization_type: "L1"', "regularization_type is not read: weight_decay is 0 (trunk.prototxt:2)"),
        ("ema_interval: 5", "ema_interval is not read: there is no ema_decay (trunk.prototxt:2)"),
        ("param { kind: NORM adapt: false }", "adapt of param `*` is not read by type SGD (trunk.prototxt:2)"),
        (
            'local_lr_auto: true param { name: "fc.*" lr_mult: 2 } param { adapt: false lr_mult: 2 }',
            "lr_mult 2 of param `fc.*` is replaced by local_lr_auto (trunk.prototxt:2)",
        ),
        ('type: "LAMB"', "momentum is 0, and beta1 of type LAMB: 0.9 is usual"),
        ('type: "AdaDelta"', "momentum is 0, and the decay of both its averages of type AdaDelta: 0.95 is usual"),
        (f"{ADAM} delta: 0", "delta is 0: a weight without a gradient divides 0 by 0 (trunk.prototxt:2)"),
    ],
)
def test_what_says_nothing_is_pointed_at_with_its_place(solver: str, note: str) -> None:
    assert said(f"{START}\n{solver}") == [note]


@pytest.mark.parametrize(
    "solver",
    [
        "",
        'type: "LARS" delta: 0 momentum_form: TORCH local_gw_ratio: 0.01 param { adapt: false }',
        "local_lr_auto: true local_gw_ratio: 0.01 param { adapt: false lr_mult: 2 } param { lr_mult: 0 }",
        'type: "LAMB" momentum: 0.9 momentum2: 0.99 delta: 1e-6 param { adapt: false }',
        'type: "RMSProp" rms_decay: 0.9 delta: 1e-6 weight_decay: 1e-4 regularization_type: "L1"',
        "ema_decay: 0.9 ema_interval: 50",
    ],
)
def test_what_is_read_is_not_pointed_at(solver: str) -> None:
    assert said(f"{START}\n{solver}") == []


def test_a_field_of_all_stages_is_pointed_at_where_it_is_written() -> None:
    shared = SCHEDULE.replace("batch_size: 100", "momentum2: 0.9\nbatch_size: 100")
    line = shared.splitlines().index("solver { momentum2: 0.9") + 1
    assert said(START, shared) == [f"momentum2 is not read by type SGD (schedule.prototxt:{line})"]


def test_every_field_of_the_tables_is_a_field_of_the_language() -> None:
    fields = {f.removeprefix("solver.") for f in schedule().stage("trunk").origins}
    assert {name for kind in SOLVER_TYPES.values() for name in kind.reads} - {"adapt"} <= fields
    assert {name for kind in POLICIES for name in own_fields(kind)} <= fields
