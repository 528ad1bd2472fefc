"""`rehearse --only` and `--until`: which stages and ensembles are rehearsed."""

import pytest

from stagerun.language import read
from stagerun.plan.choice import choice
from stagerun.tools.rehearse.command import part_of

SCHEDULE = """
name: "part" model { name: "resnet_small" num_classes: 10 }
data { train { source: "/d/train" images: 1000 } val { source: "/d/val" images: 1000 } }
solver { batch_size: 100 device_batch_size: 50 base_lr: 0.1 lr_policy: "fixed" max_iter: 80 transform_param { crop_size: 28 } }
stage { name: "big" solver_param {} }
stage { name: "trunk" from: "" solver_param {} }
stage { name: "taught" from: "trunk@20" solver_param { loss { type: DISTILL teacher: "big" } } }
stage { name: "cool" from: ["trunk@40", "trunk"] solver_param {} }
ensemble { name: "late" members: ["trunk@40", "cool_trunk_40"] rule: WEIGHT_AVERAGE }
ensemble { name: "both" members: "cool" }
ensemble { name: "early" members: ["trunk@20", "trunk@40"] }
stage { name: "fine" from: "late" solver_param {} }
"""


@pytest.mark.parametrize(
    ("only", "until", "stages", "ensembles"),
    [
        (["trunk"], None, "trunk", "early"),
        (["cool_trunk_40"], None, "trunk cool_trunk_40", "late"),
        (["cool_trunk"], None, "trunk cool_trunk", ""),
        (["cool"], None, "trunk cool_trunk_40 cool_trunk", "late both"),  # a group
        (["taught"], None, "big trunk taught", ""),
        (["fine"], None, "trunk cool_trunk_40 fine", "late"),
        ([], "trunk", "big trunk", "early"),
    ],
)
def test_the_part_has_what_its_stages_need(only, until, stages, ensembles):
    schedule = read({"schedule.prototxt": SCHEDULE}, "/part")
    part = part_of(schedule, choice(schedule, (), only, until).chosen)
    assert [stage.name for stage in part.stages] == stages.split()
    assert [ensemble.name for ensemble in part.ensembles] == ensembles.split()
