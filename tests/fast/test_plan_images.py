"""What the plan says of the images of a stage: changes in words."""

from test_plan import STAGES, schedule

from stagerun.base.recipe import ChannelOrder, PadMode, Transform
from stagerun.base.snapshots import Inventory
from stagerun.plan import make_plan
from stagerun.plan.described import augmentation_changes
from stagerun.plan.render import render_text


def test_a_change_of_an_enum_is_its_value() -> None:
    changes = augmentation_changes(
        Transform(pad=4), Transform(pad_mode=PadMode.REFLECT, channel_order=ChannelOrder.RGB)
    )
    assert changes == ["pad 4 -> 0", "pad_mode ZERO -> REFLECT", "channel_order BGR -> RGB"]
    s = schedule(long=STAGES["long"] + "transform_param { crop_size: 28 channel_order: RGB }")
    assert "  augmentation: channel_order BGR -> RGB" in render_text(make_plan(s, Inventory())).splitlines()
