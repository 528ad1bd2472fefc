"""A stage whose `max_iter` was raised goes on from its end unless that depends on its length; `test_plan_cases` shows those below it."""

import pytest
from test_plan_cases import Played

SCHEDULE = """
name: "raised"
model { name: "resnet_small" num_classes: 10 }
data { train { source: "/d/train" images: 1000 } val { source: "/d/val" images: 100 } }
solver { batch_size: 100 device_batch_size: 50 transform_param { crop_size: 28 } base_lr: 0.1 }
stage { name: "trunk" solver_param { max_iter: 20 TRUNK } }
"""
FIXED = 'lr_policy: "fixed"'


def raised(trunk: str) -> Played:
    """A stage that has ended, and then has 30 iterations in place of 20."""
    one = Played({"schedule.prototxt": SCHEDULE.replace("TRUNK", trunk)})
    one.trained("trunk@12", "trunk")
    one.lost("trunk@12") if "sync_param" in trunk else None  # from where replicas can go on
    one.edit("max_iter: 20", "max_iter: 30")
    return one


@pytest.mark.parametrize(
    "trunk",
    [
        FIXED + " warmup_iter: 5 warmup_start_lr: 0.01 ema_decay: 0.9",
        'lr_policy: "step" gamma: 0.1 stepsize: 15',
        'lr_policy: "multistep" gamma: 0.1 stepvalue: [10, 25]',
        'lr_policy: "poly_cyc" power: 1 lr_iter: 40',
        'lr_policy: "poly_cyc" power: 1 lr_iter: 40 warmup_iter: 5 decay_from: WARMUP_END',
        'lr_policy: "exp_epoch" gamma: 0.9',
        'lr_policy: "piecewise_linear" knot { iter: 0 factor: 1 } knot { iter: 40 factor: 0 }',
        'lr_policy: "plateau" gamma: 0.1 plateau_winsize: [5]',
        FIXED + " test_interval: 5 early_stop { metric: TOP1 patience_iter: 10 }",
        FIXED + " compress_param { method: TOP_K ratio: 0.1 }",
        FIXED + " transform_param { crop_size: 64 crop_size_ramp_param { start_size: 32 end_epoch: 2.5 } }",
    ],
)
def test_what_does_not_depend_on_the_length_goes_on(trunk):
    one = raised(trunk)
    assert one.said("run") == "trunk from 20\n"
    assert "continues from iteration 20 to 30, from trunk-00000020-a0001; max_iter 20 -> 30" in one.said("plan")
    # Longer still, when it is half way there.
    one.trained("trunk@25")
    one.edit("max_iter: 30", "max_iter: 40")
    assert one.said("run") == "trunk from 25\n"


@pytest.mark.parametrize(
    "trunk, why",
    [
        ('lr_policy: "poly" power: 2', "lr_policy `poly` reads max_iter"),
        ('lr_policy: "linear"', "lr_policy `linear` reads max_iter"),
        ('lr_policy: "cosine" warmup_iter: 5', "lr_policy `cosine` reads max_iter"),
        ('lr_policy: "one_minus_sqrt"', "lr_policy `one_minus_sqrt` reads max_iter"),
        (FIXED + " sync_param { method: LOCAL replicas: 2 period: 4 }", "its replicas became one at its end, iteration 20"),
        (FIXED + " sync_param { method: DILOCO replicas: 2 period: 5 }", "its replicas became one at its end"),
        (FIXED + " sync_param { method: ASYNC replicas: 2 max_staleness: 4 }", "its replicas became one at its end"),
    ],
)  # fmt: skip
def test_what_does_is_stale_and_says_why(trunk, why):
    one = raised(trunk)
    said = one.said("run")
    assert "it can't continue from its snapshots" in said and why in said and "max_iter 20 -> 30" in said
    assert one.said("run", "--redo", "trunk") == "trunk from 0\n"
