"""What the plan says of the images of a stage: changes in words, and an evaluation that differs from training."""

import pytest
from test_plan import SCHEDULE, STAGES, schedule

from stagerun.base.recipe import ChannelOrder, PadMode, Transform
from stagerun.base.snapshots import Inventory
from stagerun.plan import make_plan
from stagerun.plan.described import augmentation_changes
from stagerun.plan.hazards import notes
from stagerun.plan.render import render_text

WITH_VAL = SCHEDULE.replace("images: 1000 }", 'images: 1000 } val { source: "/d/val" images: 100 }')
TRAIN = "transform_param { channel_order: RGB mean_value: [124, 117, 104] std_value: 58 scale: 0.5 crop_size: 28 }\n"


def said(test: str, train: str = TRAIN, shared: str = WITH_VAL) -> list[str]:
    s = schedule(shared=shared, trunk=f"{STAGES['trunk']}{train}{test}")
    return [note for note in notes(s, s.stage("trunk")) if "an evaluation" in note]


def test_a_change_of_an_enum_is_its_value() -> None:
    changes = augmentation_changes(
        Transform(pad=4), Transform(pad_mode=PadMode.REFLECT, channel_order=ChannelOrder.RGB)
    )
    assert changes == ["pad 4 -> 0", "pad_mode ZERO -> REFLECT", "channel_order BGR -> RGB"]
    s = schedule(long=STAGES["long"] + "transform_param { crop_size: 28 channel_order: RGB }")
    assert "  augmentation: channel_order BGR -> RGB" in render_text(make_plan(s, Inventory())).splitlines()


@pytest.mark.parametrize(
    "test, expected",
    [
        (
            "channel_order: BGR mean_value: [124, 117, 104] std_value: 58 scale: 0.5",
            ["channel_order BGR, training RGB"],
        ),
        ("channel_order: RGB std_value: 58 scale: 0.5", ["mean_value 0, training 124 117 104"]),
        (
            "channel_order: RGB mean_value: [124, 117, 104] std_value: [57, 58, 59]",
            ["std_value 57 58 59, training 58", "scale 1, training 0.5"],
        ),
    ],
)
def test_other_numbers_in_an_evaluation_are_pointed_at(test: str, expected: list[str]) -> None:
    found = said(f"test_transform_param {{ crop_size: 28\n{test} }}")
    assert [note.partition(":")[0].removeprefix("an evaluation has ") for note in found] == expected
    assert "(trunk.prototxt:" in found[0], "where the one or the other is written"


def test_the_same_numbers_written_otherwise_are_the_same() -> None:
    same = "channel_order: RGB mean_value: [124, 117, 104] std_value: [58, 58, 58] scale: 5e-1 crop_size: 20"
    assert said(f"test_transform_param {{ {same} }}") == []
    assert said("") == [] == said("test_transform_param { mean_value: 0 std_value: [1, 1, 1] }", "")
    assert said("test_transform_param { scale: 2 }", shared=SCHEDULE) == [], "nothing is evaluated"


RESIZES = "transform_param { crop_size: 28 random_resized_crop_param { } }\n"


def test_an_evaluation_that_does_not_resize_is_pointed_at_where_training_does() -> None:
    (note,) = said("", RESIZES)
    assert "it shows the centre 28 x 28 pixels of each as it is stored" in note
    assert said("test_transform_param { crop_size: 28 random_resize_param { min_size: 32 } }", RESIZES) == []
