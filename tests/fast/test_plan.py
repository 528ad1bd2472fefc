"""What a plan comes to, in iterations and epochs; `test_plan_cases` shows which stages it finds done, stale, or where they go on."""

import json

import pytest
from facade import Inventory, Schedule, SnapshotRef, render_json, render_text
from made_schedules import snapshot as snapshot

from stagerun.language import read
from stagerun.plan import make_plan

SCHEDULE = """
name: "tree"
model { name: "resnet_small" num_classes: 10 }
data { train { source: "/d/train" images: 1000 } }
solver { batch_size: 100 device_batch_size: 50 transform_param { crop_size: 28 } }
stage { name: "trunk" }
stage { name: "long" }
stage { name: "collapse" from: "long" }
stage { name: "early" from: "trunk" }
"""
STAGES = {
    "trunk": 'base_lr: 0.1\nlr_policy: "fixed"\nmax_iter: 20\n',
    "long": 'base_lr: 0.1\nlr_policy: "fixed"\nmax_iter: 30\n',
    "collapse": 'base_lr: 0.1\nlr_policy: "poly"\npower: 2\nmax_iter: 10\n',
    "early": 'base_lr: 0.1\nlr_policy: "poly"\npower: 1\nmax_iter: 5\n',
}


def schedule(*, shared: str = SCHEDULE, **stages: str) -> Schedule:
    """The tree, with other files for some stages."""
    texts = {"schedule.prototxt": shared.encode()}
    texts |= {f"{name}.prototxt": text.encode() for name, text in {**STAGES, **stages}.items()}
    return read(texts, "/s", [])


def inventory(*refs: SnapshotRef) -> Inventory:
    return Inventory(tuple(sorted(refs, key=lambda r: (r.attempt, r.iter, r.stage))))


def test_json_has_the_least_where_a_stage_may_end_early() -> None:
    shared = SCHEDULE.replace("images: 1000 }", 'images: 1000 } val { source: "/d/val" images: 100 }')
    stops = STAGES["long"] + "test_interval: 4 early_stop { metric: LOSS patience_iter: 6 }"
    whole = json.loads(render_json(make_plan(schedule(shared=shared, long=stops), Inventory())))
    assert (whole["least_iterations"], whole["iterations"], whole["least_iterations_left"]) == (47, 65, 47)
    without = json.loads(render_json(make_plan(schedule(), Inventory())))
    assert not [name for name in (*without, *without["stages"][0]) if "least" in name]


def test_a_change_of_an_enum_is_its_value() -> None:
    pixels = "transform_param { crop_size: 28 channel_order: RGB pad: 4 pad_mode: REFLECT }"
    text = render_text(make_plan(schedule(long=STAGES["long"] + pixels), Inventory()))
    assert "  augmentation: pad 0 -> 4, pad_mode ZERO -> REFLECT, channel_order BGR -> RGB" in text.splitlines()


@pytest.mark.parametrize(
    "solver, words",
    [
        ("", "SGD, momentum 0, poly"),
        ('type: "Nesterov" momentum: 0.9 momentum_form: TORCH', "Nesterov, momentum 0.9, momentum_form TORCH, poly"),
        ("momentum: 0.9 local_lr_auto: true", "SGD, momentum 0.9, local_lr_auto 0.001, poly"),
        ('type: "RMSProp" rms_decay: 0.9', "RMSProp, rms_decay 0.9, poly"),
        ('type: "Adam" momentum: 0.9 momentum2: 0.99', "Adam, momentum 0.9, momentum2 0.99, poly"),
        ('type: "LARS" local_gw_ratio: 0.002', "LARS, momentum 0, local_gw_ratio 0.002, poly"),
        ("ema_decay: 0.99 ema_interval: 5", "SGD, momentum 0, EMA 0.99 every 5 iterations, poly"),
    ],
)
def test_what_matters_for_the_type_is_shown(solver: str, words: str) -> None:
    poly = f'base_lr: 0.1 lr_policy: "poly" power: 1 max_iter: 20 {solver}'
    lines = render_text(make_plan(schedule(trunk=poly), Inventory())).splitlines()
    assert f"  batch 100 = 2 x 50, {words}" in lines
