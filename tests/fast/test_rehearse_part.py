"""`rehearse --only`: which stages and ensembles are rehearsed."""

import pytest

from stagerun.language import read
from stagerun.plan.choice import choice
from stagerun.tools.rehearse.schedule import part_of

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
    ("only", "stages", "ensembles"),
    [
        (["trunk"], "trunk", ""),
        (["cool_trunk_40"], "trunk cool_trunk_40", ""),
        (["cool"], "trunk cool_trunk_40 cool_trunk", ""),  # a group
        (["taught"], "big trunk taught", ""),
        (["fine"], "trunk cool_trunk_40 fine", "late"),
    ],
)
def test_the_part_has_what_its_stages_need(only, stages, ensembles):
    schedule = read({"schedule.prototxt": SCHEDULE}, "/part")
    part = part_of(schedule, choice(schedule, (), only, None).chosen)
    assert [stage.name for stage in part.stages] == stages.split()
    assert [ensemble.name for ensemble in part.ensembles] == ensembles.split()
